"""Qwen3-Omni: config and mapping table of the text model of its thinker."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.wrapper import HEARS, SEES, WrapperConfig, tables
from tpuconv.models.qwen3_moe import family as qwen3_moe
from tpuconv.models.registry import Family

OMNI_ROPE = Rope(theta=1e6)
"""The rotary positions of a config.json without any."""
THINKER = "thinker_config"
SPEAKS = "speaks: the text model alone is converted"


@dataclass(frozen=True)
class Config(WrapperConfig, MropeConfig, qwen3_moe.Config):
    """The keys of `text_config` in `thinker_config`. What is beside that is about speech."""

    model_type: ClassVar[str] = "qwen3_omni_moe"
    only: ClassVar = {"use_sliding_window": (False, None)}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": OMNI_ROPE.theta}

    vocab_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    norm_topk_prob: bool = True
    rope: Rope = OMNI_ROPE

    @classmethod
    def text_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().text_of(_thinker(raw))

    @classmethod
    def _beside(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super()._beside(_thinker(raw))

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


(TABLE,) = tables(
    qwen3_moe.TABLE,
    "thinker.model.",
    {
        **{"thinker.visual": SEES, "thinker.audio_tower": HEARS},
        **dict.fromkeys(("talker", "code2wav"), SPEAKS),
    },
    prefixes={"thinker.model.": "thinker.lm_head."},
)

FAMILY = Family(
    name="qwen3_omni_moe",
    summary="Qwen3-Omni, text of the thinker",
    config=Config,
    table=TABLE,
    model="tpuconv.models.qwen3_omni_moe.modules:Model",
    architectures={"Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe"},
)
