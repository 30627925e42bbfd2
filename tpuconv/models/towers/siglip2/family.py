"""SigLIP 2 for images of any size and the projector of LFM2-VL: configs and tables."""

from dataclasses import dataclass
from typing import Any

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower
from tpuconv.models.towers.rows import CLIP_LAYERS, layer_norm, with_bias
from tpuconv.models.towers.siglip.family import POOLING_HEAD, SiglipConfig
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

    def axes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": self.projector_hidden_size, "M": tower.axes["D"] * self.downsample_factor**2}


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
