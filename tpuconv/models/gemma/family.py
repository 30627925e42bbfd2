"""Gemma, the first version: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family

CAUSAL = {"use_bidirectional_attention": (False, None)}
"""The implemented values of a key that all Gemmas have."""


@family_config
class Config(DecoderConfig):
    """The keys of config.json. `hidden_act` "gelu" means the tanh approximation too, and `hidden_activation` of older
    files has no effect."""

    model_type: ClassVar[str] = "gemma"
    only: ClassVar = {
        **CAUSAL,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": ("gelu_pytorch_tanh", "gelu", None),
    }

    attention_bias: bool


BIASED_ATTENTION = (*ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS))

TABLE = decoder_table(*PRE_NORMS, *BIASED_ATTENTION, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Gemma, the first version", "GemmaForCausalLM")
