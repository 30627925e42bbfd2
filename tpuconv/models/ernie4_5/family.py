"""ERNIE 4.5, dense: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family

ERNIE_ROPE = Rope(theta=500_000.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "ernie4_5"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": ERNIE_ROPE.theta}

    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope: Rope = ERNIE_ROPE
    use_bias: bool | None = False


LAYER_ROWS = (*PRE_NORMS, *ATTENTION, *when("use_bias", *QKV_BIAS, O_BIAS))

TABLE = decoder_table(
    *LAYER_ROWS,
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("use_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "ERNIE 4.5, dense", "Ernie4_5ForCausalLM")
