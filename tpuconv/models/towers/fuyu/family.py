"""The matrix of patches of Fuyu: config and table."""

from dataclasses import dataclass
from typing import Any

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.notation.table import Map

FUYU_MODULES = "tpuconv.models.towers.fuyu.modules"


@dataclass(frozen=True, kw_only=True)
class NoTowerConfig(TowerConfig):
    """Fuyu has no `vision_config`."""

    @property
    def sizes(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class PatchMatrixConfig(ProjectorConfig):
    """The keys beside `text_config`. C counts the values of a patch."""

    patch_size: int = 30
    num_channels: int = 3

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "C": self.num_channels * self.patch_size**2}


FUYU_PATCHES = Tower("fuyu_patches", "Fuyu", NoTowerConfig, (), f"{FUYU_MODULES}:FuyuPatches")

FUYU_VISION = Modality(
    VISION,
    FUYU_PATCHES,
    Projector(
        PatchMatrixConfig,
        (Map(".weight", "patch.kernel", "O C -> C O"), Map(".bias", "patch.bias", "O")),
        f"{FUYU_MODULES}:PatchMatrix",
    ),
    prefix="vision_embed_tokens",
    projector_prefix="vision_embed_tokens",
    replaces=("vision_embed_tokens",),
    placeholder=("image_token_id",),
    placeholder_id=71011,
)
"""Fuyu."""
