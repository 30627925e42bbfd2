"""The projectors of LLaVA and its kin: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.beside import Projector, ProjectorConfig
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.rows import layer_norm, rms_norm, with_bias, without_bias
from tpuconv.notation.table import Map

LLAVA_MODULES = "tpuconv.models.towers.llava.modules"

OLDER_KEY = "vision_feature_layers"
ImageSizes = tuple[tuple[int, ...], ...]
"""Heights and widths."""


@dataclass(frozen=True, kw_only=True)
class SelectedPatchesConfig(ProjectorConfig):
    """The patches that a projector reads: all, or all but a class token."""

    vision_feature_select_strategy: str = "default"

    @property
    def drops_first(self) -> bool:
        return self.vision_feature_select_strategy == "default"


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(SelectedPatchesConfig):
    """The keys of the projector of LLaVA. M is the width of all hidden states that it reads."""

    projector_hidden_act: str = "gelu"
    vision_feature_layer: int | tuple[int, ...] = -2
    multimodal_projector_bias: bool = True

    @property
    def feature_layers(self) -> tuple[int, ...]:
        layers = self.vision_feature_layer
        return (layers,) if isinstance(layers, int) else layers

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "M": tower.sizes["D"] * len(self.feature_layers)}


@dataclass(frozen=True, kw_only=True)
class VipLlavaConfig(LlavaConfig):
    """ViP-LLaVA, which has a norm of what it reads."""

    vision_feature_layer: int | tuple[int, ...] = (-2, -5, -8, -11, 6)
    projector_layernorm_eps: float = 1e-5

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        older = {"vision_feature_layer": outer[OLDER_KEY]} if OLDER_KEY in outer else {}
        fixed = {"vision_feature_select_strategy": "default", "multimodal_projector_bias": True}
        return super().from_hf({**outer, **older, **fixed}, tower, text)


@dataclass(frozen=True, kw_only=True)
class TilesConfig(SelectedPatchesConfig):
    """A projector of images that are seen whole and in tiles. `image_grid_pinpoints` are the sizes that images have
    before they are cut."""

    default_sizes: ClassVar[ImageSizes] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))

    image_grid_pinpoints: ImageSizes | None = None

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        config = super().from_hf(outer, tower, text)
        sizes = config.image_grid_pinpoints
        hashable = cls.default_sizes if sizes is None else tuple(map(tuple, sizes))
        return cls(**{**vars(config), "image_grid_pinpoints": hashable})

    def check(self, tower: Any) -> None:
        super().check(tower)
        if tower.positions - self.drops_first != tower.side**2:
            raise UnsupportedConfig(
                f"vision_feature_select_strategy='{self.vision_feature_select_strategy}' leaves "
                f"{tower.positions - self.drops_first} features of {tower.side} x {tower.side} patches",
                hint=TEXT_ALONE,
            )

    @property
    def most_tiles(self) -> int | None:
        """The number of tiles above which their features are made fewer; None for any number."""
        return None


@dataclass(frozen=True, kw_only=True)
class TiledConfig(TilesConfig, LlavaConfig):
    """LLaVA-NeXT."""


def _all_sizes(side: int, tiles: int) -> ImageSizes:
    return tuple((side * h, side * w) for h in range(1, tiles + 1) for w in range(1, tiles + 1))


@dataclass(frozen=True, kw_only=True)
class OnevisionConfig(TiledConfig):
    """LLaVA-OneVision, which makes the features of large images fewer."""

    default_sizes: ClassVar[ImageSizes] = _all_sizes(384, 6)

    vision_feature_layer: int | tuple[int, ...] = -1
    vision_feature_select_strategy: str = "full"
    vision_aspect_ratio: str = "anyres_max_9"

    def check(self, tower: Any) -> None:
        super().check(tower)
        if not self.vision_aspect_ratio.removeprefix("anyres_max_").isdecimal():
            raise UnsupportedConfig(
                f"vision_aspect_ratio='{self.vision_aspect_ratio}' is not implemented", hint=TEXT_ALONE
            )

    @property
    def most_tiles(self) -> int:
        return int(self.vision_aspect_ratio.removeprefix("anyres_max_"))


_LLAVA_ROWS = (
    Map("linear_1.weight", "up.kernel", "A M -> M A"),
    Map("linear_1.bias", "up.bias", "A", when="multimodal_projector_bias"),
    Map("linear_2.weight", "down.kernel", "O A -> A O"),
    Map("linear_2.bias", "down.bias", "O", when="multimodal_projector_bias"),
)


@dataclass(frozen=True, kw_only=True)
class MergingConfig(LlavaConfig):
    """Mistral 3, whose projector joins patches. M is the width of joined patches, E the width of one."""

    vision_feature_layer: int = -1
    multimodal_projector_bias: bool = False
    spatial_merge_size: int = 2
    text_eps: float

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "text_eps": text.rms_norm_eps}

    @property
    def drops_first(self) -> bool:
        return False

    @property
    def merge(self) -> int:
        return self.spatial_merge_size

    def sizes(self, tower: Any) -> dict[str, Any]:
        width = tower.sizes["D"]
        return {"O": self.out, "A": self.out, "E": width, "M": width * self.spatial_merge_size**2}


@dataclass(frozen=True, kw_only=True)
class LightOnConfig(MergingConfig):
    """LightOnOCR, where all but the size of blocks is fixed."""

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({key: outer[key] for key in outer if key == "spatial_merge_size"}, tower, text)


@dataclass(frozen=True, kw_only=True)
class AlignerConfig(LlavaConfig):
    """DeepSeek-VL, where all is fixed: it reads what is behind the tower's last norm."""

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({}, tower, text)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def drops_first(self) -> bool:
        return False

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "M": tower.sizes["D"]}


