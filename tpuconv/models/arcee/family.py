"""Arcee: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    O_BIAS,
    PLAIN_MLP,
    PLAIN_MLP_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "arcee"
    only: ClassVar = {"hidden_act": ("relu2",)}

    attention_bias: bool
    mlp_bias: bool


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *PLAIN_MLP),
    *under("mlp", "mlp", *when("mlp_bias", *PLAIN_MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "AFM-4.5B", "ArceeForCausalLM")
