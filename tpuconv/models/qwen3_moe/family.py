"""Qwen3, mixture of experts: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    EXPERT_MLPS,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs, stepped_mlp_kinds
from tpuconv.models.registry import family


@family_config
class Config(ChosenExperts, MixedMLPs, DecoderConfig):
    """The keys of config.json. `max_window_layers` has no effect, other than in the dense Qwen3: the window applies to
    all layers."""

    model_type: ClassVar[str] = "qwen3_moe"
    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    least: ClassVar[Mapping[str, int]] = {"max_window_layers": 0}

    moe_intermediate_size: int
    head_dim: int | None = None
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...] | None
    use_sliding_window: bool
    sliding_window: int | None
    max_window_layers: int | None = None
    attention_bias: bool

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        return stepped_mlp_kinds(self.mlp_only_layers or (), self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers


MOE_ROWS = (Map("gate.weight", "router.kernel", "E D -> D E"), *EXPERT_MLPS)


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    others=mlp_rows(*MOE_ROWS),
)

FAMILY = family(Config, TABLE, "Qwen3, mixture of experts", "Qwen3MoeForCausalLM")
