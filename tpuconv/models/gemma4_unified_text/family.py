"""Gemma 4 without towers (12B), the text model on its own: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.gemma4_unified import family as gemma4_unified
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(gemma4_text.Config):
    """The keys of config.json. Layers have neither experts nor embeddings of their own."""

    model_type: ClassVar[str] = "gemma4_unified_text"
    only: ClassVar = gemma4_unified.Config.only

    max_position_embeddings: int = 262144
    sliding_window: int | None = 1024
    hidden_size_per_layer_input: int = 0


TABLE = gemma4_text.TABLE

FAMILY = family(
    Config,
    TABLE,
    "Gemma 4 without towers, the text model on its own",
    "Gemma4UnifiedForCausalLM",
    model="gemma4_text",
)
