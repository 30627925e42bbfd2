"""OLMoE: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.clipped import ClippedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.qwen3_moe.family import MOE_ROWS
from tpuconv.models.registry import family


@family_config
class Config(ClippedConfig, ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "olmoe"

    head_dim: int | None = None
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    attention_bias: bool
    clip_qkv: float | None


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *NORMS_OF_ALL_HEADS,
    *under("mlp", "moe", *MOE_ROWS),
)

FAMILY = family(Config, TABLE, "OLMoE-1B-7B", "OlmoeForCausalLM")
