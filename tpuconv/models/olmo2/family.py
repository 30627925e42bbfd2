"""OLMo 2: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    MLP,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    POST_ATTN_NORM,
    POST_MLP_NORM,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "olmo2"

    vocab_size: int = 50304
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False


TABLE = decoder_table(
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *NORMS_OF_ALL_HEADS,
    POST_ATTN_NORM,
    *under("mlp", "mlp", *MLP),
    POST_MLP_NORM,
)

FAMILY = family(Config, TABLE, "OLMo 2", "Olmo2ForCausalLM")
