"""JetMoE: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import PRE_NORMS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.granitemoe.family import FUSED_EXPERTS
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert. `num_attention_heads` are
    those of all experts of a token."""

    model_type: ClassVar[str] = "jetmoe"
    only: ClassVar = {"activation_function": ("silu",)}
    experts_key: ClassVar[str] = "num_local_experts"
    hf_names: ClassVar[Mapping[str, str]] = {"head_dim": "kv_channels"}
    left_out: ClassVar = frozenset({"aux_loss_coef"})

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 12
    num_attention_heads: int = 32
    num_key_value_heads: int = 16
    head_dim: int = 128
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE

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
