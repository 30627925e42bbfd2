"""BitNet b1.58: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "bitnet"
    only: ClassVar = {"hidden_act": ("relu2",)}

    head_dim: int | None = None
    attention_bias: bool


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    Map("self_attn.attn_sub_norm.weight", "attn.sub_norm.scale", "(N H) -> N H"),
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *MLP, Map("ffn_sub_norm.weight", "sub_norm.scale", "F")),
)

FAMILY = family(Config, TABLE, "BitNet b1.58 2B4T", "BitNetForCausalLM")
