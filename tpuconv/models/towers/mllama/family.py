"""The vision encoder of Llama 3.2 Vision: config and table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import (
    BIASED_MATRIX,
    DOWN,
    IN_HEADS,
    OUT_OF_HEADS,
    PATCH_MATRIX,
    UP,
    layer_norm,
    with_bias,
    without_bias,
)
from tpuconv.notation.table import Map, under

MLLAMA_MODULES = "tpuconv.models.towers.mllama.modules"


@dataclass(frozen=True, kw_only=True)
class MllamaVitConfig(TowerConfig):
    """The keys of `vision_config`. K tiles of an image are read together, which has one of A ratios of its sides, or
    none; I are the layers after the L of each tile, W is the width of the last hidden state and of others beside it."""

    aliases: ClassVar = {"num_attention_heads": "attention_heads"}

    hidden_size: int = 1280
    hidden_act: str = "gelu"
    num_hidden_layers: int = 32
    num_global_layers: int = 8
    attention_heads: int = 16
    num_channels: int = 3
    intermediate_size: int = 5120
    vision_output_dim: int = 7680
    image_size: int = 448
    patch_size: int = 14
    norm_eps: float = 1e-5
    max_num_tiles: int = 4
    intermediate_layers_indices: tuple[int, ...] | None = None
    supported_aspect_ratios: tuple[tuple[int, ...], ...] | None = None

    def contradictions(self) -> Iterator[str]:
        layers = self.num_hidden_layers
        if wrong := [i for i in self.kept_layers if not -layers <= i < layers]:
            yield f"intermediate_layers_indices has {wrong}, and the encoder {layers} layers"
        if (width := self.hidden_size * (1 + len(self.kept_layers))) != self.vision_output_dim:
            yield f"vision_output_dim={self.vision_output_dim} is not {width}, the width of the hidden states"
        if self.attention_heads and self.hidden_size % self.attention_heads:
            yield f"hidden_size={self.hidden_size} is no multiple of attention_heads={self.attention_heads}"

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The layers whose outputs stand beside the last hidden state."""
        found = self.intermediate_layers_indices
        return (3, 7, 15, 23, 30) if found is None else found

    @property
    def ratios(self) -> int:
        """The number of ratios of the sides of images."""
        found = self.supported_aspect_ratios
        return 8 if found is None else len(found)

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "N": self.attention_heads,
            "H": self.hidden_size // self.attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "I": self.num_global_layers,
            "X": self.num_channels,
            "p": self.patch_size,
            "q": self.patch_size,
            "C": self.num_channels * self.patch_size**2,
            "P": (self.image_size // self.patch_size) ** 2 + 1,
            "A": self.ratios + 1,
            "K": self.max_num_tiles,
            "W": self.vision_output_dim,
        }


MLLAMA_LAYER = (
    *layer_norm("input_layernorm", "attn_norm"),
    *(row for x in "qkv" for row in without_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS)),
    *without_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS),
    *layer_norm("post_attention_layernorm", "mlp_norm"),
    *with_bias("mlp.fc1", "mlp.up", UP, "F"),
    *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
)


def of_tiles(name: str, param: str) -> tuple[Map, Map]:
    """Returns the rows of what is added to the patches of tiles, and of its gate."""
    return (
        Map(f"{name}.embedding.weight", f"{param}.embedding", "A (K D) -> A K D"),
        Map(f"{name}.gate", f"{param}.gate", "1"),
    )


MLLAMA_VIT = Tower(
    "mllama_vit",
    "Llama 3.2 Vision",
    MllamaVitConfig,
    (
        *without_bias("patch_embedding", "patch", PATCH_MATRIX),
        Map("class_embedding", "class_token", "D"),
        Map("gated_positional_embedding.embedding", "positions.of_patches", "P D"),
        Map("gated_positional_embedding.tile_embedding.weight", "positions.of_tiles", "A (K P D) -> A K P D"),
        Map("gated_positional_embedding.gate", "positions.gate", "1"),
        *of_tiles("pre_tile_positional_embedding", "tiles_before"),
        *layer_norm("layernorm_pre", "norm_before"),
        *under("transformer.layers.{L}", "layers.{L}", *MLLAMA_LAYER),
        *layer_norm("layernorm_post", "norm"),
        *of_tiles("post_tile_positional_embedding", "tiles_after"),
        *under(
            "global_transformer.layers.{I}",
            "global_layers.{I}",
            *MLLAMA_LAYER,
            Map("gate_attn", "attn_gate", "1"),
            Map("gate_ffn", "mlp_gate", "1"),
        ),
    ),
    f"{MLLAMA_MODULES}:MllamaVit",
)


class AttendedConfig(ProjectorConfig):
    """Features that layers of the text model attend to."""

    @property
    def is_attended(self) -> bool:
        return True


MLLAMA_MATRIX = Projector(AttendedConfig, with_bias("", "matrix", "O W -> W O", "O"), BIASED_MATRIX)
"""One matrix with a bias."""

MLLAMA_VISION = Modality(
    VISION,
    MLLAMA_VIT,
    MLLAMA_MATRIX,
    prefix="vision_model.",
    projector_prefix="multi_modal_projector",
    placeholder_id=128256,
)
