"""Emu3: the text model's config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.rope import Rope
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family

EMU3_ROPE = Rope(theta=1_000_000.0)
"""The rotary positions of a config.json without any."""

IN_EMU3 = "text_model.model."
"""The prefix of the text model in releases."""


@dataclass(frozen=True)
class Config(WrapperConfig, llama.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "emu3"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": EMU3_ROPE.theta}
    outside_keys: ClassVar[frozenset[str]] = frozenset({"vq_config", "vocabulary_map"})

    vocab_size: int = 184622
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 9216
    rms_norm_eps: float = 1e-5
    rope: Rope = EMU3_ROPE


TABLE = inside(
    llama.TABLE,
    IN_EMU3,
    {"vqmodel": "turns images to tokens and back: the text model alone is converted"},
    head="text_model.lm_head.",
)

FAMILY = family(Config, TABLE, "Emu3, text", "Emu3ForConditionalGeneration", model="llama")
