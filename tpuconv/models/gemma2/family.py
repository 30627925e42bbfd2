"""Gemma 2: config and mapping table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import MLP, decoder_table
from tpuconv.models.common.windows import PatternConfig
from tpuconv.models.gemma.family import BIASED_ATTENTION, CAUSAL
from tpuconv.models.registry import family


@dataclass(frozen=True)
class Config(PatternConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "gemma2"
    only: ClassVar = {
        **CAUSAL,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh", None),  # without effect
    }
    full_every: ClassVar[int] = 2

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    rope: Rope = PLAIN_ROPE
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0

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
