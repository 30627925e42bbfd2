"""GLM-4.1V: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.glm4 import family as glm4
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, glm4.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "glm4v"
    only: ClassVar = {"attention_bias": (True,)}

    head_dim: int | None = None
    partial_rotary_factor: float = 1.0


TABLE = inside(glm4.TABLE, "model.language_model.", {"visual": SEES})

FAMILY = family(Config, TABLE, "GLM-4.1V-9B, text", "Glm4vForConditionalGeneration", model="glm4")
