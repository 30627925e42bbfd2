"""Jais 2: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
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
from tpuconv.models.registry import Family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "jais2"
    only: ClassVar = {"hidden_act": ("relu2",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    vocab_size: int = 150272
    hidden_size: int = 3328
    intermediate_size: int = 26624
    num_hidden_layers: int = 32
    num_attention_heads: int = 26
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = True
    mlp_bias: bool = True


TABLE = decoder_table(
    *PRE_NORMS,
    *PRE_NORM_BIASES,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *PLAIN_MLP),
    *under("mlp", "mlp", *when("mlp_bias", *PLAIN_MLP_BIAS)),
    others=(NORM_BIAS,),
)

FAMILY = Family(
    name="jais2",
    summary="Jais 2 8B, 70B",
    config=Config,
    table=TABLE,
    model="tpuconv.models.jais2.modules:Model",
    architectures={"Jais2ForCausalLM": "jais2"},
)
