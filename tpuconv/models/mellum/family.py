"""Mellum 2: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    FURTHER_TOKENS,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.common.windows import TwoRopesConfig
from tpuconv.models.qwen3_moe.family import MOE_ROWS
from tpuconv.models.registry import family

MELLUM_ROPE = Rope(theta=500_000.0)
"""The rotary positions of layers that see all tokens, of a config.json without any."""


@family_config
class Config(ChosenExperts, MixedMLPs, TwoRopesConfig):
    """The keys of config.json. Without `layer_types` all layers see all tokens, without `mlp_layer_types` all have
    experts."""

    model_type: ClassVar[str] = "mellum"
    least: ClassVar[Mapping[str, int]] = {"num_mtp_layers": 0}
    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    aliases: ClassVar[Mapping[str, str]] = {"num_nextn_predict_layers": "num_mtp_layers"}
    full_every: ClassVar[int] = 1

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    rope: Rope = MELLUM_ROPE
    local_rope: Rope = PLAIN_ROPE
    attention_bias: bool
    mlp_layer_types: tuple[str, ...] | None
    num_mtp_layers: int | None
    mtp_layer_types: tuple[str, ...] | None
    mtp_mlp_layer_types: tuple[str, ...] | None


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    others=mlp_rows(*MOE_ROWS),
    ignore={"mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "Mellum 2", "MellumForCausalLM")
