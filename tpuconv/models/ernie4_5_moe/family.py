"""ERNIE 4.5, mixture of experts: config and mapping table."""

from collections.abc import Iterator
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import EXPERT_MLPS, FURTHER_TOKENS, MLP, SHARED, decoder_table, when
from tpuconv.models.ernie4_5 import family as dense
from tpuconv.models.registry import family


@family_config
class Config(dense.Config):
    """The keys of config.json."""

    model_type: ClassVar[str] = "ernie4_5_moe"
    only: ClassVar = {"use_bias": (False,)}
    least: ClassVar = {
        "moe_layer_start_index": 0,
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": 0,
        "num_nextn_predict_layers": 0,
    }

    num_nextn_predict_layers: int = 1
    head_dim: int | None = None
    moe_intermediate_size: int
    moe_k: int
    moe_num_experts: int
    moe_num_shared_experts: int
    moe_layer_start_index: int
    moe_layer_end_index: int
    moe_layer_interval: int
    moe_norm_min: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.moe_k > self.moe_num_experts:
            yield f"moe_k={self.moe_k} is more than moe_num_experts={self.moe_num_experts}"

    @property
    def axes(self) -> dict[str, Any]:
        layers, first, last = range(self.num_hidden_layers), self.moe_layer_start_index, self.moe_layer_end_index
        last = self.num_hidden_layers - 1 if last == -1 else last
        sparse = {i: None for i in layers if first <= i <= last and (i + 1) % self.moe_layer_interval == 0}
        return {
            **super().axes,
            "E": self.moe_num_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_intermediate_size * self.moe_num_shared_experts,
            "I": tuple(i for i in layers if i not in sparse),
            "J": tuple(sparse),
            "A": self.hidden_size,
            "U": tuple(range(self.num_nextn_predict_layers)),
        }

    @property
    def has_shared_experts(self) -> bool:
        """True if there are shared experts, which are stored as one MLP."""
        return bool(self.moe_num_shared_experts)


TABLE = decoder_table(
    *dense.LAYER_ROWS,
    others=(
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under(
            "model.layers.{J}.mlp",
            "layers.{J}.moe",
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("moe_statics.e_score_correction_bias", "router.correction", "1 E -> E", buffer=True),
            *EXPERT_MLPS,
            *under("shared_experts", "shared", *when("has_shared_experts", *SHARED)),
        ),
        *under("model.mtp_block.{U}", "mtp.{U}", *dense.LAYER_ROWS, *under("mlp", "mlp", *MLP)),
        Map("model.mtp_emb_norm.{U}.weight", "mtp.{U}.embed_norm.scale", "D"),
        Map("model.mtp_hidden_norm.{U}.weight", "mtp.{U}.hidden_norm.scale", "D"),
        Map(
            "model.mtp_linear_proj.{U}.weight",
            ("mtp.{U}.from_embed.kernel", "mtp.{U}.from_hidden.kernel"),
            "D (A + A) -> A D, A D",
        ),
    ),
    ignore={"*mtp*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "ERNIE 4.5 21B-A3B, 300B-A47B", "Ernie4_5_MoeForCausalLM")
