"""Gemma 4 without towers (12B): the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import BRINGS, HEARS, SEES, inside
from tpuconv.models.gemma4 import family as gemma4
from tpuconv.models.gemma4_text import family as gemma4_text
from tpuconv.models.registry import family


@family_config
class Config(gemma4.Config):
    """The keys of `text_config`. Layers have neither experts nor embeddings of their own."""

    model_type: ClassVar[str] = "gemma4_unified"
    only: ClassVar = {
        **gemma4.Config.only,
        "enable_moe_block": (False,),
        "hidden_size_per_layer_input": (0,),
    }

    hidden_size_per_layer_input: int = 0


TABLE = inside(
    gemma4_text.TABLE,
    "model.language_model.",
    {"vision_embedder": SEES, "embed_vision": BRINGS, "embed_audio": HEARS},
)

FAMILY = family(
    Config,
    TABLE,
    "Gemma 4 without towers, text",
    "Gemma4UnifiedForConditionalGeneration",
    model="gemma4_text",
)
