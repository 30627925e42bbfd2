"""The tower of MiniCPM-V 4.6 and 4.7 and its projector: configs and tables."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.rows import CLIP_LAYERS, IN_HEADS, OUT_OF_HEADS, PATCH_MATRIX, layer_norm, with_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under

MINICPM_MODULES = "tpuconv.models.towers.minicpm.modules"
JOINED_SIDE = 2
"""Patches are joined 2 x 2."""


@dataclass(frozen=True, kw_only=True)
class MiniCpmVitConfig(ImageConfig):
    """The keys of `vision_config`. M is the width of joined patches, R of the MLP behind them."""

    vision_use_head: ClassVar[bool] = False

    window_kernel_size: tuple[int, ...] = (JOINED_SIDE, JOINED_SIDE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_kernel_size != (JOINED_SIDE, JOINED_SIDE):
            raise UnsupportedConfig(f"window_kernel_size={self.window_kernel_size} is not implemented", hint=TEXT_ALONE)

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "M": self.hidden_size * JOINED_SIDE**2, "R": self.intermediate_size * JOINED_SIDE**2}


@dataclass(frozen=True, kw_only=True)
class RoundsConfig(ProjectorConfig):
    """The keys of the projector. I are its rounds before the last, J the last."""

    insert_layer_id: int = 6
    downsample_mode: str = "16x"
    merge_kernel_size: tuple[int, ...] = (JOINED_SIDE, JOINED_SIDE)
    merger_times: int = 1

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.merge_kernel_size != (JOINED_SIDE, JOINED_SIDE):
            raise UnsupportedConfig(f"merge_kernel_size={self.merge_kernel_size} is not implemented", hint=TEXT_ALONE)
        if self.merger_times < 1 or self.insert_layer_id >= tower.num_hidden_layers:
            raise ConfigError(
                f"config.json: merger_times={self.merger_times}, insert_layer_id={self.insert_layer_id} do not fit "
                f"an encoder of {tower.num_hidden_layers} layers"
            )

    @property
    def joins_inside(self) -> bool:
        """True if patches are joined inside the tower."""
        return self.downsample_mode != "4x" and self.insert_layer_id >= 0

    def sizes(self, tower: Any) -> dict[str, Any]:
        last = self.merger_times - 1
        return {"O": self.out, "A": tower.sizes["M"], "I": range(last), "J": (last,)}


MINICPM_VIT = Tower(
    "minicpm_vit",
    "MiniCPM-V 4.6",
    MiniCpmVitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
        *under(
            "vit_merger",
            "inside",
            *layer_norm("layer_norm1", "attn_norm"),
            *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("self_attn.out_proj", "attn.o", OUT_OF_HEADS, "D"),
            *layer_norm("pre_norm", "norm", "M"),
            *with_bias("linear_1", "up", "R M -> M R", "R"),
            *with_bias("linear_2", "down", "D R -> R D", "D"),
        ),
    ),
    f"{MINICPM_MODULES}:MiniCpmVit",
)


def _round(index: str, out: str) -> tuple[Map, ...]:
    return under(
        f"mlp.{{{index}}}",
        f"rounds.{{{index}}}",
        *layer_norm("pre_norm", "norm", "M"),
        *with_bias("linear_1", "up", "A M -> M A", "A"),
        *with_bias("linear_2", "down", f"{out} A -> A {out}", out),
    )


ROUNDS = Projector(RoundsConfig, (*_round("I", "D"), *_round("J", "O")), f"{MINICPM_MODULES}:Rounds")
"""Patches are joined once or several times, each time with a norm and two matrices."""


@dataclass(frozen=True, kw_only=True)
class MarkedRoundsConfig(RoundsConfig):
    """The keys of the projector of MiniCPM-V 4.7, and the tokens around its images."""

    image_start_id: int | None = None
    image_end_id: int | None = None
    slice_start_id: int | None = None
    slice_end_id: int | None = None
    newline_id: int | None = None

    @property
    def other_markers(self) -> tuple[int | None, ...]:
        """The ids of the markers besides the begin of a slice."""
        return self.image_start_id, self.image_end_id, self.slice_end_id, self.newline_id


CANVAS_VIT = replace(MINICPM_VIT, name="canvas_vit", summary="MiniCPM-V 4.7", encoder=f"{MINICPM_MODULES}:CanvasVit")
MARKED_ROUNDS = replace(ROUNDS, config=MarkedRoundsConfig)


MINICPM_VISION = Modality(VISION, MINICPM_VIT, ROUNDS, prefix="model.vision_tower.", projector_prefix="model.merger.")
"""MiniCPM-V 4.6 and MiniCPM-OCR."""

MINICPM47_VISION = replace(MINICPM_VISION, tower=CANVAS_VIT, projector=MARKED_ROUNDS)
"""MiniCPM-V 4.7."""
