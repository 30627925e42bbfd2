"""ERNIE 4.5, dense: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "ernie4_5"

    use_bias: bool | None


LAYER_ROWS = (*PRE_NORMS, *ATTENTION, *when("use_bias", *QKV_BIAS, O_BIAS))

TABLE = decoder_table(
    *LAYER_ROWS,
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("use_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "ERNIE 4.5, dense", "Ernie4_5ForCausalLM")
