"""Jais 2: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.nemotron import family as nemotron
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "jais2"
    only: ClassVar = {"hidden_act": ("relu2",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    attention_bias: bool
    mlp_bias: bool


TABLE = nemotron.TABLE

FAMILY = family(Config, TABLE, "Jais 2 8B, 70B", "Jais2ForCausalLM")
