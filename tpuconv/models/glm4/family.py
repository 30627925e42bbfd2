"""GLM-4 of April 2025: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.rows import decoder_table
from tpuconv.models.glm import family as glm
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(glm.Config):
    """The keys of config.json, with the defaults of GLM-4 of 2024."""

    model_type: ClassVar[str] = "glm4"


TABLE = decoder_table(
    *glm.LAYER_ROWS,
    Map("post_self_attn_layernorm.weight", "post_attn_norm.scale", "D"),
    Map("post_mlp_layernorm.weight", "post_mlp_norm.scale", "D"),
)

FAMILY = Family(
    name="glm4",
    summary="GLM-4-0414, GLM-Z1",
    config=Config,
    table=TABLE,
    model="tpuconv.models.glm4.modules:Model",
    architectures={"Glm4ForCausalLM": "glm4"},
)
