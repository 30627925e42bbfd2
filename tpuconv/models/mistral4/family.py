"""Mistral 4: the multimodal model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import LLAVA, WrapperConfig, inside
from tpuconv.models.mistral4.text import TEXT_TABLE, TextConfig
from tpuconv.models.registry import family
from tpuconv.models.towers.llava.modalities import MISTRAL3_VISION


@family_config
class Config(WrapperConfig, TextConfig):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "mistral3"
    tied: ClassVar[bool] = True


TABLE = inside(TEXT_TABLE, "language_model.model.", LLAVA)

FAMILY = family(
    Config,
    TABLE,
    "Mistral Small 4",
    types={"Mistral3ForConditionalGeneration": "mistral3"},
    text_types=("mistral4",),
    modalities=(MISTRAL3_VISION,),
)
