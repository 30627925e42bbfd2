"""HRM-Text: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.looped import LoopedConfig
from tpuconv.models.common.rows import FUSED_MLP
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(stack_layers=Word("layers of one of two stacks, whose layers are the even and the odd ones"))


@family_config
class Config(LoopedConfig, DecoderConfig):
    """The keys of config.json. It has the number of layers of one of the two stacks in `num_layers_per_stack`; in older
    files, without this key, in `num_hidden_layers`. Here `num_hidden_layers` counts the layers of both. All tokens see
    those before them alone: transformers too computes this for a text without `token_type_ids`, which mark tokens of an
    instruction that see each other (`prefix_lm`)."""

    model_type: ClassVar[str] = "hrm_text"
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"num_key_value_heads"}
    hf_names: ClassVar[Mapping[str, str]] = {"high_cycles": "H_cycles", "low_cycles": "L_cycles"}
    only: ClassVar = {"attention_bias": (False,), "mlp_bias": (False,)}
    left_out: ClassVar[frozenset[str]] = frozenset(
        {"L_bp_cycles", "prefix_lm", "num_layers_per_stack", "num_key_value_heads"}
    )

    num_hidden_layers: int = 32
    high_cycles: int
    low_cycles: int
    embedding_scale: float | None
    initializer_range: float = 0.02

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`, with the number of the layers of both stacks."""
        out, stack = super().in_our_keys(raw), raw.get("num_layers_per_stack")
        layers = out.get("num_hidden_layers") if stack is None else stack
        if type(layers) is not int:
            return out
        # A number that no model has is refused as the file has it.
        return out | {"num_hidden_layers": layers * (2 if layers <= cls._most("num_hidden_layers") else 1)}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.embedding_scale is None and self.initializer_range <= 0:
            yield f"initializer_range={self.initializer_range} is not positive"

    @property
    def embedding_factor(self) -> float:
        """The factor of the embeddings."""
        return 1 / self.initializer_range if self.embedding_scale is None else self.embedding_scale

    @property
    def stack_size(self) -> int:
        """The number of the layers of one stack."""
        return self.num_hidden_layers // 2

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "stack_layers": range(self.stack_size)}

    @property
    def executed_layers(self) -> tuple[int, ...]:
        layers = range(self.num_hidden_layers)
        return (*tuple(layers[0::2]) * self.low_cycles, *layers[1::2]) * self.high_cycles


HRM_ROWS = (
    Map(
        "attn.gqkv_proj.weight",
        ("attn.gate.kernel", "attn.q.kernel", "attn.k.kernel", "attn.v.kernel"),
        "((N + N + K + K) H) D -> D N H, D N H, D K H, D K H",
    ),
    Map("attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    *under("mlp", "mlp", *FUSED_MLP),
)

TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        Map("model.z_L_init", "low.start", "D"),
        *under("model.L_module.layers.{stack_layers}", "layers.{stack_layers+stack_layers}", *HRM_ROWS),
        *under("model.H_module.layers.{stack_layers}", "layers.{stack_layers+stack_layers+1}", *HRM_ROWS),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "HRM-Text 1B, with causal attention to instructions too", "HrmTextForCausalLM")
