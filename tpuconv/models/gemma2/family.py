"""Gemma 2: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MLP, decoder_table
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.gemma.family import BIASED_ATTENTION, CAUSAL
from tpuconv.models.registry import family


@family_config
class Config(PatternConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "gemma2"
    only: ClassVar = {
        **CAUSAL,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh", None),  # without effect
    }
    full_every: ClassVar[int] = 2

    attention_bias: bool
    query_pre_attn_scalar: int
    final_logit_softcapping: float | None
    attn_logit_softcapping: float | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for name in ("final_logit_softcapping", "attn_logit_softcapping"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                yield f"{name}={cap} is not positive"


NORMS = (
    Map("input_layernorm.weight", "attn_norm.scale", "D"),
    Map("post_attention_layernorm.weight", "post_attn_norm.scale", "D"),
    Map("pre_feedforward_layernorm.weight", "mlp_norm.scale", "D"),
    Map("post_feedforward_layernorm.weight", "post_mlp_norm.scale", "D"),
)

TABLE = decoder_table(*NORMS, *BIASED_ATTENTION, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Gemma 2", "Gemma2ForCausalLM")
