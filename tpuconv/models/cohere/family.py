"""Cohere: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "cohere"
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    logit_scale: float = 0.0625
    use_qk_norm: bool = False


TABLE = decoder_table(
    Map("input_layernorm.weight", "norm.scale", "D"),
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *when(
        "use_qk_norm",
        Map("self_attn.q_norm.weight", "attn.q_norm.scale", "N H"),
        Map("self_attn.k_norm.weight", "attn.k_norm.scale", "K H"),
    ),
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Command R, Command R+, Aya 23", "CohereForCausalLM")
