"""GLM-4 of 2024: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import ATTENTION, FUSED_MLP, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(PartialRopeConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "glm"

    partial_rotary_factor: float = 0.5
    attention_bias: bool


LAYER_ROWS = (
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    *under("mlp", "mlp", *FUSED_MLP),
)

TABLE = decoder_table(*LAYER_ROWS)

FAMILY = family(Config, TABLE, "GLM-4 of 2024", "GlmForCausalLM")
