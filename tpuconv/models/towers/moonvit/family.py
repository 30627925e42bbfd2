"""MoonViT, its second version and the vision encoder of Muse: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import (
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

MOONVIT_MODULES = "tpuconv.models.towers.moonvit.modules"


@dataclass(frozen=True, kw_only=True)
class PackedVitConfig(TowerConfig):
    """The keys of `vision_config` that all of them have. M is the width of joined patches, S and R are the rows and
    columns of the table of positions.

    Attributes:
        heads_key: the key that says the width of all heads together.
    """

    heads_key: ClassVar[str] = "hidden_size"

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    patch_size: int = 14
    pos_emb_height: int
    pos_emb_width: int
    rope_theta: float = 1e4

    def contradictions(self) -> Iterator[str]:
        heads = max(1, self.num_attention_heads)
        if self.width_of_heads % (4 * heads):
            yield f"{self.heads_key}={self.width_of_heads} is no multiple of 4 for each of {heads} heads"
        if self.pos_emb_height != self.pos_emb_width:
            yield f"pos_emb_height={self.pos_emb_height} is not pos_emb_width={self.pos_emb_width}"

    @property
    def width_of_heads(self) -> int:
        """The width of all heads together."""
        return int(getattr(self, self.heads_key))

    @property
    def merge(self) -> int:
        """The number of patches in a row, and in a column, that one feature is made of."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, Any]:
        merged = self.hidden_size * self.merge**2
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.width_of_heads // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "X": 3,
            "p": self.patch_size,
            "q": self.patch_size,
            "C": 3 * self.patch_size**2,
            "S": self.pos_emb_height,
            "R": self.pos_emb_width,
            "P": self.pos_emb_height * self.pos_emb_width,
            "M": merged,
            "W": merged,
        }


@dataclass(frozen=True, kw_only=True)
class MoonVitConfig(PackedVitConfig):
    """The keys of Kimi K2.5. Releases call some of them by other names."""

    aliases: ClassVar[Mapping[str, str]] = {
        "vt_hidden_size": "hidden_size",
        "vt_intermediate_size": "intermediate_size",
        "vt_num_hidden_layers": "num_hidden_layers",
        "vt_num_attention_heads": "num_attention_heads",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
    }
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "pos_emb_type": ("divided_fixed",),
        "merge_type": ("sd2_tpool",),
        "video_attn_type": ("spatial_temporal",),
    }

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    merge_kernel_size: tuple[int, ...] = (2, 2)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if len(self.merge_kernel_size) != 2 or len(set(self.merge_kernel_size)) != 1:
            yield f"merge_kernel_size={list(self.merge_kernel_size)} is no square"

    @property
    def merge(self) -> int:
        return self.merge_kernel_size[0]


@dataclass(frozen=True, kw_only=True)
class MoonVit2Config(MoonVitConfig):
    """The keys of Kimi K3, by the names of the release."""

    heads_key: ClassVar[str] = "qkv_hidden_size"
    aliases: ClassVar[Mapping[str, str]] = {**MoonVitConfig.aliases, "activation_func": "hidden_act"}
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **MoonVitConfig.only,
        "attn_bias": (False,),
        "linear_bias": (False,),
        "mlp_type": ("mlp2",),
        "mm_projector_type": ("patchmergerv2",),
        "norm_type": ("rmsnorm",),
        "patch_embed_proj_bias": (False,),
        "pos_emb_interpolation_mode": ("bilinear",),
        "projector_hidden_act": ("gelu",),
    }

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_attention_heads: int = 12
    qkv_hidden_size: int = 1536


MOON_POSITIONS = Map("patch_embed.pos_emb.weight", "positions", "S R D -> (S R) D")

