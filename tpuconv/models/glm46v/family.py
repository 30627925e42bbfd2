"""GLM-4.6V-Flash: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.glm4v import family as glm4v
from tpuconv.models.registry import family


@family_config
class Config(glm4v.Config):
    """The keys of `text_config`, with the defaults of GLM-4.1V."""

    model_type: ClassVar[str] = "glm46v"


TABLE = glm4v.TABLE

FAMILY = family(
    Config,
    TABLE,
    "GLM-4.6V-Flash, text",
    "Glm46VForConditionalGeneration",
    model="glm4",
    text_types=("glm4v_text",),
)
