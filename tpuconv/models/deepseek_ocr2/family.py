"""DeepSeek-OCR 2: the text model's config and mapping table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import PRE_NORMS, decoder_table, mlp_rows
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.deepseek_v2.family import UNCORRECTED_EXPERTS
from tpuconv.models.gemma.family import BIASED_ATTENTION
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(WrapperConfig, SparseConfig):
    """The keys of `text_config`. The weights of experts are never normalized."""

    model_type: ClassVar[str] = "deepseek_ocr2"
    only: ClassVar = {"topk_method": ("greedy", "group_limited_greedy"), "mlp_bias": (False,)}
    least: ClassVar = {"n_shared_experts": 0, "first_k_dense_replace": 0}
    nullable: ClassVar[frozenset[str]] = frozenset({"n_group", "topk_group", "topk_method"})
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"first_k_dense_replace", "norm_topk_prob"}

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.0
    topk_method: str = "greedy"
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim not in (None, self.hidden_size // self.num_attention_heads):
            yield f"head_dim={self.head_dim} is not hidden_size by num_attention_heads"

    @property
    def groups(self) -> tuple[int, int]:
        return (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)


TABLE = inside(
    decoder_table(*PRE_NORMS, *BIASED_ATTENTION, others=mlp_rows(*UNCORRECTED_EXPERTS)),
    "model.",
    {
        **dict.fromkeys(("sam_model", "qwen2_model", "vision_tower"), SEES),
        **dict.fromkeys(("projector", "multi_modal_projector"), BRINGS),
    },
    tensors={"view_seperator": BRINGS, "view_separator": BRINGS},
)

FAMILY = family(Config, TABLE, "DeepSeek-OCR 2, text", "DeepseekOcr2ForConditionalGeneration")
