"""ERNIE 4.5."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.mrope import MropeConfig, MropeOfTimeLast
from tpuconv.models.common.rows import EXPERT_MLPS, FURTHER_TOKENS, MLP, SHARED_EXPERT_ROWS, when
from tpuconv.models.common.sparse import MixedMLPs
from tpuconv.models.declare import decoder, wrapper
from tpuconv.models.parts import Attn, Experts, Mlp, Mtp, Norms
from tpuconv.models.towers.ernie.family import ERNIE_VISION
from tpuconv.models.towers.ernie.released import in_two_objects
from tpuconv.models.towers.siglip2.family import PADDLE_VISION
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    image_experts=Word("experts for images, beside the ones for text", as_="E"),
    image_width=Word("MLP width of one expert for images", as_="M"),
)

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
class ErnieExpertsConfig(DecoderConfig):
    """Experts of which each token has `moe_k`, and shared experts, which are stored as one MLP."""

    hf_names: ClassVar[Mapping[str, str]] = {"num_experts_per_tok": "moe_k"}

    num_experts_per_tok: int
    moe_num_experts: int
    moe_num_shared_experts: int
    moe_norm_min: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_experts_per_tok > self.moe_num_experts:
            yield f"moe_k={self.num_experts_per_tok} is more than moe_num_experts={self.moe_num_experts}"

    @property
    def expert_width(self) -> int:
        """The MLP width of one expert."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "E": self.moe_num_experts,
            "M": self.expert_width,
            "W": self.expert_width * self.moe_num_shared_experts,
        }

    @property
    def has_shared_experts(self) -> bool:
        """True if there are shared experts."""
        return bool(self.moe_num_shared_experts)


@family_config
class ErnieMoeConfig(ErnieExpertsConfig):
    """Layers between two have experts, every `moe_layer_interval`-th of them."""

    num_nextn_predict_layers: int

    moe_intermediate_size: int
    moe_layer_start_index: int
    moe_layer_end_index: int
    moe_layer_interval: int

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "A": self.hidden_size}

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


@family_config
class ErnieVlConfig(MropeConfig, MixedMLPs, ErnieExpertsConfig):
    """Each layer with experts has others for images. `moe_intermediate_size` are the widths of experts for text and for
    images. Without `mlp_layer_types` all layers but the first have experts."""

    default_sections: ClassVar[tuple[int, ...]] = (22, 22, 20)

    moe_intermediate_size: tuple[int, ...] | None
    mlp_layer_types: tuple[str, ...] | None
    first_k_dense_replace = 1

    @classmethod
    def around_text(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return in_two_objects(raw)

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `MropeConfig`.

        Raises:
            UnsupportedConfig: the rotary positions are not of the type `default`, the only one that the reference has.
        """
        out = super().read_ropes(raw, context)
        if (kind := out["rope"].type) != "default":
            raise UnsupportedConfig(f"rope_type={short(kind)} is not implemented for {cls.model_type}")
        return {**out, "mrope": MropeOfTimeLast(out["mrope"].sections)}

    def contradictions(self) -> Iterator[str]:
        if len(self.expert_widths) != 2 or min(self.expert_widths) < 1:
            yield f"moe_intermediate_size={short(self.expert_widths)} are not the widths of experts for text and images"
            return  # `sizes` has them
        yield from super().contradictions()

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """The MLP widths of one expert for text and of one for images."""
        return self.moe_intermediate_size or (1536, 512)

    @property
    def expert_width(self) -> int:
        return self.expert_widths[0]

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "image_width": self.expert_widths[1]}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        """See `DecoderConfig.layer_sets`; and the numbers of the experts for images, which follow those for text."""
        experts = self.moe_num_experts
        return {**super().layer_sets, "image_experts": range(experts, 2 * experts)}

    @property
    def routes_images(self) -> bool:
        return True


_RELEASED_SETS = (
    Map("gate.weight", "router.kernel", "D E"),
    Map("gate.weight_1", "images.router.kernel", "D E"),
    Map(
        "moe_statics.e_score_correction_bias",
        ("router.correction", "images.router.correction"),
        "(1 + 1) E -> E, E",
        buffer=True,
    ),
    *EXPERT_MLPS,
    *(
        Map(f"experts.{{image_experts}}.{x}_proj.weight", f"images.{x}.kernel", layout)
        for x, layout in (
            ("gate", "image_width D -> image_experts D image_width"),
            ("up", "image_width D -> image_experts D image_width"),
            ("down", "D image_width -> image_experts image_width D"),
        )
    ),
)
"""Experts for text and for images, as releases number them."""

_MODULES_OF_SETS = tuple(
    row
    for module, param, width in (("text_moe", "", "M"), ("vision_moe", "images.", "image_width"))
    for row in under(
        module,
        "",
        Map("gate.weight", f"{param}router.kernel", "E D -> D E"),
        Map("gate.moe_statics.e_score_correction_bias", f"{param}router.correction", "1 E -> E", buffer=True),
        Map(
            "experts.gate_up_proj",
            (f"{param}gate.kernel", f"{param}up.kernel"),
            f"E ({width} + {width}) D -> E D {width}, E D {width}",
        ),
        Map("experts.down_proj", f"{param}down.kernel", f"E D {width} -> E {width} D"),
    )
)
"""The same as modules of transformers."""

ERNIE4_5_VL_MOE = wrapper(
    "ernie4_5_vl_moe",
    "ERNIE 4.5 VL 28B-A3B, 424B-A47B",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Ernie4_5_VL_MoeForConditionalGeneration",
    Mlp(),  # with a part the model is built here: the text model is no family, since no release has it alone
    text=decoder(
        "ernie4_5_vl_moe_text",
        "ERNIE 4.5 VL, the text model",
        Norms(module="modules.ernie:BlockByModality"),
        Attn("use_bias", rope="pairs in float32"),
        Mlp(),
        Experts(
            "some",
            module="modules.ernie:ExpertsByModality",
            rows=(*_RELEASED_SETS, *when("has_shared_experts", *SHARED_EXPERT_ROWS)),
        ),
        config=ErnieVlConfig,
        keys={"use_bias": bool | None},
        only={"use_bias": (False,)},
        least={"moe_num_shared_experts": 0},
    ),
    forms=({"released": _RELEASED_SETS, "modules": _MODULES_OF_SETS},),
    prefix="model.",
    tied=True,
    modalities=(ERNIE_VISION,),
)
