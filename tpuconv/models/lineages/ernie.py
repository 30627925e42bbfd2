"""ERNIE 4.5."""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig
from tpuconv.models.common.rows import EXPERT_MLPS, FURTHER_TOKENS, MLP, SHARED_EXPERT_ROWS, when
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.parts import Attn, Experts, Mlp, Mtp, Norms
from tpuconv.models.towers.modalities import PADDLE_VISION
from tpuconv.notation.table import Map, under

ERNIE4_5 = decoder(
    "ernie4_5",
    "ERNIE 4.5, dense",
    "Ernie4_5ForCausalLM",
    Norms(),
    Attn("use_bias", rope="pairs in float32"),
    Mlp(bias="use_bias"),
    keys={"use_bias": bool | None},
)

PADDLEOCR_VL = wrapper(
    "paddleocr_vl",
    "PaddleOCR-VL",
    "PaddleOCRVLForConditionalGeneration",
    Attn("use_bias"),
    text=ERNIE4_5,
    mixins=(MropeConfig,),
    prefix="model.",
    flat=True,
    tied=True,
    modalities=(PADDLE_VISION,),
    only={"sliding_window": (None,)},
)


@family_config
class ErnieMoeConfig(DecoderConfig):
    """Layers between two have experts, every `moe_layer_interval`-th of them."""

    hf_names: ClassVar[Mapping[str, str]] = {"num_experts_per_tok": "moe_k"}

    num_nextn_predict_layers: int

    moe_intermediate_size: int
    num_experts_per_tok: int
    moe_num_experts: int
    moe_num_shared_experts: int
    moe_layer_start_index: int
    moe_layer_end_index: int
    moe_layer_interval: int
    moe_norm_min: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_experts_per_tok > self.moe_num_experts:
            yield f"moe_k={self.num_experts_per_tok} is more than moe_num_experts={self.moe_num_experts}"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "E": self.moe_num_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_intermediate_size * self.moe_num_shared_experts,
            "A": self.hidden_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        layers, first, last = range(self.num_hidden_layers), self.moe_layer_start_index, self.moe_layer_end_index
        last = self.num_hidden_layers - 1 if last == -1 else last
        sparse = {i: None for i in layers if first <= i <= last and (i + 1) % self.moe_layer_interval == 0}
        return {
            **super().layer_sets,
            "I": tuple(i for i in layers if i not in sparse),
            "J": tuple(sparse),
            "U": tuple(range(self.num_nextn_predict_layers)),
        }

    @property
    def has_shared_experts(self) -> bool:
        """True if there are shared experts, which are stored as one MLP."""
        return bool(self.moe_num_shared_experts)


ERNIE_LAYER = (*Norms().table_rows, *Attn("use_bias").table_rows)

ERNIE4_5_MOE = ERNIE4_5.but(
    "ernie4_5_moe",
    "ERNIE 4.5 21B-A3B, 300B-A47B",
    "Ernie4_5_MoeForCausalLM",
    Mlp(),
    Experts(
        "some",
        module="common.moe:RoutedExperts",
        router="modules.ernie:Router",
        rows=(
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("moe_statics.e_score_correction_bias", "router.correction", "1 E -> E", buffer=True),
            *EXPERT_MLPS,
            *when("has_shared_experts", *SHARED_EXPERT_ROWS),
        ),
    ),
    Mtp(module="modules.ernie:MTPLayer"),
    base="modules.ernie:NormedDraftDecoder",
    config=ErnieMoeConfig,
    keys={"use_bias": bool | None},
    defaults={"num_nextn_predict_layers": 1},
    only={"use_bias": (False,)},
    least={
        **dict.fromkeys(("moe_layer_start_index", "moe_num_shared_experts", "num_nextn_predict_layers"), 0),
        "moe_layer_end_index": -1,
    },
    others=(
        *under("model.mtp_block.{U}", "mtp.{U}", *ERNIE_LAYER, *under("mlp", "mlp", *MLP)),
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
