"""Flint: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    PROBABLE_EXPERTS,
    QKV_BIAS,
    SHARED,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs, stepped_mlp_kinds
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, PatternConfig
from tpuconv.models.registry import family


@family_config
class Config(ChosenExperts, MixedMLPs, PatternConfig):
    """The keys of config.json. Without `layer_types` the first two layers, the last one and every fourth see all
    tokens; only layers with the window have rotary positions. Without `mlp_only_layers` the first two are dense."""

    model_type: ClassVar[str] = "flint"
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...] | None
    attention_bias: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        last = self.num_hidden_layers - 1
        full = {i for i in range(last + 1) if i < 2 or i % 4 == 1 or i == last}
        return tuple("full_attention" if i in full else "sliding_attention" for i in range(last + 1))

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        dense = (0, 1) if self.mlp_only_layers is None else self.mlp_only_layers
        return stepped_mlp_kinds(dense, self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def has_shared_experts(self) -> bool:
        """True if there is an expert that every token uses."""
        return True


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    Map("self_attn.softmax_offset", "attn.sinks", "N"),
    others=mlp_rows(*PROBABLE_EXPERTS, *under("shared_expert", "shared", *SHARED)),
)

FAMILY = family(Config, TABLE, "Flint", "FlintForCausalLM")
