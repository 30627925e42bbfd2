"""Qwen2.5-Omni: config and mapping table of the text model of its thinker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.thinker import ThinkerConfig, thinker_table
from tpuconv.models.qwen2 import family as qwen2
from tpuconv.models.registry import family

QWEN2_5_OMNI_ROPE = Rope(theta=1e6)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(ThinkerConfig, MropeConfig, qwen2.Config):
    """The keys of `text_config` in `thinker_config`."""

    model_type: ClassVar[str] = "qwen2_5_omni"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": QWEN2_5_OMNI_ROPE.theta}

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int | None = 4
    rope: Rope = QWEN2_5_OMNI_ROPE
    sliding_window: int | None = 32768
    max_window_layers: int = 28


TABLE = thinker_table(qwen2.TABLE, "talker", "token2wav")

FAMILY = family(
    Config,
    TABLE,
    "Qwen2.5-Omni, text of the thinker",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    model="qwen2",
)
