"""Step-3.7: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.registry import family
from tpuconv.models.step3p5 import family as step3p5


@family_config
class Config(WrapperConfig, step3p5.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "step3p7"


TABLE = inside(
    step3p5.TABLE,
    "model.",
    {"vision_model": SEES, "vit_large_projector": BRINGS, "multi_modal_projector": BRINGS},
)

FAMILY = family(
    Config,
    TABLE,
    "Step-3.7-Flash, text",
    "Step3p7ForConditionalGeneration",
    model="step3p5",
)
