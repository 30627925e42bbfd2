"""dots3.note: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import HEARS, SEES, WrapperConfig, inside
from tpuconv.models.dots3_note_text import family as dots3_note_text
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, dots3_note_text.Config):
    """The keys of `text_config`, which releases have at the root."""

    model_type: ClassVar[str] = "dots3_note"
    flat: ClassVar[bool] = True
    sliding_window: int = 512


TABLE = inside(
    dots3_note_text.TABLE, "model.", {"vision_encoder": SEES, "audio_encoder": HEARS, "audio_adapter": HEARS}
)

FAMILY = family(
    Config,
    TABLE,
    "dots3.note, text",
    "Dots3NoteForConditionalGeneration",
    "Dots3NoteForCausalLM",
    model="dots3_note_text",
)
