"""Mistral Small 3.1 and later, Ministral 3: with their vision tower. The text model's config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.wrapper import LLAVA, WrapperConfig, inside
from tpuconv.models.ministral3 import family as ministral3
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, ministral3.Config):
    """The keys of `text_config`, whose model_type is "mistral" or "ministral3"."""

    model_type: ClassVar[str] = "mistral3"
    tied: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if cls is Config and cls.text_of(raw).get("model_type", "mistral") == "mistral":
            return MistralTextConfig.from_hf(raw)  # type: ignore[return-value]  # a subclass of Config
        return super().from_hf(raw)


@family_config
class MistralTextConfig(Config):
    """The keys of a `text_config` with model_type "mistral": other defaults, and queries that do not grow."""

    default_rope: ClassVar[Mapping[str, Any]] = {}

    vocab_size: int = 32000
    num_hidden_layers: int = 32
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096
    llama_4_scaling_beta: float = 0.0

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        return DecoderConfig.read_ropes.__func__(cls, raw, context)  # type: ignore[attr-defined, no-any-return]


TABLE = inside(ministral3.TABLE, "language_model.model.", LLAVA)

FAMILY = family(
    Config,
    TABLE,
    "Mistral Small 3.1 and later, Ministral 3, text",
    "Mistral3ForConditionalGeneration",
    model="ministral3",
    text_types=("mistral", "ministral3"),
)
