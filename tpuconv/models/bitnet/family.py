"""BitNet b1.58: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family

BITNET_ROPE = Rope(theta=500_000.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "bitnet"
    only: ClassVar = {"hidden_act": ("relu2",)}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": BITNET_ROPE.theta}

    vocab_size: int = 128256
    hidden_size: int = 2560
    intermediate_size: int = 6912
    num_hidden_layers: int = 30
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 5
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = BITNET_ROPE
    attention_bias: bool = False


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    Map("self_attn.attn_sub_norm.weight", "attn.sub_norm.scale", "(N H) -> N H"),
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *MLP, Map("ffn_sub_norm.weight", "sub_norm.scale", "F")),
)

FAMILY = family(Config, TABLE, "BitNet b1.58 2B4T", "BitNetForCausalLM")
