"""The tower of Granite for Docling and what follows it: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.towers.navit.family import NAVIT
from tpuconv.models.towers.rows import layer_norm, with_bias, without_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under

DOCLING_MODULES = "tpuconv.models.towers.granite_docling.modules"


@dataclass(frozen=True, kw_only=True)
class DoclingVitConfig(ImageConfig):
    """The keys of `vision_config`. Behind the layers `deepstack_visual_indexes` features are made that are added to the
    outputs of the first layers of the text."""

    vision_use_head: ClassVar[bool] = False

    image_size: int = 512
    out_hidden_size: int = 1024
    scale_factor: int = 4
    deepstack_visual_indexes: tuple[int, ...] = (3, 7, 10)
    use_fine_route: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        key = "deepstack_visual_indexes"
        return super().from_hf({k: value for k, value in raw.items() if k != key or value is not None})


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig(ProjectorConfig):
    """The keys beside it. M is the width of patches that are joined coarsely, R finely; I counts the layers for
    deepstack. G is the width of a router that chooses between the two before the model runs, and that nothing here
    reads."""

    density_router_hidden_size: int | None = None

    def check(self, tower: Any) -> None:
        super().check(tower)
        layers, s = tower.deepstack_visual_indexes, tower.scale_factor
        fits = tower.out_hidden_size == self.out and s > 0 and tower.side % s == 0 and self.out % 4 == 0
        if not fits or (tower.use_fine_route and s % 2) or max(layers, default=0) >= tower.num_hidden_layers:
            raise ConfigError(
                f"config.json: out_hidden_size={tower.out_hidden_size}, scale_factor={s} and "
                f"deepstack_visual_indexes={layers} do not fit the encoder and the text model"
            )

    @property
    def has_router(self) -> bool:
        """True if a router chooses how patches are joined."""
        return self.density_router_hidden_size is not None

    def sizes(self, tower: Any) -> dict[str, Any]:
        s, width = tower.scale_factor, tower.sizes["D"]
        return {
            "O": self.out,
            "A": self.out,
            "I": len(tower.deepstack_visual_indexes),
            "M": width * s**2,
            "R": width * (s // 2) ** 2,
            "G": self.density_router_hidden_size or 0,
        }


DOCLING_VIT = Tower("docling_vit", "Granite for Docling", DoclingVitConfig, NAVIT.rows, f"{DOCLING_MODULES}:DoclingVit")


def _path(name: str, width: str, when: str | None = None) -> tuple[Map, ...]:
    rows = (
        *without_bias("projection", "matrix", f"O {width} -> {width} O"),
        *under(
            "deepstack_mergers.{I}",
            "deep.{I}",
            *layer_norm("layer_norm", "norm", width),
            *with_bias("linear_1", "up", f"A {width} -> {width} A", "A"),
            *with_bias("linear_2", "down", "O A -> A O", "O"),
        ),
    )
    return tuple(
        Map(tuple(f"{name}.{hf}" for hf in row.hf_names), f"{name}.{row.jax_names[0]}", row.layout, when)
        for row in rows
    )


CONNECTOR = Projector(
    ConnectorConfig,
    (
        *layer_norm("vision_model.connector.ln_in", "norm_in"),
        *(
            Map(f"vision_model.connector.{row.hf_names[0]}", row.jax, row.layout, row.when)
            for row in (*_path("coarse", "M"), *_path("fine", "R", "use_fine_route"))
        ),
        *layer_norm("vision_model.connector.ln_mid", "norm_mid", "O"),
        *without_bias("vision_model.connector.mlp_fc2", "matrix", "O A -> A O"),
        *layer_norm("vision_model.connector.ln_out", "norm_out", "O"),
        *(
            Map(f"density_router.{name}", f"router.{param}", layout, "has_router")
            for name, param, layout in (
                ("att.weight", "att.kernel", "1 D -> D"),
                ("att.bias", "att.bias", "1"),
                ("norm.weight", "norm.scale", "D"),
                ("norm.bias", "norm.bias", "D"),
                ("fc1.weight", "up.kernel", "G D -> D G"),
                ("fc1.bias", "up.bias", "G"),
                ("fc2.weight", "down.kernel", "1 G -> G"),
                ("fc2.bias", "down.bias", "1"),
            )
        ),
    ),
    f"{DOCLING_MODULES}:Connector",
)
"""Patches are joined coarsely or finely, with positions, norms and matrices."""


DOCLING_VISION = Modality(
    VISION,
    DOCLING_VIT,
    CONNECTOR,
    prefix="model.vision_model.",
    projector_prefix="model.",
    replaces=("vision_model", "density_router"),
    placeholder_id=100337,
)
"""Granite for Docling."""
