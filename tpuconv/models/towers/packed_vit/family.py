"""The towers of Cosmos 3 Edge, Hy4-VL, Hunyuan-VL and MiniMax-M3: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.qwen_vit.family import PATCH, QwenVitConfig
from tpuconv.models.towers.qwen_vit.modalities import QWEN3_VISION
from tpuconv.models.towers.rows import (
    CLIP_LAYERS,
    DOWN,
    IN_HEADS,
    OUT_OF_HEADS,
    PATCH_MATRIX,
    UP,
    layer_norm,
    rms_norm,
    with_bias,
    without_bias,
)
from tpuconv.notation.table import Map, under

PACKED_VIT_MODULES = "tpuconv.models.towers.packed_vit.modules"
PLACES_IN_IMAGES = 3
"""Column, row, and the number of the image."""
CLIP_KEYS = {**QwenVitConfig.aliases, "num_channels": "in_channels"}


@dataclass(frozen=True, kw_only=True)
class EdgeVitConfig(QwenVitConfig):
    """The tower of Cosmos 3 Edge, SigLIP 2 on a sequence of patches."""

    aliases: ClassVar[Mapping[str, str]] = CLIP_KEYS

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    temporal_patch_size: int = 1
    num_patches: int = 256
    layer_norm_eps: float = 1e-6

    @property
    def positions(self) -> int:
        return self.num_patches


@dataclass(frozen=True, kw_only=True)
class WideMergerConfig(ProjectorConfig):
    """The keys of the projector of Cosmos 3 Edge."""

    projector_hidden_size: int = 11520

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": self.projector_hidden_size}


EDGE_VIT = Tower(
    "edge_vit",
    "Cosmos 3 Edge",
    EdgeVitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", "D C -> C D", "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
    ),
    f"{PACKED_VIT_MODULES}:EdgeVit",
)

WIDE_MERGER = Projector(
    WideMergerConfig,
    (
        *layer_norm("norm", "norm"),
        *with_bias("linear_fc1", "up", "W M -> M W", "W"),
        *with_bias("linear_fc2", "down", "O W -> W O", "O"),
    ),
    "tpuconv.models.towers.qwen_vit.modules:Merger",
)
"""Qwen3-VL's merger with a width of its own."""


@dataclass(frozen=True, kw_only=True)
class HyVitConfig(QwenVitConfig):
    """The tower of Hy4-VL. Its table of positions has a row for a class token, which images do not have."""

    aliases: ClassVar[Mapping[str, str]] = {
        **CLIP_KEYS,
        "attention_heads": "num_heads",
        "layer_norm_eps": "rms_norm_eps",
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "interpolate_mode": ("bilinear", "bicubic"),
        "temporal_patch_size": (1,),
    }

    depth: int = 40
    hidden_size: int = 1536
    intermediate_size: int = 6144
    num_heads: int = 16
    hidden_act: str = "gelu"
    patch_size: int = 16
    temporal_patch_size: int = 1
    interpolate_mode: str = "bilinear"
    rms_norm_eps: float = 1e-5
    max_image_size: int = 2048
    out_hidden_size: int = 6144

    @property
    def table_side(self) -> int:
        return self.max_image_size // self.patch_size

    @property
    def positions(self) -> int:
        return self.table_side**2 + 1


@dataclass(frozen=True, kw_only=True)
class RowsConfig(ProjectorConfig):
    """The projector of Hy4-VL, which ends each row of features."""

    def check(self, tower: Any) -> None:
        super().check(tower)
        if tower.out_hidden_size != self.out:
            raise ConfigError(
                f"config.json: out_hidden_size={tower.out_hidden_size} of the encoder is not the text's {self.out}"
            )


HY_VIT = Tower(
    "hy_vit",
    "Hy4-VL",
    HyVitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *layer_norm("input_layernorm", "attn_norm"),
            *layer_norm("post_attention_layernorm", "mlp_norm"),
            *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.dense_h_to_4h", "mlp.up", UP, "F"),
            *with_bias("mlp.dense_4h_to_h", "mlp.down", DOWN, "D"),
        ),
    ),
    f"{PACKED_VIT_MODULES}:HyVit",
)

ENDED_ROWS = Projector(
    RowsConfig,
    (
        *rms_norm("norm", "norm"),
        *with_bias("proj.0", "up", "W D s r -> (s r D) W", "W"),
        *with_bias("proj.2", "down", "O W 1 1 -> W O", "O"),
        Map("image_newline", "newline", "O"),
    ),
    f"{PACKED_VIT_MODULES}:EndedRows",
)
"""A norm, two convolutions that join patches, and what stands at the end of each row."""


