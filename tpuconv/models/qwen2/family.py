"""Qwen2 and Qwen2.5: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, MLP, MLP_NORM, QKV_BIAS, decoder_table
from tpuconv.models.common.windows import WindowedConfig
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(WindowedConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "qwen2"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    *QKV_BIAS,
    MLP_NORM,
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Qwen2, Qwen2.5", "Qwen2ForCausalLM")
