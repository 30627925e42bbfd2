"""StarCoder2: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    NORM_BIAS,
    O_BIAS,
    PRE_NORM_BIASES,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family


@family_config
class Config(OneWindow, DecoderConfig):
    """The keys of config.json. The sliding window, if any, applies to all layers."""

    model_type: ClassVar[str] = "starcoder2"
    only: ClassVar = {"hidden_act": ("gelu_pytorch_tanh",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_epsilon"}

    head_dim: int | None = None
    sliding_window: int | None
    use_bias: bool


TABLE = decoder_table(
    *PRE_NORMS,
    *PRE_NORM_BIASES,
    *ATTENTION,
    *when("use_bias", *QKV_BIAS, O_BIAS),
    *under(
        "mlp",
        "mlp",
        Map("c_fc.weight", "up.kernel", "F D -> D F"),
        Map("c_proj.weight", "down.kernel", "D F -> F D"),
        *when("use_bias", Map("c_fc.bias", "up.bias", "F"), Map("c_proj.bias", "down.bias", "D")),
    ),
    others=(NORM_BIAS,),
)

FAMILY = family(Config, TABLE, "StarCoder2", "Starcoder2ForCausalLM")
