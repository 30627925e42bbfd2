"""Cohere: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "cohere"
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    head_dim: int | None = None
    attention_bias: bool
    logit_scale: float
    use_qk_norm: bool


TABLE = decoder_table(
    Map("input_layernorm.weight", "norm.scale", "D"),
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *when(
        "use_qk_norm",
        Map("self_attn.q_norm.weight", "attn.q_norm.scale", "N H"),
        Map("self_attn.k_norm.weight", "attn.k_norm.scale", "K H"),
    ),
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "Command R, Command R+, Aya 23", "CohereForCausalLM")
