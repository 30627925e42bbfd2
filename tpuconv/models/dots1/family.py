"""dots.llm1: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
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


@family_config
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

    head_dim: int | None = None
    n_routed_experts: int = 128
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    attention_bias: bool
    max_window_layers: int

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
