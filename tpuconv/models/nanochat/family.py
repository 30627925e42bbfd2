"""nanochat: config and mapping table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json. Norms have no parameters."""

    model_type: ClassVar[str] = "nanochat"
    only: ClassVar = {"hidden_act": ("relu2",)}

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int = 8192
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    final_logit_softcapping: float | None = 15.0

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping={self.final_logit_softcapping} is not positive"


NORMED_TABLE = decoder_table(
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", Map("fc1.weight", "up.kernel", "F D -> D F"), Map("fc2.weight", "down.kernel", "D F -> F D")),
)
TABLE = NORMED_TABLE.with_rows([row for row in NORMED_TABLE.rows if row.jax_names != ("norm.scale",)])

FAMILY = family(Config, TABLE, "nanochat", "NanoChatForCausalLM")
