"""Fuyu: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, WrapperConfig, inside
from tpuconv.models.persimmon import family as persimmon
from tpuconv.models.registry import family

OF_PATCHES = frozenset({"patch_size", "num_channels"})
"""Keys of the image projector."""


@family_config
class Config(WrapperConfig, persimmon.Config):
    """The keys of `text_config`, which releases have beside the keys of images."""

    model_type: ClassVar[str] = "fuyu"
    flat: ClassVar[bool] = True
    left_out: ClassVar[frozenset[str]] = persimmon.Config.left_out | OF_PATCHES
    outside_keys: ClassVar[frozenset[str]] = OF_PATCHES


TABLE = inside(persimmon.TABLE, "language_model.model.", {"vision_embed_tokens": BRINGS})

FAMILY = family(Config, TABLE, "Fuyu 8B, text", "FuyuForCausalLM", model="persimmon")
