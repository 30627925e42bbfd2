"""Llama and Mistral: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    ATTN_NORM,
    MLP,
    MLP_BIAS,
    MLP_NORM,
    O_BIAS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "llama"

    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def of_type(cls, model_type: str | None) -> type[DecoderConfig]:
        return MistralConfig if cls is Config and model_type == "mistral" else cls


@family_config
class MistralConfig(OneWindow, Config):
    """Mistral: no biases, other defaults, and a sliding window in all layers."""

    model_type: ClassVar[str] = "mistral"
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_bias": (False,), "mlp_bias": (False,)}

    sliding_window: int | None


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    MLP_NORM,
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("mlp_bias", *MLP_BIAS)),
)

FAMILY = family(
    Config,
    TABLE,
    "Llama 2, 3, 3.1, 3.2, 3.3; Mistral; SmolLM2",
    "LlamaForCausalLM",
    types={"MistralForCausalLM": "mistral"},
)
