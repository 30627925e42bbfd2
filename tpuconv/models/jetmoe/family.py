"""JetMoE: config and mapping table."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import FUSED_EXPERTS, PRE_NORMS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert. `num_attention_heads` are
    those of all experts of a token."""

    model_type: ClassVar[str] = "jetmoe"
    only: ClassVar = {"activation_function": ("silu",)}
    experts_key: ClassVar[str] = "num_local_experts"
    hf_names: ClassVar[Mapping[str, str]] = {"head_dim": "kv_channels"}
    left_out: ClassVar = frozenset({"aux_loss_coef"})

    num_attention_heads: int = 32
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        sizes = [out.get(key, getattr(cls, key)) for key in ("num_key_value_heads", "num_experts_per_tok")]
        if all(type(size) is int for size in sizes):
            out.setdefault("num_attention_heads", prod(sizes))
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_attention_heads != (heads := self.num_key_value_heads * self.num_experts_per_tok):
            yield f"num_attention_heads={self.num_attention_heads}, where the experts of a token have {heads}"


TABLE = decoder_table(
    *PRE_NORMS,
    Map("self_attention.kv_proj.weight", ("attn.k.kernel", "attn.v.kernel"), "((K + K) H) D -> D K H, D K H"),
    *under(
        "self_attention.experts",
        "attn",
        Map("router.layer.weight", "router.kernel", "E D -> D E"),
        Map("input_linear.weight", "q.kernel", "E (K H) D -> E D K H"),
        Map("output_linear.weight", "o.kernel", "E D (K H) -> E K H D"),
        Map("bias", "bias", "D"),
    ),
    *under("mlp", "moe", *FUSED_EXPERTS, Map("bias", "bias", "D")),
)

FAMILY = family(Config, TABLE, "JetMoE 8B", "JetMoeForCausalLM")