@dataclass(frozen=True, kw_only=True)
class HunyuanVitConfig(HyVitConfig):
    """The tower of Hunyuan-VL: Hy4-VL's in another size."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304


@dataclass(frozen=True, kw_only=True)
class FramedRowsConfig(ProjectorConfig):
    """The projector of Hunyuan-VL. W and E are its widths between the tower's and the text's.

    Attributes:
        axes: the number of axes of the text's rotary positions.
    """

    axes: int

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "axes": 0 if text.mrope is None else len(text.mrope.sections)}

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.axes < PLACES_IN_IMAGES:
            raise UnsupportedConfig(
                f"mrope_section has {self.axes} numbers: images have {PLACES_IN_IMAGES} axes of rotary positions, and "
                "a section for each",
                hint=TEXT_ALONE,
            )

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": 2 * tower.hidden_size, "E": 4 * tower.hidden_size}


HUNYUAN_VIT = replace(
    HY_VIT,
    name="hunyuan_vit",
    summary="Hunyuan-VL",
    config=HunyuanVitConfig,
    encoder=f"{PACKED_VIT_MODULES}:HunyuanVit",
)

FRAMED_ROWS = Projector(
    FramedRowsConfig,
    (
        *rms_norm("before_rms", "norm"),
        *with_bias("proj.0", "up", "W D s r -> (s r D) W", "W"),
        *with_bias("proj.2", "wide", "E W 1 1 -> W E", "E"),
        *with_bias("mlp", "matrix", "O E -> E O", "O"),
        Map("image_newline", "newline", "E"),
        *(Map(f"image_{name}", param, "O") for name, param in [("begin", "begin"), ("end", "end"), ("sep", "unread")]),
        *rms_norm("after_rms", "last_norm", "O"),
    ),
    f"{PACKED_VIT_MODULES}:FramedRows",
)
"""As `ENDED_ROWS`, with a matrix and a norm behind, and what stands before and behind an image."""


@dataclass(frozen=True, kw_only=True)
class MiniMaxVitConfig(QwenVitConfig):
    """The tower of MiniMax-M3, whose patches turn by time too."""

    aliases: ClassVar[Mapping[str, str]] = CLIP_KEYS

    depth: int = 32
    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_heads: int = 16
    hidden_act: str = "gelu"
    patch_size: int = 14
    layer_norm_eps: float = 1e-5
    rope_theta: float = 1e4


@dataclass(frozen=True, kw_only=True)
class TwiceConfig(WideMergerConfig):
    """The keys of the projector of MiniMax-M3. M is the width of s x s projected patches, W between the matrices."""

    projector_hidden_size: int = 6144

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({key: outer[key] for key in outer if key == "projector_hidden_size"}, tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {**super().sizes(tower), "M": self.out * tower.spatial_merge_size**2}


MINIMAX_VIT = Tower(
    "minimax_vit",
    "MiniMax-M3",
    MiniMaxVitConfig,
    (*without_bias("embeddings.patch_embedding", "patch", PATCH), *layer_norm("pre_layrnorm", "norm"), *CLIP_LAYERS),
    f"{PACKED_VIT_MODULES}:MiniMaxVit",
)

TWICE = Projector(
    TwiceConfig,
    (
        *with_bias("multi_modal_projector.linear_1", "up", "W D -> D W", "W"),
        *with_bias("multi_modal_projector.linear_2", "down", "O W -> W O", "O"),
        *with_bias("patch_merge_mlp.linear_1", "merged_up", "W M -> M W", "W"),
        *with_bias("patch_merge_mlp.linear_2", "merged_down", "O W -> W O", "O"),
    ),
    f"{PACKED_VIT_MODULES}:Twice",
)
"""Two matrices of each patch, then two of each block."""


COSMOS3_EDGE_VISION = replace(
    QWEN3_VISION,
    tower=EDGE_VIT,
    projector=WIDE_MERGER,
    projector_prefix="model.projector.",
    placeholder_id=19,
    # transformers renames these layers as the text's when it saves them.
    other_parts={**{f".{x}_proj.": f".to_{x}." for x in "qkv"}, **{".fc1.": ".up_proj.", ".fc2.": ".down_proj."}},
)
"""Cosmos 3 Edge."""

HY4_VISION = Modality(
    VISION,
    HY_VIT,
    ENDED_ROWS,
    prefix="vit.",
    projector_prefix="vit.perceive.",
    replaces=("vit", "vision_tower"),
    placeholder_id=120120,
)
"""Hy4-VL."""

HUNYUAN_VISION = replace(HY4_VISION, tower=HUNYUAN_VIT, projector=FRAMED_ROWS)
"""Hunyuan-VL."""

MINIMAX_VISION = Modality(
    VISION,
    MINIMAX_VIT,
    TWICE,
    prefix="vision_tower.vision_model.",
    projector_prefix="",
    replaces=("vision_tower", "multi_modal_projector", "patch_merge_mlp"),
    placeholder_id=200025,
)
"""MiniMax-M3."""
