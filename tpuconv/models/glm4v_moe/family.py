"""GLM-4.5V and 4.6V: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.wrapper import SEES, WrapperConfig, inside
from tpuconv.models.glm4_moe import family as glm4_moe
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(WrapperConfig, MropeConfig, glm4_moe.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "glm4v_moe"
    only: ClassVar = {"use_qk_norm": (False,)}

    vocab_size: int = 151424
    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 65536
    attention_bias: bool = True


TABLE = inside(glm4_moe.TABLE, "model.language_model.", {"visual": SEES})

FAMILY = family(
    Config,
    TABLE,
    "GLM-4.5V, GLM-4.6V, text",
    "Glm4vMoeForConditionalGeneration",
    model="glm4_moe",
)
