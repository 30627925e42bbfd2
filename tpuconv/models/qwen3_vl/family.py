"""Qwen3-VL, dense: the text model's config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.qwen3 import family as qwen3
from tpuconv.models.registry import family

QWEN3_VL_ROPE = Rope(theta=5e5)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(WrapperConfig, MropeConfig, qwen3.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "qwen3_vl"
    only: ClassVar = {"use_sliding_window": (False, None)}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": QWEN3_VL_ROPE.theta}

    max_position_embeddings: int = 128000
    rope: Rope = QWEN3_VL_ROPE


TABLE = inside(qwen3.TABLE, "model.language_model.", {"visual": SEES})

FAMILY = family(
    Config,
    TABLE,
    "Qwen3-VL, dense, text",
    "Qwen3VLForConditionalGeneration",
    model="qwen3",
)
