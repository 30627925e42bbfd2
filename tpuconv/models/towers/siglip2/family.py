"""SigLIP 2 and other kin of SigLIP for images of any size, and their projectors: configs and tables."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.towers.llava.family import READOUT
from tpuconv.models.towers.rows import CLIP_LAYERS, PATCH_MATRIX, layer_norm, with_bias
from tpuconv.models.towers.siglip.family import POOLING_HEAD, ImageConfig, SiglipConfig
from tpuconv.notation.table import Map

SIGLIP2_MODULES = "tpuconv.models.towers.siglip2.modules"


@dataclass(frozen=True, kw_only=True)
class Siglip2Config(SiglipConfig):
    """The keys of `vision_config`. `num_patches` is the number of learned positions."""

    num_patches: int = 256

    @property
    def side(self) -> int:
        return int(self.num_patches**0.5)


SIGLIP2 = Tower(
    "siglip2",
    "SigLIP 2",
    Siglip2Config,
    (
        *with_bias("embeddings.patch_embedding", "patch", "D C -> C D", "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
        *POOLING_HEAD,
    ),
    f"{SIGLIP2_MODULES}:Siglip2",
)


@dataclass(frozen=True, kw_only=True)
class BlocksConfig(ProjectorConfig):
    """The keys of the projector of LFM2-VL, which joins patches. M is the width of joined patches."""

    projector_hidden_act: str = "gelu"
    projector_hidden_size: int = 2560
    projector_bias: bool = True
    projector_use_layernorm: bool = True
    downsample_factor: int = 2

    @property
    def merge(self) -> int:
        return self.downsample_factor

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": self.projector_hidden_size, "M": tower.sizes["D"] * self.downsample_factor**2}


BLOCK_MATRICES = Projector(
    BlocksConfig,
    (
        Map("layer_norm.weight", "norm.scale", "M", when="projector_use_layernorm"),
        Map("layer_norm.bias", "norm.bias", "M", when="projector_use_layernorm"),
        Map("linear_1.weight", "up.kernel", "W M -> M W"),
        Map("linear_1.bias", "up.bias", "W", when="projector_bias"),
        Map("linear_2.weight", "down.kernel", "O W -> W O"),
        Map("linear_2.bias", "down.bias", "O", when="projector_bias"),
    ),
    f"{SIGLIP2_MODULES}:BlockMatrices",
)
"""Patches are joined, and a norm and two matrices follow."""


@dataclass(frozen=True, kw_only=True)
class PaddleVitConfig(ImageConfig):
    """The keys of PaddleOCR-VL and Keye-VL."""

    vision_use_head: ClassVar[bool] = False

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    image_size: int = 384
    patch_size: int = 14
    spatial_merge_size: int = 2
    rope_theta: float = 1e4

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "M": self.hidden_size * self.spatial_merge_size**2}


PADDLE_VIT = Tower(
    "paddle_vit",
    "PaddleOCR-VL, Keye-VL",
    PaddleVitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
    ),
    f"{SIGLIP2_MODULES}:PaddleVit",
)


@dataclass(frozen=True, kw_only=True)
class PaddleBlocksConfig(ProjectorConfig):
    """The projector of PaddleOCR-VL, whose sizes are the tower's. W is the width between its matrices."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": tower.sizes["M"]}


_MATRICES = (*with_bias("linear_1", "up", "W M -> M W", "W"), *with_bias("linear_2", "down", "O W -> W O", "O"))

PADDLE_MATRICES = Projector(
    PaddleBlocksConfig, (*layer_norm("pre_norm", "norm"), *_MATRICES), f"{SIGLIP2_MODULES}:PaddleMatrices"
)
"""A norm of each patch, then patches are joined, and two matrices."""


@dataclass(frozen=True, kw_only=True)
class KeyeBlocksConfig(PaddleBlocksConfig):
    """The projector of Keye-VL 1.5, with the facts that LFM2-VL's has as keys."""

    projector_hidden_act: ClassVar[str] = "gelu"
    projector_bias: ClassVar[bool] = True
    projector_use_layernorm: ClassVar[bool] = True

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {**super().sizes(tower), "M": tower.sizes["M"]}


KEYE_MATRICES = Projector(
    KeyeBlocksConfig, (*layer_norm("pre_norm", "norm", "M"), *_MATRICES), f"{SIGLIP2_MODULES}:BlockMatrices"
)
"""Patches are joined, and a norm and two matrices follow."""


@dataclass(frozen=True, kw_only=True)
class VideoLlamaVitConfig(ImageConfig):
    """The keys of VideoLLaMA 3, whose tower has no learned positions."""

    vision_use_head: ClassVar[bool] = False

    rope_theta: float = 1e4

    @property
    def positions(self) -> int:
        return 0


VIDEO_LLAMA_VIT = Tower(
    "video_llama_vit",
    "VideoLLaMA 3",
    VideoLlamaVitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
    ),
    f"{SIGLIP2_MODULES}:VideoLlamaVit",
)


LFM2_VISION = Modality(
    VISION,
    SIGLIP2,
    BLOCK_MATRICES,
    prefix="model.vision_tower.vision_model.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=396,
    other_prefixes=("model.vision_tower.",),
    tower_types=("siglip2_vision_model",),
)
"""LFM2-VL."""

PADDLE_VISION = Modality(
    VISION,
    PADDLE_VIT,
    PADDLE_MATRICES,
    prefix="visual.vision_model.",
    projector_prefix="mlp_AR.",
    replaces=("visual", "mlp_AR", "projector"),
    other_parts={"mlp_AR.": "model.projector."},
    placeholder_id=100295,
    unused=("head.*", "embeddings.packing_position_embedding.*"),
)
"""PaddleOCR-VL."""

KEYE_VISION = replace(PADDLE_VISION, placeholder_id=151655)
"""Keye-VL."""
KEYE15_VISION = replace(KEYE_VISION, projector=KEYE_MATRICES)
"""Keye-VL 1.5."""

VIDEO_LLAMA3_VISION = Modality(
    VISION,
    VIDEO_LLAMA_VIT,
    READOUT,
    prefix="model.vision_model.",
    projector_prefix="model.projector.",
    placeholder_id=151655,
)
"""VideoLLaMA 3."""