def _merging_rows(norm: str, up: str, down: str) -> tuple[Map, ...]:
    return (
        *rms_norm(norm, "norm"),
        *without_bias("patch_merger.merging_layer", "merging", "E M -> M E"),
        Map(f"{up}.weight", "up.kernel", "A E -> E A"),
        Map(f"{up}.bias", "up.bias", "A", when="multimodal_projector_bias"),
        Map(f"{down}.weight", "down.kernel", "O A -> A O"),
        Map(f"{down}.bias", "down.bias", "O", when="multimodal_projector_bias"),
    )


_MERGING_ROWS = _merging_rows("norm", "linear_1", "linear_2")

MERGING_MATRICES = Projector(MergingConfig, _MERGING_ROWS, f"{LLAVA_MODULES}:MergingMatrices")
"""A norm, a matrix that joins patches, and two matrices."""

LIGHTON_MATRICES = replace(MERGING_MATRICES, config=LightOnConfig)
"""The same of LightOnOCR."""

RELEASED_MERGING_MATRICES = replace(
    MERGING_MATRICES,
    rows=_merging_rows("pre_mm_projector_norm", "vision_language_adapter.w_in", "vision_language_adapter.w_out"),
)
"""The same with the names of Mistral Large 4."""

LLAVA_MATRICES = Projector(LlavaConfig, _LLAVA_ROWS, f"{LLAVA_MODULES}:LlavaMatrices")
"""Two matrices of each patch."""

ALIGNER = Projector(
    AlignerConfig,
    tuple(replace(row, hf=row.hf_names[0].replace("_", "")) for row in _LLAVA_ROWS),
    f"{LLAVA_MODULES}:LlavaMatrices",
)
"""The same of DeepSeek-VL."""

READOUT = replace(
    ALIGNER,
    rows=(*with_bias("readout.0", "up", "A M -> M A", "A"), *with_bias("readout.2", "down", "O A -> A O", "O")),
)
"""The same of VideoLLaMA 3."""

VIP_LLAVA_MATRICES = Projector(
    VipLlavaConfig,
    (*layer_norm("projector_layernorm", "norm", "M"), *_LLAVA_ROWS),
    f"{LLAVA_MODULES}:VipLlavaMatrices",
)
"""The same behind a norm."""


_TILED_ROWS = (
    *(replace(row, hf=f"multi_modal_projector.{row.hf}") for row in _LLAVA_ROWS),
    Map("image_newline", "newline", "O"),
)

TILED_MATRICES = Projector(TiledConfig, _TILED_ROWS, f"{LLAVA_MODULES}:TiledMatrices")
"""Two matrices of each patch, and what stands at the end of each row of tiles."""

ONEVISION_MATRICES = Projector(OnevisionConfig, _TILED_ROWS, f"{LLAVA_MODULES}:OnevisionMatrices")
"""The same, for larger images."""
