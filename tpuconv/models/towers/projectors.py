"""Projectors from towers to text models: their configs and tables. `tpuconv.models.towers.projector_modules` computes
them."""

from dataclasses import dataclass

from tpuconv.models.common.beside import Projector, ProjectorConfig
from tpuconv.notation.table import Map

PROJECTOR_MODULES = "tpuconv.models.towers.projector_modules"


@dataclass(frozen=True, kw_only=True)
class PooledConfig(ProjectorConfig):
    """The keys of the projector of Gemma 3."""

    mm_tokens_per_image: int = 256


POOLED = Projector(
    PooledConfig,
    (
        Map("mm_input_projection_weight", "matrix.kernel", "D O"),
        Map("mm_soft_emb_norm.weight", "norm.scale", "D"),
    ),
    f"{PROJECTOR_MODULES}:Pooled",
)
"""A mean over neighbours, a norm and a matrix."""
