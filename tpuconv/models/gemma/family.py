"""Gemma, the first version: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family

CAUSAL = {"use_bidirectional_attention": (False, None)}
"""The implemented values of a key that all Gemmas have."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json. `hidden_act` "gelu" means the tanh approximation too, and `hidden_activation` of older
    files has no effect."""

    model_type: ClassVar[str] = "gemma"
    only: ClassVar = {
        **CAUSAL,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", "gelu", None),
    }

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False


BIASED_ATTENTION = (*ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS))

TABLE = decoder_table(*PRE_NORMS, *BIASED_ATTENTION, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Gemma, the first version", "GemmaForCausalLM")
