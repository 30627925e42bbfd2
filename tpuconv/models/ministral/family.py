"""Ministral 8B: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` all layers have the window."""

    model_type: ClassVar[str] = "ministral"
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.layer_types or (kind,) * self.num_hidden_layers


TABLE = llama.TABLE

FAMILY = family(Config, TABLE, "Ministral 8B (2410)", "MinistralForCausalLM", model="llama")
