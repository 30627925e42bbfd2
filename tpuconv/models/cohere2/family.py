"""Cohere 2: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.common.windows import ROPES_OF_WINDOWS, PatternConfig
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json. Without `layer_types` every `sliding_window_pattern`-th layer sees all tokens. Only
    layers with the window have rotary positions."""

    model_type: ClassVar[str] = "cohere2"
    only: ClassVar = {
        "use_parallel_block": (True,),
        "use_gated_activation": (True,),
        "use_qk_norm": (False,),
        "rotary_pct": (1.0,),
    }
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_OF_WINDOWS

    head_dim: int | None = None
    attention_bias: bool
    logit_scale: float
    sliding_window_pattern: int = 4

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads or self.head_dim not in (None, width // heads):
            yield f"head_dim={self.head_dim} is not hidden_size={width} divided by num_attention_heads={heads}"

    @property
    def full_every(self) -> int:  # type: ignore[override]
        """The last of as many layers sees all tokens."""
        return self.sliding_window_pattern


TABLE = decoder_table(
    Map("input_layernorm.weight", "norm.scale", "D"),
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Command R7B, Command A", "Cohere2ForCausalLM")
