"""Solar Open: config and mapping table."""

from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.registry import family


@family_config
class Config(SparseConfig):
    """The keys of config.json. All layers have experts; `intermediate_size` is not used."""

    model_type: ClassVar[str] = "solar_open"
    only: ClassVar = {"first_k_dense_replace": (0,), "mlp_layer_types": (None,), "use_qk_norm": (False,)}
    least: ClassVar = {"first_k_dense_replace": 0}

    intermediate_size: int = 10240
    attention_bias: bool


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    others=mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS, *SHARED_EXPERT_ROWS),
)

FAMILY = family(Config, TABLE, "Solar Open 100B", "SolarOpenForCausalLM")
