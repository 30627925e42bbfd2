"""Kolibri 1: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, EXPERT_MLPS, HEAD_NORMS, PRE_NORMS, SHARED_EXPERT_ROWS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family


@family_config
class Config(ChosenExperts, PatternConfig):
    """The keys of config.json. Without `layer_types` every fifth layer sees all tokens. With a window, only layers with
    it have rotary positions. `intermediate_size` has no effect, since no layer is dense."""

    model_type: ClassVar[str] = "kolibri1"
    synonyms: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    full_every: ClassVar[int] = 5

    intermediate_size: int = 1
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool

    @property
    def has_shared_experts(self) -> bool:
        """True if there is an expert that every token uses."""
        return True

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        has_windows = self.sliding_window is not None
        return tuple(None if has_windows and kind == "full_attention" else self.rope for kind in self.kinds)


TABLE = decoder_table(
    *PRE_NORMS,
    Map("post_attn_norm.weight", "post_attn_norm.scale", "D"),
    Map("post_ffn_norm.weight", "post_mlp_norm.scale", "D"),
    *ATTENTION,
    *HEAD_NORMS,
    *under("mlp", "moe", Map("gate.weight", "router.kernel", "E D -> D E"), *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
    Map("moe.router.expert_bias", "moe.router.correction", "E", buffer=True),
)

FAMILY = family(Config, TABLE, "Kolibri 1", "Kolibri1ForCausalLM")
