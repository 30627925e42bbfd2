"""Emu3: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family

IN_EMU3 = "text_model.model."
"""The prefix of the text model in releases."""


@family_config
class Config(WrapperConfig, llama.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "emu3"
    outside_keys: ClassVar[frozenset[str]] = frozenset({"vq_config", "vocabulary_map"})


TABLE = inside(
    llama.TABLE,
    IN_EMU3,
    {"vqmodel": "turns images to tokens and back: the text model alone is converted"},
    head="text_model.lm_head.",
)

FAMILY = family(Config, TABLE, "Emu3, text", "Emu3ForConditionalGeneration", model="llama")
