"""Llama and Mistral: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if cls is Config and raw.get("model_type") == "mistral":
            return MistralConfig.from_hf(raw)  # type: ignore[return-value]  # a subclass of Config
        return super().from_hf(raw)


@dataclass(frozen=True)
class MistralConfig(Config):
    """Mistral: no biases, other defaults, and a sliding window in all layers."""

    model_type: ClassVar[str] = "mistral"
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_bias": (False,), "mlp_bias": (False,)}

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

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
            Map("self_attn.q_proj.bias", "attn.q.bias", "(N H) -> N H", when="attention_bias"),
            Map("self_attn.k_proj.bias", "attn.k.bias", "(K H) -> K H", when="attention_bias"),
            Map("self_attn.v_proj.bias", "attn.v.bias", "(K H) -> K H", when="attention_bias"),
            Map("self_attn.o_proj.bias", "attn.o.bias", "D", when="attention_bias"),
            Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
            Map("mlp.gate_proj.weight", "mlp.gate.kernel", "F D -> D F"),
            Map("mlp.up_proj.weight", "mlp.up.kernel", "F D -> D F"),
            Map("mlp.down_proj.weight", "mlp.down.kernel", "D F -> F D"),
            Map("mlp.gate_proj.bias", "mlp.gate.bias", "F", when="mlp_bias"),
            Map("mlp.up_proj.bias", "mlp.up.bias", "F", when="mlp_bias"),
            Map("mlp.down_proj.bias", "mlp.down.bias", "D", when="mlp_bias"),
        ),
        Map("model.norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = Family(
    name="llama",
    summary="Llama 2, 3, 3.1, 3.2, 3.3; Mistral; SmolLM2",
    config=Config,
    table=TABLE,
    model="tpuconv.models.llama.modules:Model",
    architectures={"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"},
)
