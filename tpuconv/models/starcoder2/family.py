"""StarCoder2: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    NORM_BIAS,
    O_BIAS,
    PRE_NORM_BIASES,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(OneWindow, DecoderConfig):
    """The keys of config.json. The sliding window, if any, applies to all layers."""

    model_type: ClassVar[str] = "starcoder2"
    only: ClassVar = {"hidden_act": ("gelu_pytorch_tanh",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_epsilon"}

    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int | None = 2
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE
    sliding_window: int | None = None
    use_bias: bool = True


TABLE = decoder_table(
    *PRE_NORMS,
    *PRE_NORM_BIASES,
    *ATTENTION,
    *when("use_bias", *QKV_BIAS, O_BIAS),
    *under(
        "mlp",
        "mlp",
        Map("c_fc.weight", "up.kernel", "F D -> D F"),
        Map("c_proj.weight", "down.kernel", "D F -> F D"),
        *when("use_bias", Map("c_fc.bias", "up.bias", "F"), Map("c_proj.bias", "down.bias", "D")),
    ),
    others=(NORM_BIAS,),
)

FAMILY = family(Config, TABLE, "StarCoder2", "Starcoder2ForCausalLM")
