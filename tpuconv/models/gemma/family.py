"""Gemma, the first version: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.registry import Family

CAUSAL = {"use_bidirectional_attention": (False, None)}
"""The implemented values of a key that all Gemmas have."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json. `hidden_act` "gelu" means the tanh approximation too, and `hidden_activation` of older
    files has no effect."""

    model_type: ClassVar[str] = "gemma"
    only: ClassVar = {
        **CAUSAL,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", "gelu", None),
    }

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False


ATTENTION = (
    Map("self_attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
    Map("self_attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
    Map("self_attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
    Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("self_attn.q_proj.bias", "attn.q.bias", "(N H) -> N H", when="attention_bias"),
    Map("self_attn.k_proj.bias", "attn.k.bias", "(K H) -> K H", when="attention_bias"),
    Map("self_attn.v_proj.bias", "attn.v.bias", "(K H) -> K H", when="attention_bias"),
    Map("self_attn.o_proj.bias", "attn.o.bias", "D", when="attention_bias"),
)
MLP = (
    Map("mlp.gate_proj.weight", "mlp.gate.kernel", "F D -> D F"),
    Map("mlp.up_proj.weight", "mlp.up.kernel", "F D -> D F"),
    Map("mlp.down_proj.weight", "mlp.down.kernel", "D F -> F D"),
)


def table(*layer: Map) -> MappingTable:
    """Returns the table of a model with these rows in each layer."""
    return MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            *under("model.layers.{L}", "layers.{L}", *layer),
            Map("model.norm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
        copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


TABLE = table(
    Map("input_layernorm.weight", "attn_norm.scale", "D"),
    *ATTENTION,
    Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
    *MLP,
)

FAMILY = Family(
    name="gemma",
    summary="Gemma, the first version",
    config=Config,
    table=TABLE,
    model="tpuconv.models.gemma.modules:Model",
    architectures={"GemmaForCausalLM": "gemma"},
)