MOONVIT = Tower(
    "moonvit",
    "Kimi K2.5, Kimi-VL",
    MoonVitConfig,
    (
        *with_bias("patch_embed.proj", "patch", PATCH_MATRIX, "D"),
        MOON_POSITIONS,
        *under(
            "encoder.blocks.{L}",
            "layers.{L}",
            *layer_norm("norm0", "attn_norm"),
            *layer_norm("norm1", "mlp_norm"),
            replace(JOINED_QKV, hf="wqkv.weight"),
            replace(JOINED_QKV_BIAS, hf="wqkv.bias"),
            *with_bias("wo", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc0", "mlp.up", UP, "F"),
            *with_bias("mlp.fc1", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("encoder.final_layernorm", "norm"),
    ),
    f"{MOONVIT_MODULES}:MoonVit",
)

MOONVIT2 = Tower(
    "moonvit2",
    "Kimi K3",
    MoonVit2Config,
    (
        *without_bias("patch_embed.proj", "patch", PATCH_MATRIX),
        MOON_POSITIONS,
        *under(
            "encoder.blocks.{L}",
            "layers.{L}",
            *rms_norm("norm0", "attn_norm"),
            *rms_norm("norm1", "mlp_norm"),
            replace(JOINED_QKV, hf="wqkv.weight"),
            *without_bias("wo", "attn.o", OUT_OF_HEADS),
            *without_bias("mlp.fc0", "mlp.up", UP),
            *without_bias("mlp.fc1", "mlp.down", DOWN),
        ),
        *rms_norm("encoder.final_layernorm", "norm"),
    ),
    f"{MOONVIT_MODULES}:MoonVit2",
)


@dataclass(frozen=True, kw_only=True)
class MoonMergerConfig(ProjectorConfig):
    """The keys of the projectors of Kimi K2.5 and K3."""

    projection_layer_norm_eps: float = 1e-5

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        vision = outer.get("vision_config") or {}
        eps = {
            key: vision["projector_ln_eps"] for key in ("projection_layer_norm_eps",) if "projector_ln_eps" in vision
        }
        return super().from_hf({**eps, **outer}, tower, text)


MOON_MERGER = Projector(
    MoonMergerConfig,
    (
        *layer_norm("pre_norm", "norm"),
        *with_bias("proj.0", "up", "W M -> M W", "W"),
        *with_bias("proj.2", "down", "O W -> W O", "O"),
    ),
    f"{MOONVIT_MODULES}:MoonMerger",
)
"""A norm of each patch, then blocks of patches are joined, and two matrices."""

MOON_MATRICES = replace(
    MOON_MERGER,
    rows=(
        *layer_norm("pre_norm", "norm"),
        *with_bias("linear_1", "up", "W M -> M W", "W"),
        *with_bias("linear_2", "down", "O W -> W O", "O"),
    ),
)
"""The same with the names of Kimi-VL."""

MOON_MERGER2 = Projector(
    MoonMergerConfig,
    (
        *without_bias("proj.0", "up", "W M -> M W"),
        *without_bias("proj.2", "down", "O W -> W O"),
        *rms_norm("post_norm", "norm", "O"),
    ),
    f"{MOONVIT_MODULES}:MoonMerger2",
)
"""Blocks of patches are joined, then two matrices, and a norm of each feature."""


@dataclass(frozen=True, kw_only=True)
class MuseVitConfig(PackedVitConfig):
    """The keys of Muse, whose layers see windows or all patches."""

    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_hidden_layers: int = 50
    num_attention_heads: int = 16
    hidden_act: str = "gelu"
    pos_emb_height: int = 32
    pos_emb_width: int = 32
    patch_temporal: int = 2
    merge_size: int = 2
    layer_norm_eps: float = 1e-5
    layer_types: tuple[str, ...] | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if len(self.kinds) != self.num_hidden_layers or set(self.kinds) - {"full_attention", "window_attention"}:
            yield f"layer_types={list(self.kinds)} are not full_attention or window_attention for each layer"

    @property
    def merge(self) -> int:
        return self.merge_size

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers; by default every fourth and the last one see all patches."""
        last = self.num_hidden_layers - 1
        default = ("full_attention" if i % 4 == 3 or i == last else "window_attention" for i in range(last + 1))
        return tuple(default) if self.layer_types is None else self.layer_types

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "C": self.patch_temporal * 3 * self.patch_size**2}


MUSE_VIT = Tower(
    "muse_vit",
    "Muse Glimmer, Muse Spark",
    MuseVitConfig,
    (
        *without_bias("patch_embedder.patch_embedding", "patch", "D C -> C D"),
        Map("patch_embedder.position_embedding_table.weight", "positions", "P D"),
        *layer_norm("ln_pre", "norm_before"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *layer_norm("norm1", "attn_norm"),
            *layer_norm("norm2", "mlp_norm"),
            *(row for x in "qkv" for row in with_bias(f"attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("ln_post", "norm"),
    ),
    f"{MOONVIT_MODULES}:MuseVit",
)


@dataclass(frozen=True, kw_only=True)
class MuseProjectorConfig(ProjectorConfig):
    """The keys of the projector of Muse. X is the width behind each of the two matrices of the adapter."""

    projector_hidden_size: int = 4096
    projector_hidden_act: str = "gelu"
    eps: float = 1e-5

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({**outer, "eps": text.rms_norm_eps}, tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "X": self.projector_hidden_size, "A": self.projector_hidden_size}


MUSE_ADAPTER = Projector(
    MuseProjectorConfig,
    (
        *without_bias("vision_adapter.fc1", "up", "X M -> M X"),
        *without_bias("vision_adapter.fc2", "down", "A X -> X A"),
        *without_bias("vision_projection", "matrix", "O A -> A O"),
    ),
    f"{MOONVIT_MODULES}:MuseAdapter",
)
"""Three matrices and a norm without a scale."""


KIMI_VISION = Modality(
    VISION,
    MOONVIT,
    MOON_MERGER,
    prefix="vision_tower.",
    projector_prefix="mm_projector.",
    placeholder=("image_token_id", "media_placeholder_token_id"),
    placeholder_id=163605,
    other_prefixes=("vision_tower.encoder.",),
)

KIMI_VL_VISION = replace(KIMI_VISION, projector=MOON_MATRICES, projector_prefix="multi_modal_projector.")
"""Kimi-VL: its frames are images."""

KIMI_K3_VISION = replace(KIMI_VISION, tower=MOONVIT2, projector=MOON_MERGER2, other_prefixes=())

MUSE_VISION = Modality(
    VISION,
    MUSE_VIT,
    MUSE_ADAPTER,
    prefix="model.vision_tower.",
    projector_prefix="model.",
    replaces=("vision_tower", "vision_adapter", "vision_projection", "perception_emb_norm"),
    placeholder_id=200092,
)
