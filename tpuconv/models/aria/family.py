"""Aria: the text model's config and mapping table."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import PRE_NORMS, SHARED_EXPERT_ROWS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.wrapper import LLAVA, WrapperConfig, inside
from tpuconv.models.gemma.family import BIASED_ATTENTION
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(WrapperConfig, ChosenExperts, DecoderConfig):
    """The keys of `text_config`. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "aria"
    experts_key: ClassVar[str] = "moe_num_experts"
    only: ClassVar = {"mlp_bias": (False,)}
    hf_names: ClassVar = {"num_experts_per_tok": "moe_topk"}
    outside_keys: ClassVar[frozenset[str]] = frozenset({"max_value_projector_patch_to_query_dict"})
    has_shared_expert: ClassVar[bool] = True

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    moe_num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_num_shared_experts: int = 2
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False

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
