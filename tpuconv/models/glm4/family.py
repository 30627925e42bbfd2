"""GLM-4 of April 2025: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import decoder_table
from tpuconv.models.glm import family as glm
from tpuconv.models.registry import family


@family_config
class Config(glm.Config):
    """The keys of config.json, with the defaults of GLM-4 of 2024."""

    model_type: ClassVar[str] = "glm4"


TABLE = decoder_table(
    *glm.LAYER_ROWS,
    Map("post_self_attn_layernorm.weight", "post_attn_norm.scale", "D"),
    Map("post_mlp_layernorm.weight", "post_mlp_norm.scale", "D"),
)

FAMILY = family(Config, TABLE, "GLM-4-0414, GLM-Z1", "Glm4ForCausalLM")
