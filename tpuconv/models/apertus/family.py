"""Apertus: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS, O_BIAS, PLAIN_MLP, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family

APERTUS_ROPE = Rope(
    "llama3",
    theta=12_000_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "apertus"
    only: ClassVar = {"hidden_act": ("xielu",), "qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)}
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": APERTUS_ROPE.type,
        "rope_theta": APERTUS_ROPE.theta,
        "factor": APERTUS_ROPE.factor,
        "low_freq_factor": APERTUS_ROPE.low_freq_factor,
        "high_freq_factor": APERTUS_ROPE.high_freq_factor,
        "original_max_position_embeddings": APERTUS_ROPE.original_max_position_embeddings,
    }

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = APERTUS_ROPE
    attention_bias: bool = False


TABLE = decoder_table(
    Map("attention_layernorm.weight", "attn_norm.scale", "D"),
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    Map("feedforward_layernorm.weight", "mlp_norm.scale", "D"),
    *under(
        "mlp",
        "mlp",
        *PLAIN_MLP,
        Map("act_fn.alpha_p", "xielu.alpha_p", "1"),
        Map("act_fn.alpha_n", "xielu.alpha_n", "1"),
        Map("act_fn.beta", "xielu.beta", "", buffer=True),
        Map("act_fn.eps", "xielu.eps", "", buffer=True),
    ),
)

FAMILY = family(Config, TABLE, "Apertus 8B, 70B", "ApertusForCausalLM")
