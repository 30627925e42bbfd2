"""Mixtral: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, NUMBERED_EXPERT_MLPS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family


@family_config
class Config(OneWindow, ChosenExperts, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "mixtral"
    experts_key: ClassVar[str] = "num_local_experts"

    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int | None


TABLE = decoder_table(
    ATTN_NORM,
    *ATTENTION,
    Map("post_attention_layernorm.weight", "moe_norm.scale", "D"),
    Map("block_sparse_moe.gate.weight", "moe.router.kernel", "E D -> D E"),
    *under("block_sparse_moe", "moe", *NUMBERED_EXPERT_MLPS),
)

FAMILY = family(Config, TABLE, "Mixtral", "MixtralForCausalLM")
