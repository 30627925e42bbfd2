"""Jais 2: config and mapping table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.nemotron import family as nemotron
from tpuconv.models.registry import family


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


TABLE = nemotron.TABLE

FAMILY = family(Config, TABLE, "Jais 2 8B, 70B", "Jais2ForCausalLM")
