"""GLM-4 of 2024: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, FUSED_MLP, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(PartialRopeConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "glm"

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


LAYER_ROWS = (
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    *under("mlp", "mlp", *FUSED_MLP),
)

TABLE = decoder_table(*LAYER_ROWS)

FAMILY = family(Config, TABLE, "GLM-4 of 2024", "GlmForCausalLM")
