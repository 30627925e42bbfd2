"""Nemotron: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    NORM_BIAS,
    O_BIAS,
    PLAIN_MLP,
    PLAIN_MLP_BIAS,
    PRE_NORM_BIASES,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(PartialRopeConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "nemotron"
    only: ClassVar = {"hidden_act": ("relu2",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}

    vocab_size: int = 256000
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_hidden_layers: int = 32
    num_attention_heads: int = 48
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False


TABLE = decoder_table(
    *PRE_NORMS,
    *PRE_NORM_BIASES,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *PLAIN_MLP),
    *under("mlp", "mlp", *when("mlp_bias", *PLAIN_MLP_BIAS)),
    others=(NORM_BIAS,),
)

FAMILY = family(Config, TABLE, "Nemotron-3 8B, Nemotron-4, Minitron", "NemotronForCausalLM")
