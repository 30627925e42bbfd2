"""The text model of Llama 4, Scout and Maverick: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar, Self

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    ATTN_NORM,
    EXPERT_MLPS,
    MLP,
    MLP_NORM,
    O_BIAS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under
from tpuconv.sources.config import encoding_of

ONE_BY_ONE = ("compressed-tensors", "awq", "gptq", "auto-round")
"""Encodings whose releases have the experts of a layer as matrices of their own."""


@family_config
class Config(DecoderConfig):
    """The keys of config.json, and whether each expert has its own tensors. `intermediate_size` is the width of
    experts, `intermediate_size_mlp` that of layers without experts. In spite of its name, `no_rope_layers` is 1 for
    layers with rotary positions."""

    model_type: ClassVar[str] = "llama4_text"
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"is_one_by_one"}
    least: ClassVar = {"attn_temperature_tuning": 0}

    intermediate_size_mlp: int
    num_experts_per_tok: int
    num_local_experts: int
    moe_layers: tuple[int, ...] | None
    interleave_moe_layer_step: int
    use_qk_norm: bool
    no_rope_layers: tuple[int, ...] | None
    no_rope_layer_interval: int
    attention_chunk_size: int | None
    layer_types: tuple[str, ...] | None
    attn_temperature_tuning: bool | int
    floor_scale: float
    attn_scale: float
    attention_bias: bool
    is_one_by_one: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        encoding = encoding_of(raw)
        is_one_by_one = isinstance(encoding, Mapping) and encoding.get("quant_method") in ONE_BY_ONE
        return replace(super().from_hf(raw), is_one_by_one=is_one_by_one)

    @property
    def is_stacked(self) -> bool:
        """True if the experts of a layer are stacked in one tensor."""
        return not self.is_one_by_one

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        layers = self.num_hidden_layers
        if self.num_experts_per_tok > self.num_local_experts:
            yield f"num_experts_per_tok={self.num_experts_per_tok} is more than {self.num_local_experts} experts"
        if self.no_rope_layers and (len(self.no_rope_layers) < layers or set(self.no_rope_layers) - {0, 1}):
            yield f"no_rope_layers={self.no_rope_layers[:80]} is not 0 or 1 for each of {layers} layers"
        if self.layer_types is not None and len(self.layer_types) != layers:
            yield f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={layers}"
        elif unknown := set(self.layer_types or ()) - {"full_attention", "chunked_attention"}:
            yield f"layer_types has the unknown {', '.join(map(repr, sorted(unknown)))}"
        elif self.attention_chunk_size is None and any(map(self.is_chunked, range(layers))):
            yield "layers attend in chunks, and attention_chunk_size is null"
        if self.floor_scale <= 0:
            yield f"floor_scale={self.floor_scale} is not positive"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "F": self.intermediate_size_mlp,
            "E": self.num_local_experts,
            "M": self.intermediate_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        step = self.interleave_moe_layer_step
        every = range(step - 1, self.num_hidden_layers, step)
        sparse = set(every if self.moe_layers is None else self.moe_layers)
        layers = range(self.num_hidden_layers)
        return {
            **super().layer_sets,
            "I": tuple(i for i in layers if i not in sparse),
            "J": tuple(i for i in layers if i in sparse),
        }

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        kinds = super().layer_kinds
        return tuple((*kind, self.has_rope(layer), self.is_chunked(layer)) for layer, kind in enumerate(kinds))

    def has_rope(self, layer: int) -> bool:
        """Returns whether a layer has rotary positions."""
        if self.no_rope_layers:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def is_chunked(self, layer: int) -> bool:
        """Returns whether the tokens of a layer see only their own chunk."""
        return self.layer_types[layer] == "chunked_attention" if self.layer_types else self.has_rope(layer)

    @property
    def horizons(self) -> frozenset[int]:
        layers, found = range(self.num_hidden_layers), set(super().horizons)
        if self.attention_chunk_size is not None and any(map(self.is_chunked, layers)):
            found.add(self.attention_chunk_size)
        if self.attn_temperature_tuning and not all(map(self.has_rope, layers)):
            found.add(ceil(self.floor_scale))
        return frozenset(found)


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    MLP_NORM,
    others=(
        *under("model.layers.{I}.feed_forward", "layers.{I}.mlp", *MLP),
        *under(
            "model.layers.{J}.feed_forward",
            "layers.{J}.moe",
            Map("router.weight", "router.kernel", "E D -> D E"),
            # Stacked as (in, out), the orientation of the product. Quantized releases have a tensor (out, in) per
            # expert.
            Map("experts.gate_up_proj", ("gate.kernel", "up.kernel"), "E D (M + M) -> E D M, E D M", when="is_stacked"),
            Map("experts.down_proj", "down.kernel", "E M D", when="is_stacked"),
            *when("is_one_by_one", *EXPERT_MLPS),
            Map("shared_expert.gate_proj.weight", "shared.gate.kernel", "M D -> D M"),
            Map("shared_expert.up_proj.weight", "shared.up.kernel", "M D -> D M"),
            Map("shared_expert.down_proj.weight", "shared.down.kernel", "D M -> M D"),
        ),
    ),
)

FAMILY = family(Config, TABLE, "Llama 4, the text model on its own", "Llama4ForCausalLM")
