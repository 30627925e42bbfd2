"""Gemma 4 without towers (12B), the text model on its own: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.gemma4_unified import family as gemma4_unified
from tpuconv.models.registry import family


@family_config
class Config(gemma4_text.Config):
    """The keys of config.json. Layers have neither experts nor embeddings of their own."""

    model_type: ClassVar[str] = "gemma4_unified_text"
    only: ClassVar = gemma4_unified.Config.only

    hidden_size_per_layer_input: int = 0


TABLE = gemma4_text.TABLE

FAMILY = family(
    Config,
    TABLE,
    "Gemma 4 without towers, the text model on its own",
    "Gemma4UnifiedForCausalLM",
    model="gemma4_text",
)
