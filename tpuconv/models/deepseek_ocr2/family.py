"""DeepSeek-OCR 2: the text model's config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import PRE_NORMS, decoder_table, mlp_rows
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.deepseek_v2.family import UNCORRECTED_EXPERTS
from tpuconv.models.gemma.family import BIASED_ATTENTION
from tpuconv.models.registry import family


@family_config
class Config(WrapperConfig, SparseConfig):
    """The keys of `text_config`. The weights of experts are never normalized."""

    model_type: ClassVar[str] = "deepseek_ocr2"
    only: ClassVar = {"topk_method": ("greedy", "group_limited_greedy"), "mlp_bias": (False,)}
    least: ClassVar = {"n_shared_experts": 0, "first_k_dense_replace": 0}
    nullable: ClassVar[frozenset[str]] = frozenset({"n_group", "topk_group", "topk_method"})
    derived: ClassVar[frozenset[str]] = SparseConfig.derived | {"first_k_dense_replace", "norm_topk_prob"}

    num_experts_per_tok: int = 6
    topk_method: str
    attention_bias: bool
    n_group: int = 1
    topk_group: int = 1

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
