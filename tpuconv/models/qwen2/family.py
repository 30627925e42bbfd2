"""Qwen2 and Qwen2.5: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, MLP, MLP_NORM, QKV_BIAS, decoder_table
from tpuconv.models.common.windows import WindowedConfig
from tpuconv.models.registry import family


@family_config
class Config(WindowedConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen2"

    head_dim: int | None = None


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *QKV_BIAS,
    MLP_NORM,
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Qwen2, Qwen2.5", "Qwen2ForCausalLM")
