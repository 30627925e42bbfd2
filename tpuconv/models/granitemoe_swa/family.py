"""Granite with sliding windows, mixture of experts: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, O_BIAS, PRE_NORMS, QKV_BIAS, STACKED_EXPERTS, decoder_table, when
from tpuconv.models.granite_swa.family import SINKS, GraniteWindows
from tpuconv.models.granitemoe.family import FUSED_SHARED, SharedConfig
from tpuconv.models.registry import family


@family_config
class Config(GraniteWindows, SharedConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "granitemoe_swa"


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under(
        "block_sparse_moe",
        "moe",
        Map("router.weight", "router.kernel", "E D -> D E"),
        *STACKED_EXPERTS,
    ),
    *under("shared_mlp", "moe.shared", *when("has_shared_expert", *FUSED_SHARED)),
    others=(SINKS,),
)

FAMILY = family(Config, TABLE, "Granite with sliding windows, mixture of experts", "GraniteMoeSWAForCausalLM")
