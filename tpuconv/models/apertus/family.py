"""Apertus: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, HEAD_NORMS, O_BIAS, PLAIN_MLP, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "apertus"
    only: ClassVar = {"hidden_act": ("xielu",), "qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)}
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "llama3",
        "rope_theta": 12000000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    head_dim: int | None = None
    attention_bias: bool


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
