"""Qwen3, dense: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    ATTN_NORM,
    HEAD_NORMS,
    MLP,
    MLP_NORM,
    O_BIAS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.windows import WindowedConfig
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(WindowedConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen3"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    MLP_NORM,
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Qwen3, dense", "Qwen3ForCausalLM")
