"""GLM-4.6V-Flash: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.glm4v import family as glm4v
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(glm4v.Config):
    """The keys of `text_config`, with the defaults of GLM-4.1V."""

    model_type: ClassVar[str] = "glm46v"


TABLE, VARIANTS = glm4v.TABLE, glm4v.VARIANTS

FAMILY = Family(
    name="glm46v",
    summary="GLM-4.6V-Flash, text",
    config=Config,
    table=TABLE,
    variants=tuple(VARIANTS),
    text_types=("glm4v_text",),
    model="tpuconv.models.glm46v.modules:Model",
    architectures={"Glm46VForConditionalGeneration": "glm46v"},
)
