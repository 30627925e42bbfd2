"""Projectors from towers to text models: their configs and tables. `tpuconv.models.towers.projector_modules` computes
them."""

from dataclasses import dataclass
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.beside import TEXT_ALONE, Projector, ProjectorConfig
from tpuconv.notation.table import Map

PROJECTOR_MODULES = "tpuconv.models.towers.projector_modules"


@dataclass(frozen=True, kw_only=True)
class PooledConfig(ProjectorConfig):
    """The keys of the projector of Gemma 3."""

    mm_tokens_per_image: int = 256

    def check(self, tower: Any) -> None:
        super().check(tower)
        side = int(self.mm_tokens_per_image**0.5)
        if not side or side**2 != self.mm_tokens_per_image or tower.side % side:
            raise UnsupportedConfig(
                f"mm_tokens_per_image={self.mm_tokens_per_image} of {tower.side} x {tower.side} patches is not "
                "implemented",
                hint=TEXT_ALONE,
            )


POOLED = Projector(
    PooledConfig,
    (
        Map("mm_input_projection_weight", "matrix.kernel", "D O"),
        Map("mm_soft_emb_norm.weight", "norm.scale", "D"),
    ),
    f"{PROJECTOR_MODULES}:Pooled",
)
"""A mean over neighbours, a norm and a matrix."""
