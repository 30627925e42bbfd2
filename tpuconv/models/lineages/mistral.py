"""Ministral 3 and the Mistral models around text models."""

from collections.abc import Mapping
from typing import Any, Self

from tpuconv.models.common.both_ways import EitherWay
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.growing import BETA, GrowingQueries
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.declare import config_class, decoder, wrapper
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.models.towers.llava.modalities import MISTRAL3_VISION

MINISTRAL3 = decoder(
    "ministral3",
    "Ministral 3, the text model on its own",
    "Ministral3ForCausalLM",
    Norms(),
    Attn(module="modules.mistral:GrowingAttention", keys=("sliding_window",)),
    Mlp(),
    config=(EitherWay, OneWindow, GrowingQueries, DecoderConfig),
    keys={"llama_4_scaling_beta": float},
    defaults={"llama_4_scaling_beta": 0.1},
    derived=DecoderConfig.derived | {BETA},
    default_rope={
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
)


class PlainRopes:
    """Reads rotary positions of queries that do not grow."""

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """See `DecoderConfig.read_ropes`."""
        return DecoderConfig.read_ropes.__func__(cls, raw, context)  # type: ignore[attr-defined, no-any-return]


OfMistral = config_class(
    (PlainRopes, WrapperConfig, MINISTRAL3.config),
    {},
    {
        **{"vocab_size": 32000, "num_hidden_layers": 32, "head_dim": None, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-6, "sliding_window": 4096, "llama_4_scaling_beta": 0.0, "tie_word_embeddings": False},
    },
    model_type="mistral3",
    tied=True,
    default_rope={},
)
"""The keys of a `text_config` with model_type "mistral": other defaults, and queries that do not grow."""


class ByTextType(WrapperConfig):
    """Reads the `text_config`, whose model_type is "mistral" or "ministral3"."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if cls.text_of(raw).get("model_type", "mistral") == "mistral":
            return OfMistral.from_hf(raw)  # type: ignore[return-value]  # of the same family
        return super().from_hf(raw)


MISTRAL3 = wrapper(
    "mistral3",
    "Mistral Small 3.1 and later, Ministral 3",
    "Mistral3ForConditionalGeneration",
    text=MINISTRAL3,
    reads=ByTextType,
    prefix="language_model.model.",
    text_types=("mistral", "ministral3"),
    modalities=(MISTRAL3_VISION,),
    tied=True,
)
