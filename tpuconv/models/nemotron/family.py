"""Nemotron: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import (
    ATTENTION,
    NORM_BIAS,
    O_BIAS,
    PLAIN_MLP,
    PLAIN_MLP_BIAS,
    PRE_NORM_BIASES,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family


@family_config
class Config(PartialRopeConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "nemotron"
    only: ClassVar = {"hidden_act": ("relu2",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}

    partial_rotary_factor: float = 0.5
    attention_bias: bool
    mlp_bias: bool


TABLE = decoder_table(
    *PRE_NORMS,
    *PRE_NORM_BIASES,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *PLAIN_MLP),
    *under("mlp", "mlp", *when("mlp_bias", *PLAIN_MLP_BIAS)),
    others=(NORM_BIAS,),
)

FAMILY = family(Config, TABLE, "Nemotron-3 8B, Nemotron-4, Minitron", "NemotronForCausalLM")
