"""Janus: config and table of the encoder with which it understands images, and of the aligner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.towers.rows import DOWN, IN_HEADS, OUT_OF_HEADS, PATCH_MATRIX, UP, layer_norm, with_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under


@dataclass(frozen=True, kw_only=True)
class JanusVitConfig(ImageConfig):
    """The keys of `vision_config`. The aligner has `depth` matrices and the width `projection_dim`, the text's."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (False,)}  # the reference fails on others
    vision_use_head: ClassVar[bool] = False

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    image_size: int = 384
    hidden_act: str = "gelu"
    mlp_ratio: int | float = 4.0
    attention_bias: bool = True
    depth: int = 2

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "F": int(self.hidden_size * self.mlp_ratio)}


@dataclass(frozen=True, kw_only=True)
class JanusAlignerConfig(ProjectorConfig):
    """The aligner. I is the number of its matrices behind the first one."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "I": tower.depth - 1}


JANUS_VIT = Tower(
    "janus_vit",
    "Janus",
    JanusVitConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *under(
            "encoder.layers.{L}",
            "layers.{L}",
            *layer_norm("layer_norm1", "attn_norm"),
            *layer_norm("layer_norm2", "mlp_norm"),
            *(Map(f"self_attn.{x}_proj.weight", f"attn.{x}.kernel", IN_HEADS) for x in "qkv"),
            *(Map(f"self_attn.{x}_proj.bias", f"attn.{x}.bias", "(N H) -> N H", "attention_bias") for x in "qkv"),
            *with_bias("self_attn.projection_layer", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("post_layernorm", "norm"),
    ),
    "tpuconv.models.towers.siglip.modules:Siglip",
)

JANUS_ALIGNER = Projector(
    JanusAlignerConfig,
    (
        *with_bias("fc1", "up", "O D -> D O", "O"),
        *with_bias("hidden_layers.{I}", "hidden.{I}", "A O -> O A", "A"),
    ),
    "tpuconv.models.towers.janus.modules:Aligner",
)
"""Matrices of each patch, with an activation between."""


JANUS_VISION = Modality(
    VISION,
    JANUS_VIT,
    JANUS_ALIGNER,
    prefix="model.vision_model.",
    projector_prefix="model.aligner.",
    placeholder_id=100581,
)
"""Janus Pro."""
