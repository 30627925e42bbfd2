"""Aria: the text model's config and mapping table."""

from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import BIASED_ATTENTION, PRE_NORMS, SHARED_EXPERT_ROWS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.wrapper import LLAVA, WrapperConfig, inside
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, ChosenExperts, DecoderConfig):
    """The keys of `text_config`. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "aria"
    experts_key: ClassVar[str] = "moe_num_experts"
    only: ClassVar = {"mlp_bias": (False,)}
    hf_names: ClassVar = {"num_experts_per_tok": "moe_topk"}
    outside_keys: ClassVar[frozenset[str]] = frozenset({"max_value_projector_patch_to_query_dict"})
    has_shared_expert: ClassVar[bool] = True

    moe_num_experts: int
    num_experts_per_tok: int
    moe_num_shared_experts: int
    attention_bias: bool

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "W": self.intermediate_size * self.moe_num_shared_experts}


TABLE = inside(
    decoder_table(
        *PRE_NORMS,
        *BIASED_ATTENTION,
        *under(
            "mlp",
            "moe",
            Map("router.weight", "router.kernel", "E D -> D E"),
            Map("experts.fc1.weight", ("gate.kernel", "up.kernel"), "E D (M + M) -> E D M, E D M"),
            Map("experts.fc2.weight", "down.kernel", "E M D"),
            *SHARED_EXPERT_ROWS,
        ),
    ),
    "language_model.model.",
    LLAVA,
)

FAMILY = family(Config, TABLE, "Aria, text", "AriaForConditionalGeneration")
