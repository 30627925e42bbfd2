"""Gemma 3n, the text model on its own: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.config_keys import CAUSAL
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import GLOBAL_ROPE, PLAIN_ROPE, Rope
from tpuconv.models.common.rows import SANDWICH_NORMS, decoder_table
from tpuconv.models.common.shared_keys import SharedKeysConfig
from tpuconv.models.common.windows import ROPES_BY_KIND, read_older_ropes
from tpuconv.models.gemma4_text.family import (
    ATTENTION_OF_LAYERS,
    INPUTS_OF_LAYERS,
    LAYER_INPUTS,
    MLP_OF_LAYERS,
    SHARED_ALREADY,
)
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    side_streams=Word("residual streams besides the first"),
    laurel_rank=Word("rank of the low-rank residual"),
)

SPARSE_LAYERS, SPARSITY = 10, 0.95
"""The sparse layers of a config.json that does not name them, if it has more layers: the first ones."""


@family_config
class Config(SharedKeysConfig):
    """The keys of config.json. `intermediate_size` is the width of each layer's MLP, of which there may be two, and
    `activation_sparsity_pattern` the part of its gates that are 0."""

    model_type: ClassVar[str] = "gemma3n_text"
    full_every: ClassVar[int] = 5
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND
    derived: ClassVar[frozenset[str]] = SharedKeysConfig.derived | {"local_rope"}
    only: ClassVar = {
        **CAUSAL,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh", None),  # without effect
        "attention_bias": (False,),
    }
    least: ClassVar[Mapping[str, int]] = {"num_kv_shared_layers": 0, "altup_active_idx": 0, "altup_num_inputs": 2}
    # Of training, and the factor of scores, which is 1 whatever it says.
    left_out: ClassVar[frozenset[str]] = frozenset({"altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"})

    intermediate_size: int | tuple[int, ...]  # type: ignore[assignment]
    rope: Rope = GLOBAL_ROPE
    local_rope: Rope = PLAIN_ROPE
    rope_local_base_freq: float = 1e4
    laurel_rank: int
    altup_num_inputs: int
    altup_active_idx: int
    altup_correct_scale: bool
    activation_sparsity_pattern: tuple[float, ...] | None

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return read_older_ropes(cls, raw, context)

    def contradictions(self) -> Iterator[str]:
        layers = self.num_hidden_layers
        for name, values in (("intermediate_size", self.widths), ("activation_sparsity_pattern", self.sparsities)):
            if len(values) != layers:
                yield f"{name} has {len(values)} entries for num_hidden_layers={layers}"
        if any(not 1 <= width <= self._most("intermediate_size") for width in self.widths):
            yield f"intermediate_size has widths from {min(self.widths)} to {max(self.widths)}"
        if len(set(self.widths)) > 2:
            yield f"intermediate_size has {len(set(self.widths))} different widths, more than 2"
        if any(not 0 <= part < 1 for part in self.sparsities):
            yield "activation_sparsity_pattern has a number that is not at least 0 and less than 1"
        if self.altup_active_idx >= self.altup_num_inputs:
            yield f"altup_active_idx={self.altup_active_idx} is not less than altup_num_inputs={self.altup_num_inputs}"
        if self.widths:
            yield from super().contradictions()

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each layer's MLP."""
        width = self.intermediate_size
        return (width,) * self.num_hidden_layers if isinstance(width, int) else width

    @property
    def sparsities(self) -> tuple[float, ...]:
        """For each layer the part of its gates that are 0; 0 for a layer whose gates are all used."""
        if self.activation_sparsity_pattern is not None:
            return self.activation_sparsity_pattern
        layers = self.num_hidden_layers
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return (SPARSITY,) * sparse + (0.0,) * (layers - sparse)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "A": self.hidden_size,
            "F": min(self.widths),
            "wide_mlp": max(self.widths),
            "full_head_dim": sizes["H"],
            "full_kv_heads": sizes["K"],
            "laurel_rank": self.laurel_rank,
            "streams": self.altup_num_inputs,
            "streams_out": self.altup_num_inputs,
            "stream_weights": self.altup_num_inputs,
            "side_streams": self.altup_num_inputs - 1,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "narrow_layers": tuple(i for i, width in enumerate(self.widths) if width == min(self.widths)),
            "wide_layers": tuple(i for i, width in enumerate(self.widths) if width > min(self.widths)),
        }

    @property
    def inseparable(self) -> str:
        return "its layers have embeddings of their own, and pass on several residual streams"

    @property
    def unscannable(self) -> str:
        return "its layers have embeddings of their own, and some use the keys and values of an earlier one"


LAYER_ROWS = (
    *SANDWICH_NORMS,
    *LAYER_INPUTS,
    *under(
        "altup",
        "altup",
        Map("router_norm.weight", "router_norm.scale", "D"),
        Map("modality_router.weight", "router.kernel", "stream_weights D -> D stream_weights"),
        Map(
            "prediction_coefs.weight",
            "prediction.kernel",
            "(streams_out streams) stream_weights -> stream_weights streams_out streams",
        ),
        Map("correction_coefs.weight", "correction.kernel", "streams_out stream_weights -> stream_weights streams_out"),
        Map("correct_output_scale", "output_scale", "D"),
    ),
    *under(
        "laurel",
        "laurel",
        Map("linear_left.weight", "left.kernel", "laurel_rank D -> D laurel_rank"),
        Map("linear_right.weight", "right.kernel", "D laurel_rank -> laurel_rank D"),
        Map("post_laurel_norm.weight", "norm.scale", "D"),
    ),
)

TABLE = decoder_table(
    *LAYER_ROWS,
    others=(
        *ATTENTION_OF_LAYERS,
        *MLP_OF_LAYERS,
        *INPUTS_OF_LAYERS,
        Map("model.altup_projections.{side_streams}.weight", "altup.kernel", "D A -> side_streams A D"),
        Map("model.altup_unembed_projections.{side_streams}.weight", "norm.streams.kernel", "D A -> side_streams A D"),
    ),
    ignore=SHARED_ALREADY,
)

FAMILY = family(Config, TABLE, "Gemma 3n, the text model on its own", "Gemma3nForCausalLM")
