"""CLIP: config and table."""

from dataclasses import dataclass, replace

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower
from tpuconv.models.towers.rows import CLIP_LAYERS, PATCH_MATRIX, layer_norm, without_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map


@dataclass(frozen=True, kw_only=True)
class ClipConfig(ImageConfig):
    """The keys of CLIP."""

    patch_size: int = 32
    layer_norm_eps: float = 1e-5
    hidden_act: str = "quick_gelu"

    @property
    def has_class_token(self) -> bool:
        return True


CLIP = Tower(
    "clip",
    "CLIP",
    ClipConfig,
    (
        Map("embeddings.class_embedding", "class_token", "D"),
        *without_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *layer_norm("pre_layrnorm", "pre_norm"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
    ),
    "tpuconv.models.towers.clip.modules:Clip",
)

CLIP_OF_VIDEOS = replace(CLIP, name="clip_of_videos", encoder="tpuconv.models.towers.clip.modules:ClipOfVideos")
"""CLIP for the frames of videos, which nothing computes."""

NO_PROJECTOR = Projector(ProjectorConfig, (), "tpuconv.models.towers.clip.modules:NoProjector")
"""Nothing: the projector is another part's."""
