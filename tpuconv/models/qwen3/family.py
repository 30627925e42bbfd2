"""Qwen3, dense: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    ATTN_NORM,
    HEAD_NORMS,
    MLP,
    MLP_NORM,
    O_BIAS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.windows import WindowedConfig
from tpuconv.models.registry import family


@family_config
class Config(WindowedConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen3"

    head_dim: int
    attention_bias: bool


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    MLP_NORM,
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Qwen3, dense", "Qwen3ForCausalLM")
