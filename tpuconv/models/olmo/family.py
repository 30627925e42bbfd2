"""OLMo 1: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import MappingTable, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of config.json. Norms have no parameters, and no epsilon in it."""

    model_type: ClassVar[str] = "olmo"
    only: ClassVar = {"rms_norm_eps": (1e-5,)}

    vocab_size: int = 50304
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    clip_qkv: float | None = None


WITH_NORM = decoder_table(*ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS), *under("mlp", "mlp", *MLP))
TABLE = MappingTable(
    [row for row in WITH_NORM if row.jax_names != ("norm.scale",)], ignore=WITH_NORM.ignore, copies=WITH_NORM.copies
)

FAMILY = family(Config, TABLE, "OLMo 1B and 7B", "OlmoForCausalLM")
