"""SigLIP: config and table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import CLIP_LAYERS, PATCH_MATRIX, joined_heads, layer_norm, with_bias
from tpuconv.notation.table import Map, under


@dataclass(frozen=True, kw_only=True)
class ImageConfig(TowerConfig):
    """The keys of `vision_config` of towers that take images of one size."""

    aliases: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def attention_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return True

    @property
    def side(self) -> int:
        """The number of patches along one side of an image, and of the table of positions."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """The number of learned positions; a class token has the first."""
        return self.side**2 + self.has_class_token

    @property
    def has_class_token(self) -> bool:
        """True if a learned token stands before the patches."""
        return False

    @property
    def sizes(self) -> dict[str, Any]:
        heads = self.num_attention_heads
        return {
            "D": self.hidden_size,
            "N": heads,
            "H": self.hidden_size // heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "X": self.num_channels,
            "p": self.patch_size,
            "q": self.patch_size,
            "C": self.num_channels * self.patch_size**2,
            "P": self.positions,
        }


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(ImageConfig):
    """The keys of SigLIP."""

    vision_use_head: bool = True


_POOLING_HEAD = under(
    "head",
    "head",
    Map("probe", "probe", "1 1 D -> D"),
    *joined_heads("attention", ""),
    *layer_norm("layernorm", "norm"),
    *with_bias("mlp.fc1", "up", "F D -> D F", "F"),
    *with_bias("mlp.fc2", "down", "D F -> F D", "D"),
)
POOLING_HEAD = tuple(replace(row, when="vision_use_head") for row in _POOLING_HEAD)
"""The head that pools all patches to one vector. Nothing reads it in a multimodal model."""

SIGLIP = Tower(
    "siglip",
    "SigLIP",
    SiglipConfig,
    (
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding.weight", "positions", "P D"),
        *CLIP_LAYERS,
        *layer_norm("post_layernorm", "norm"),
        *POOLING_HEAD,
    ),
    "tpuconv.models.towers.siglip.modules:Siglip",
)


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
    "tpuconv.models.towers.siglip.modules:Pooled",
)
"""A mean over neighbours, a norm and a matrix."""


class PromptMatrixConfig(ProjectorConfig):
    """The projector of PaliGemma, whose images and prompts see each other."""

    @property
    def sees_prompt(self) -> bool:
        return True


PROMPT_MATRIX = Projector(
    PromptMatrixConfig,
    with_bias("linear", "matrix", "O D -> D O", "O"),
    "tpuconv.models.towers.siglip.modules:PromptMatrix",
)
"""One matrix of each patch (PaliGemma)."""


GEMMA3_VISION = Modality(
    VISION,
    SIGLIP,
    POOLED,
    prefix="vision_tower.vision_model.",
    placeholder=("image_token_index", "image_token_id"),
    placeholder_id=262144,
    other_prefixes=("vision_tower.",),
)

PALIGEMMA_VISION = replace(GEMMA3_VISION, projector=PROMPT_MATRIX, placeholder_id=256000)
