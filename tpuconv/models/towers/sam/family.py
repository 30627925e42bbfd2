"""SAM: config and table, also of SAM beside a second encoder; the projectors of GOT-OCR 2.0 and DeepSeek-VL 7B.

E is the number of channels behind the neck, A the same as an input axis, S and T the rows and columns of patches; W are
the layers with windows, G the other ones; Q and V the distances of two rows in a window and in an image; r and s taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, PATCH_MATRIX, UP, layer_norm, with_bias
from tpuconv.notation.table import Map, under

SAM_MODULES = "tpuconv.models.towers.sam.modules"
HIGH_CONFIG = "high_res_vision_config"


@dataclass(frozen=True, kw_only=True)
class SamConfig(TowerConfig):
    """The keys of SAM. Without `mlp_dim` the width of the MLP follows from `mlp_ratio`."""

    hidden_size: int = 768
    output_channels: int = 256
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 1024
    patch_size: int = 16
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    use_abs_pos: bool = True
    use_rel_pos: bool = True
    window_size: int = 14
    global_attn_indexes: tuple[int, ...] = (2, 5, 8, 11)
    mlp_ratio: int | float = 4.0
    mlp_dim: int | None = None

    @property
    def side(self) -> int:
        """The number of patches along a side of an image."""
        return self.image_size // self.patch_size

    @property
    def windowed(self) -> tuple[int, ...]:
        """The numbers of the layers whose patches see a window."""
        layers = range(self.num_hidden_layers) if self.window_size else ()
        return tuple(layer for layer in layers if layer not in self.global_attn_indexes)

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": int(self.hidden_size * self.mlp_ratio) if self.mlp_dim is None else self.mlp_dim,
            "L": self.num_hidden_layers,
            "X": self.num_channels,
            "p": self.patch_size,
            "q": self.patch_size,
            "C": self.num_channels * self.patch_size**2,
            "S": self.side,
            "T": self.side,
            "W": self.windowed,
            "G": tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.windowed),
            "Q": max(1, 2 * self.window_size - 1),
            "V": 2 * self.side - 1,
            "E": self.output_channels,
            "A": self.output_channels,
            "r": 3,
            "s": 3,
        }


NECK = (
    Map("conv1.weight", "matrix.kernel", "E D 1 1 -> D E"),
    *layer_norm("layer_norm1", "first_norm", "E"),
    Map("conv2.weight", "convolution.kernel", "E A r s -> r s A E"),
    *layer_norm("layer_norm2", "last_norm", "E"),
)

SAM_ROWS = (
    *with_bias("patch_embed.projection", "patch", PATCH_MATRIX, "D"),
    Map("pos_embed", "positions", "1 S T D -> S T D", when="use_abs_pos"),
    *under(
        "layers.{L}",
        "layers.{L}",
        *layer_norm("layer_norm1", "attn_norm"),
        *layer_norm("layer_norm2", "mlp_norm"),
        JOINED_QKV,
        replace(JOINED_QKV_BIAS, when="qkv_bias"),
        *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
        *with_bias("mlp.lin1", "mlp.up", UP, "F"),
        *with_bias("mlp.lin2", "mlp.down", DOWN, "D"),
    ),
    *(
        Map(f"layers.{{{layers}}}.attn.rel_pos_{x}", f"layers.{{{layers}}}.attn.{name}", f"{size} H", "use_rel_pos")
        for layers, size in (("W", "Q"), ("G", "V"))
        for x, name in (("h", "rows"), ("w", "columns"))
    ),
    *under("neck", "neck", *NECK),
)
"""The rows of SAM, with the names of transformers."""

BESIDE = {"D": "d", "N": "j", "H": "h", "F": "f", "L": "l", "X": "x", "p": "u", "q": "w", "C": "c"}
"""Letters of SAM in a model that has another encoder too."""


def beside(rows: tuple[Map, ...]) -> tuple[Map, ...]:
    """Returns rows of SAM in the letters of `BESIDE`."""
    letters = str.maketrans(BESIDE)

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace("{L}", "{l}") for name in names)

    return tuple(
        replace(
            row,
            hf=renamed(row.hf_names),
            jax=renamed(row.jax_names),
            layout=row.layout.translate(letters),
            when=row.when and f"sam.{row.when}",
        )
        for row in rows
    )


@dataclass(frozen=True, kw_only=True)
class GotConfig(SamConfig):
    """The keys of `vision_config` of GOT-OCR 2.0."""

    mlp_dim: int | None = 3072


GOT_SAM = Tower(
    "got_sam",
    "GOT-OCR 2.0",
    GotConfig,
    tuple(replace(row, jax=tuple(f"sam.{name}" for name in row.jax_names)) for row in SAM_ROWS),
    f"{SAM_MODULES}:GotSam",
)


@dataclass(frozen=True, kw_only=True)
class UpsamplerConfig(ProjectorConfig):
    """The projector of GOT-OCR 2.0. M is the number of channels between its convolutions, B the text's width too."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "B": self.out, "M": 2 * tower.output_channels}


UPSAMPLER = Projector(
    UpsamplerConfig,
    (
        Map("conv_upsampler1.weight", "first.kernel", "M E r s -> r s E M"),
        Map("conv_upsampler2.weight", "last.kernel", "O M r s -> r s M O"),
        *with_bias("multimodal_projector", "matrix", "B O -> O B", "B"),
    ),
    f"{SAM_MODULES}:Upsampler",
)
"""Two convolutions and a matrix."""


@dataclass(frozen=True, kw_only=True)
class HighResolutionConfig(ProjectorConfig):
    """The projector of DeepSeek-VL 7B, which has SAM for large images. M and Z are the channels behind its two
    convolutions, Y is half the width of the text, B the whole one, a is 1."""

    sam: SamConfig

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return cls(out=text.hidden_size, sam=SamConfig.from_hf(object_of(outer, HIGH_CONFIG)))

    def check(self, tower: Any) -> None:
        super().check(tower)
        if not self.sam.global_attn_indexes:
            raise ConfigError(f"config.json: {HIGH_CONFIG} has no global_attn_indexes")

    def sizes(self, tower: Any) -> dict[str, Any]:
        sam = {BESIDE.get(letter, letter): size for letter, size in self.sam.sizes.items()}
        channels = self.sam.output_channels
        return {**sam, "O": self.out, "B": self.out, "Y": self.out // 2, "M": 2 * channels, "Z": 4 * channels, "a": 1}


HIGH_RESOLUTION = Projector(
    HighResolutionConfig,
    (
        *beside(under("high_res_vision_model.vision_encoder", "sam", *SAM_ROWS)),
        *beside(under("high_res_vision_neck", "neck", *NECK)),
        Map("high_res_vision_proj.conv1.weight", "first.kernel", "M E r s -> r s E M"),
        Map("high_res_vision_proj.conv2.weight", "last.kernel", "Z M r s -> r s M Z"),
        Map("high_res_vision_alpha", "alpha", "a"),
        *with_bias("aligner.vision_proj", "low", "Y D -> D Y", "Y"),
        *with_bias("aligner.high_res_vision_proj", "high", "Y Z -> Z Y", "Y"),
        *with_bias("aligner.proj", "matrix", "B O -> O B", "B"),
    ),
    f"{SAM_MODULES}:HighResolution",
)
"""SAM, whose features are joined to the tower's, and a matrix."""


GOT_VISION = Modality(VISION, GOT_SAM, UPSAMPLER, prefix="vision_tower.", placeholder_id=151859)
"""GOT-OCR 2.0."""
