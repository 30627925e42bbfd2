"""Gemma 4 without towers (12B), the text model on its own: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.gemma4_unified import family as gemma4_unified
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(gemma4_text.Config):
    """The keys of config.json. Layers have neither experts nor embeddings of their own."""

    model_type: ClassVar[str] = "gemma4_unified_text"
    only: ClassVar = gemma4_unified.Config.only

    max_position_embeddings: int = 262144
    sliding_window: int | None = 1024
    hidden_size_per_layer_input: int = 0


TABLE = gemma4_text.TABLE

FAMILY = Family(
    name="gemma4_unified_text",
    summary="Gemma 4 without towers, the text model on its own",
    config=Config,
    table=TABLE,
    model="tpuconv.models.gemma4_unified_text.modules:Model",
    architectures={"Gemma4UnifiedForCausalLM": "gemma4_unified_text"},
)
