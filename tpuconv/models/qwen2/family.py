"""Qwen2 and Qwen2.5: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.windows import WindowedConfig
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(WindowedConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen2"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


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
            Map("self_attn.q_proj.bias", "attn.q.bias", "(N H) -> N H"),
            Map("self_attn.k_proj.bias", "attn.k.bias", "(K H) -> K H"),
            Map("self_attn.v_proj.bias", "attn.v.bias", "(K H) -> K H"),
            Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
            Map("mlp.gate_proj.weight", "mlp.gate.kernel", "F D -> D F"),
            Map("mlp.up_proj.weight", "mlp.up.kernel", "F D -> D F"),
            Map("mlp.down_proj.weight", "mlp.down.kernel", "D F -> F D"),
        ),
        Map("model.norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = Family(
    name="qwen2",
    summary="Qwen2, Qwen2.5",
    config=Config,
    table=TABLE,
    model="tpuconv.models.qwen2.modules:Model",
    architectures={"Qwen2ForCausalLM": "qwen2"},
)
