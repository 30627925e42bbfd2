"""Ministral 8B: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` all layers have the window."""

    model_type: ClassVar[str] = "ministral"
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.layer_types or (kind,) * self.num_hidden_layers


TABLE = llama.TABLE

FAMILY = family(Config, TABLE, "Ministral 8B (2410)", "MinistralForCausalLM", model="llama")
