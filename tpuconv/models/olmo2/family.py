"""OLMo 2: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    MLP,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    POST_ATTN_NORM,
    POST_MLP_NORM,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "olmo2"

    head_dim: int | None = None
    attention_bias: bool


TABLE = decoder_table(
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *NORMS_OF_ALL_HEADS,
    POST_ATTN_NORM,
    *under("mlp", "mlp", *MLP),
    POST_MLP_NORM,
)

FAMILY = family(Config, TABLE, "OLMo 2", "Olmo2ForCausalLM")
