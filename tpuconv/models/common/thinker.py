"""Text models of thinkers: of models that also speak, the part that reads and thinks."""

from collections.abc import Collection, Mapping
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.wrapper import HEARS, SEES, WrapperConfig, inside
from tpuconv.notation.table import MappingTable

THINKER = "thinker_config"
SPEAKS = "speech generator: the text model alone is converted"


class ThinkerConfig(WrapperConfig):
    """Reads the config of the text model in `thinker_config`. What is beside that is about speech."""

    @classmethod
    def around_text(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return _thinker(raw)

    @classmethod
    def settled(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        thinker = super().settled(_thinker(raw), tensors)
        return {**raw, THINKER: thinker} if THINKER in raw else thinker


def _thinker(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the thinker that a parsed config.json has, or is.

    Raises:
        ConfigError: `thinker_config` is not an object.
    """
    thinker = raw.get(THINKER, raw)
    if not isinstance(thinker, Mapping):
        raise ConfigError(f"config.json: {THINKER}={short(thinker)} is not an object")
    return thinker


def thinker_table(text: MappingTable, *speaking: str) -> MappingTable:
    """Returns the table of a thinker's text model, whose own table is `text`. `speaking` are the modules that speak."""
    outside = {"thinker.visual": SEES, "thinker.audio_tower": HEARS, **dict.fromkeys(speaking, SPEAKS)}
    return inside(text, "thinker.model.", outside, head="thinker.lm_head.")
