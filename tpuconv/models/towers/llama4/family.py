"""The vision encoder of Llama 4: config and table."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, UP, layer_norm, with_bias, without_bias
from tpuconv.notation.table import Map, under

LLAMA4_MODULES = "tpuconv.models.towers.llama4.modules"


@dataclass(frozen=True, kw_only=True)
class Llama4VitConfig(TowerConfig):
    """The keys of `vision_config`. M is the width of joined patches, X and W those behind the two matrices of the
    adapter."""

    hidden_size: int = 768
    intermediate_size: int = 5632
    num_hidden_layers: int = 34
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 448
    patch_size: int = 14
    pixel_shuffle_ratio: float = 0.5
    projector_input_dim: int = 4096
    projector_output_dim: int = 4096
    vision_output_dim: int = 7680
    rope_theta: float = 1e4

    def contradictions(self) -> Iterator[str]:
        if not self.patch_size or self.image_size % self.patch_size:
            yield f"image_size={self.image_size} is no multiple of patch_size={self.patch_size}"
        elif self.side % self.merge or not isclose(self.merge * self.pixel_shuffle_ratio, 1):
            yield f"pixel_shuffle_ratio={self.pixel_shuffle_ratio} does not join {self.side} patches in a row"
        if self.intermediate_size != self.hidden_size * self.merge**2:
            yield f"intermediate_size={self.intermediate_size} is not hidden_size x {self.merge} x {self.merge}"
        if not self.projector_input_dim == self.projector_output_dim == self.vision_output_dim:
            yield "projector_input_dim, projector_output_dim and vision_output_dim differ"

    @property
    def merge(self) -> int:
        """The number of patches in a row, and in a column, that one feature is made of."""
        return int(1 / self.pixel_shuffle_ratio)

    @property
    def side(self) -> int:
        """The number of patches along one side of an image."""
        return self.image_size // self.patch_size

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "M": self.intermediate_size,
            "L": self.num_hidden_layers,
            "C": self.num_channels * self.patch_size**2,
            "P": self.side**2 + 1,
            "X": self.projector_input_dim,
            "W": self.vision_output_dim,
        }


LLAMA4_VIT = Tower(
    "llama4_vit",
    "Llama 4",
    Llama4VitConfig,
    (
        *without_bias("patch_embedding.linear", "patch", "D C -> C D"),
        Map("class_embedding", "class_token", "D"),
        Map("positional_embedding_vlm", "positions", "P D"),
        *layer_norm("layernorm_pre", "norm_before"),
        *under(
            "model.layers.{L}",
            "layers.{L}",
            *layer_norm("input_layernorm", "attn_norm"),
            *layer_norm("post_attention_layernorm", "mlp_norm"),
            *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("layernorm_post", "norm"),
        *without_bias("vision_adapter.mlp.fc1", "adapter.up", "X M -> M X"),
        *without_bias("vision_adapter.mlp.fc2", "adapter.down", "W X -> X W"),
    ),
    f"{LLAMA4_MODULES}:Llama4Vit",
)

LLAMA4_MATRIX = Projector(
    ProjectorConfig, without_bias("linear_1", "matrix", "O W -> W O"), f"{LLAMA4_MODULES}:Llama4Matrix"
)
"""One matrix."""


LLAMA4_VISION = Modality(VISION, LLAMA4_VIT, LLAMA4_MATRIX, prefix="vision_model.", placeholder_id=200092)
