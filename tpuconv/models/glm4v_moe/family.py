"""GLM-4.5V and 4.6V: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.glm4_moe import family as glm4_moe
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, MropeConfig, glm4_moe.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "glm4v_moe"
    only: ClassVar = {"use_qk_norm": (False,)}

    num_nextn_predict_layers: int = 0


TABLE = inside(glm4_moe.TABLE, "model.language_model.", {"visual": SEES})

FAMILY = family(
    Config,
    TABLE,
    "GLM-4.5V, GLM-4.6V, text",
    "Glm4vMoeForConditionalGeneration",
    model="glm4_moe",
)
