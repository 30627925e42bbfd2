"""OLMo 1: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import MappingTable, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json. Norms have no parameters, and no epsilon in it."""

    model_type: ClassVar[str] = "olmo"
    only: ClassVar = {"rms_norm_eps": (1e-5,)}

    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    attention_bias: bool
    clip_qkv: float | None


WITH_NORM = decoder_table(*ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS), *under("mlp", "mlp", *MLP))
TABLE = MappingTable(
    [row for row in WITH_NORM if row.jax_names != ("norm.scale",)], ignore=WITH_NORM.ignore, copies=WITH_NORM.copies
)

FAMILY = family(Config, TABLE, "OLMo 1B and 7B", "OlmoForCausalLM")
