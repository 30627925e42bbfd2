"""GPT-BigCode: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import (
    GELU_TANH,
    GPT_KEYS,
    GPT_MLP,
    GPT_NORMS,
    GPT_QKV,
    GPT_QKV_BIAS,
    POSITIONS,
    PositionedConfig,
    gpt_table,
)
from tpuconv.models.registry import family


@family_config
class Config(PositionedConfig):
    """The keys of config.json. All heads share one key and one value."""

    model_type: ClassVar[str] = "gpt_bigcode"
    only: ClassVar = {
        "activation_function": GELU_TANH,
        "scale_attn_weights": (True,),
        "multi_query": (True,),
        "add_cross_attention": (False,),
    }
    hf_names: ClassVar = GPT_KEYS
    left_out: ClassVar = frozenset({"n_ctx", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"})

    @property
    def key_heads(self) -> int:
        return 1


TABLE = gpt_table(
    (
        *GPT_NORMS,
        Map("attn.c_attn.weight", GPT_QKV, "((N + K + K) H) D -> D N H, D K H, D K H"),
        Map("attn.c_attn.bias", GPT_QKV_BIAS, "((N + K + K) H) -> N H, K H, K H"),
        Map("attn.c_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
        Map("attn.c_proj.bias", "attn.o.bias", "D"),
        *GPT_MLP,
    ),
    others=(POSITIONS,),
)

FAMILY = family(Config, TABLE, "StarCoder, SantaCoder", "GPTBigCodeForCausalLM", model="gpt2")
