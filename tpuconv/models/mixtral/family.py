"""Mixtral: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.registry import Family

MIXTRAL_ROPE = Rope(theta=1e6)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "mixtral"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": MIXTRAL_ROPE.theta}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = MIXTRAL_ROPE
    sliding_window: int | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_experts_per_tok > self.num_local_experts:
            yield (
                f"num_experts_per_tok={self.num_experts_per_tok} is more than "
                f"num_local_experts={self.num_local_experts}"
            )

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "E": self.num_local_experts, "M": self.intermediate_size}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under(
            "model.layers.{L}",
            "layers.{L}",
            Map("input_layernorm.weight", "attn_norm.scale", "D"),
            Map("self_attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
            Map("self_attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
            Map("self_attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
            Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("post_attention_layernorm.weight", "moe_norm.scale", "D"),
            Map("block_sparse_moe.gate.weight", "moe.router.kernel", "E D -> D E"),
            Map("block_sparse_moe.experts.{E}.w1.weight", "moe.gate.kernel", "M D -> E D M"),
            Map("block_sparse_moe.experts.{E}.w3.weight", "moe.up.kernel", "M D -> E D M"),
            Map("block_sparse_moe.experts.{E}.w2.weight", "moe.down.kernel", "D M -> E M D"),
        ),
        Map("model.norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = Family(
    name="mixtral",
    summary="Mixtral",
    config=Config,
    table=TABLE,
    model="tpuconv.models.mixtral.modules:Model",
    architectures={"MixtralForCausalLM": "mixtral"},
)
