"""Qwen3-Omni: config and mapping table of the text model of its thinker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.thinker import ThinkerConfig, thinker_table
from tpuconv.models.qwen3_moe import family as qwen3_moe
from tpuconv.models.registry import family

OMNI_ROPE = Rope(theta=1e6)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(ThinkerConfig, MropeConfig, qwen3_moe.Config):
    """The keys of `text_config` in `thinker_config`."""

    model_type: ClassVar[str] = "qwen3_omni_moe"
    only: ClassVar = {"use_sliding_window": (False, None)}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": OMNI_ROPE.theta}

    vocab_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    norm_topk_prob: bool = True
    rope: Rope = OMNI_ROPE


TABLE = thinker_table(qwen3_moe.TABLE, "talker", "code2wav")

FAMILY = family(
    Config,
    TABLE,
    "Qwen3-Omni, text of the thinker",
    "Qwen3OmniMoeForConditionalGeneration",
    model="qwen3_moe",
)
