"""dots.llm1: config and mapping table."""

from dataclasses import dataclass
from typing import ClassVar

from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    HEAD_NORMS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(SparseConfig, PatternConfig):
    """The keys of config.json. Without `layer_types` the layers from `max_window_layers` on have the window, if there
    is one. transformers has no numbers of experts for a file without them; these come from the released model."""

    model_type: ClassVar[str] = "dots1"
    only: ClassVar = {
        "mlp_layer_types": (None,),
        "moe_layer_freq": (1,),
        "scoring_func": ("noaux_tc", "sigmoid"),
    }
    least: ClassVar = {"first_k_dense_replace": 0, "max_window_layers": 0}

    vocab_size: int = 152064
    hidden_size: int = 4608
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 62
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    n_routed_experts: int = 128
    n_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = False
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 62
    layer_types: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(self.num_hidden_layers))


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *HEAD_NORMS,
    others=mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
)

FAMILY = family(Config, TABLE, "dots.llm1", "Dots1ForCausalLM")
