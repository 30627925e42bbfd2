"""CWM (Code World Model): config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` the first of every four layers sees all tokens."""

    model_type: ClassVar[str] = "cwm"
    only: ClassVar = {"attention_bias": (False,), "mlp_bias": (False,)}
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    vocab_size: int = 128256
    hidden_size: int = 6144
    intermediate_size: int = 21504
    num_hidden_layers: int = 64
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    sliding_window: int | None = 8192
    layer_types: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        layers = range(self.num_hidden_layers)
        return self.layer_types or tuple("sliding_attention" if i % 4 else "full_attention" for i in layers)


TABLE = llama.TABLE

FAMILY = family(Config, TABLE, "CWM", "CwmForCausalLM", model="llama")
