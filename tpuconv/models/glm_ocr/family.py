"""GLM-OCR: the text model's config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import MappingTable
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MTP_IGNORE
from tpuconv.models.common.wrapper import SEES, inside
from tpuconv.models.glm4 import family as glm4
from tpuconv.models.glm4v import family as glm4v
from tpuconv.models.registry import family


@family_config
class Config(glm4v.Config):
    """The keys of `text_config`."""

    model_type: ClassVar[str] = "glm_ocr"
    only: ClassVar = {"attention_bias": (False,)}
    least: ClassVar[Mapping[str, int]] = {"num_nextn_predict_layers": 0}

    attention_bias: bool = False
    num_nextn_predict_layers: int = 1

    @property
    def axes(self) -> dict[str, Any]:
        layers = self.num_hidden_layers
        return {**super().axes, "U": tuple(range(layers, layers + self.num_nextn_predict_layers))}


OCR_TEXT_TABLE = MappingTable(glm4.TABLE.rows, ignore={**glm4.TABLE.ignore, **MTP_IGNORE}, copies=glm4.TABLE.copies)
TABLE = inside(OCR_TEXT_TABLE, "model.language_model.", {"visual": SEES})

FAMILY = family(Config, TABLE, "GLM-OCR, text", "GlmOcrForConditionalGeneration", model="glm4")
