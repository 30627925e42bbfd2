"""Seed-OSS: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "seed_oss"

    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    *when("attention_out_bias", O_BIAS),
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("mlp_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "Seed-OSS", "SeedOssForCausalLM")
