"""Phi-4-multimodal: the text model's config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import WrapperConfig, inside
from tpuconv.models.phi3 import family as phi3
from tpuconv.models.registry import family

BRINGS_BOTH = "image and audio projector: the text model alone is converted"
ADAPTS = "an adapter for images or sound, without effect on text alone"


@family_config
class Config(WrapperConfig, phi3.Config):
    """The keys of config.json: the keys of vision and audio modules beside the keys of the text model."""

    model_type: ClassVar[str] = "phi4_multimodal"
    flat: ClassVar[bool] = True


TABLE = inside(
    phi3.TABLE,
    "model.",
    {"embed_tokens_extend": BRINGS_BOTH},
    tensors={"layers.{L}.*.lora_A.*": ADAPTS, "layers.{L}.*.lora_B.*": ADAPTS},
)

FAMILY = family(
    Config,
    TABLE,
    "Phi-4-multimodal, text",
    "Phi4MultimodalForCausalLM",
    types={"Phi4MMForCausalLM": "phi4mm"},
    model="phi3",
)
