"""Llama and Mistral: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
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


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def of_type(cls, model_type: str | None) -> type[DecoderConfig]:
        return MistralConfig if cls is Config and model_type == "mistral" else cls


@dataclass(frozen=True)
class MistralConfig(OneWindow, Config):
    """Mistral: no biases, other defaults, and a sliding window in all layers."""

    model_type: ClassVar[str] = "mistral"
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_bias": (False,), "mlp_bias": (False,)}

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


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
