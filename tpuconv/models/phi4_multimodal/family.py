"""Phi-4-multimodal: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import MappingTable
from tpuconv.models.common.wrapper import WrapperConfig, tables
from tpuconv.models.phi3 import family as phi3
from tpuconv.models.registry import Family

BRINGS_BOTH = "image and audio projector: the text model alone is converted"
ADAPTS = "an adapter for images or sound, without effect on text alone"


@dataclass(frozen=True)
class Config(WrapperConfig, phi3.Config):
    """The keys of config.json: the keys of vision and audio modules beside the keys of the text model."""

    model_type: ClassVar[str] = "phi4_multimodal"
    flat: ClassVar[bool] = True

    vocab_size: int = 200064
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072


def phi4_table(name: str, text: MappingTable) -> MappingTable:
    """Returns the table of a text model without what sees and hears, as a variant of this name."""
    (table,) = tables(
        text,
        "model.",
        {"embed_tokens_extend": BRINGS_BOTH},
        tensors={"layers.{L}.*.lora_A.*": ADAPTS, "layers.{L}.*.lora_B.*": ADAPTS},
        name=name,
        prefixes={"model.": "lm_head."},
    )
    return table


BESIDE_ADAPTERS = phi3.TABLE.renamed(lambda name: name.replace("_proj.", "_proj.base_layer."))
"""With the names of matrices that have adapters."""

FAMILY = Family(
    name="phi4_multimodal",
    summary="Phi-4-multimodal, text",
    config=Config,
    table=phi4_table("", phi3.TABLE),
    variants=(phi4_table("base_layer", BESIDE_ADAPTERS),),
    model="tpuconv.models.phi4_multimodal.modules:Model",
    architectures={"Phi4MultimodalForCausalLM": "phi4_multimodal", "Phi4MMForCausalLM": "phi4mm"},
)
