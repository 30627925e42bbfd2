"""Helium: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family

HELIUM_ROPE = Rope(theta=100_000.0)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json. The output of attention is as wide as the model."""

    model_type: ClassVar[str] = "helium"
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": HELIUM_ROPE.theta}

    vocab_size: int = 48000
    hidden_size: int = 2560
    intermediate_size: int = 7040
    num_hidden_layers: int = 24
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 20
    head_dim: int | None = 128
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-8
    tie_word_embeddings: bool = False
    rope: Rope = HELIUM_ROPE
    attention_bias: bool = False
    mlp_bias: bool = False

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if (width := self.axes["H"] * self.num_attention_heads) != self.hidden_size:
            yield f"the heads are {width} wide together, which is not hidden_size={self.hidden_size}"


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("mlp_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "Helium 1 2B", "HeliumForCausalLM")
