"""Granite 3, mixture of experts: config and mapping table."""

from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.granite import family as granite
from tpuconv.models.registry import family


@family_config
class Config(ChosenExperts, granite.Config):
    """The keys of config.json. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "granitemoe"
    experts_key: ClassVar[str] = "num_local_experts"
    only: ClassVar = {"mlp_bias": (False,)}

    num_local_experts: int
    num_experts_per_tok: int

    @classmethod
    def of_type(cls, model_type: str | None) -> type[DecoderConfig]:
        return SharedConfig if cls is Config and model_type == "granitemoeshared" else cls

    @property
    def has_shared_expert(self) -> bool:
        """True if all tokens pass an MLP beside the experts."""
        return False


@family_config
class SharedConfig(Config):
    """Granite MoE with a shared expert."""

    model_type: ClassVar[str] = "granitemoeshared"
    least: ClassVar = {"shared_intermediate_size": 0}

    shared_intermediate_size: int

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "W": self.shared_intermediate_size}

    @property
    def has_shared_expert(self) -> bool:
        return bool(self.shared_intermediate_size)


FUSED_EXPERTS = (
    Map("router.layer.weight", "router.kernel", "E D -> D E"),
    Map("input_linear.weight", ("gate.kernel", "up.kernel"), "E (M + M) D -> E D M, E D M"),
    Map("output_linear.weight", "down.kernel", "E D M -> E M D"),
)

FUSED_SHARED = (
    Map("input_linear.weight", ("gate.kernel", "up.kernel"), "(W + W) D -> D W, D W"),
    Map("output_linear.weight", "down.kernel", "D W -> W D"),
)

TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("block_sparse_moe", "moe", *FUSED_EXPERTS),
    *under("shared_mlp", "moe.shared", *when("has_shared_expert", *FUSED_SHARED)),
)

FAMILY = family(
    Config,
    TABLE,
    "Granite 3, mixture of experts",
    "GraniteMoeForCausalLM",
    types={"GraniteMoeSharedForCausalLM": "granitemoeshared"},
)
