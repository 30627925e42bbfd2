"""GPT-2: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import (
    GELU_TANH,
    GPT_KEYS,
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
    """The keys of config.json."""

    model_type: ClassVar[str] = "gpt2"
    only: ClassVar = {
        "activation_function": GELU_TANH,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    hf_names: ClassVar = GPT_KEYS
    left_out: ClassVar = frozenset({"n_ctx", "reorder_and_upcast_attn"})


TABLE = gpt_table(
    (
        *GPT_NORMS,
        Map("attn.c_attn.weight", GPT_QKV, "D ((N + K + K) H) -> D N H, D K H, D K H", input_first=True),
        Map("attn.c_attn.bias", GPT_QKV_BIAS, "((N + K + K) H) -> N H, K H, K H"),
        Map("attn.c_proj.weight", "attn.o.kernel", "(N H) D -> N H D", input_first=True),
        Map("attn.c_proj.bias", "attn.o.bias", "D"),
        Map("mlp.c_fc.weight", "mlp.up.kernel", "D F", input_first=True),
        Map("mlp.c_fc.bias", "mlp.up.bias", "F"),
        Map("mlp.c_proj.weight", "mlp.down.kernel", "F D", input_first=True),
        Map("mlp.c_proj.bias", "mlp.down.bias", "D"),
    ),
    others=(POSITIONS,),
)

FAMILY = family(Config, TABLE, "GPT-2", "GPT2LMHeadModel")
