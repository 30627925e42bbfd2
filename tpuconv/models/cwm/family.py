"""CWM (Code World Model): config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` the first of every four layers sees all tokens."""

    model_type: ClassVar[str] = "cwm"
    only: ClassVar = {"attention_bias": (False,), "mlp_bias": (False,)}
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    @property
    def kinds(self) -> tuple[str, ...]:
        layers = range(self.num_hidden_layers)
        return self.layer_types or tuple("sliding_attention" if i % 4 else "full_attention" for i in layers)


TABLE = llama.TABLE

FAMILY = family(Config, TABLE, "CWM", "CwmForCausalLM", model="llama")
