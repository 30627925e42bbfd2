"""The vision transformer of BLIP-2, and the Q-Former behind it: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import VISION, Modality, Projector, Tower
from tpuconv.models.towers.qformer.family import READER_ROWS, QFormerConfig
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, PATCH_MATRIX, UP, layer_norm, with_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.notation.table import Map, under

BLIP_MODULES = "tpuconv.models.towers.blip.modules"


@dataclass(frozen=True, kw_only=True)
class BlipConfig(ImageConfig):
    """The keys of `vision_config` of BLIP-2."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"qkv_bias": (True,)}

    hidden_size: int = 1408
    intermediate_size: int = 6144
    num_hidden_layers: int = 39
    num_attention_heads: int = 16
    patch_size: int = 14
    hidden_act: str = "gelu"

    @property
    def has_class_token(self) -> bool:
        return True


BLIP_VIT = Tower(
    "blip_vit",
    "BLIP-2",
    BlipConfig,
    (
        Map("embeddings.class_embedding", "class_token", "1 1 D -> D"),
        *with_bias("embeddings.patch_embedding", "patch", PATCH_MATRIX, "D"),
        Map("embeddings.position_embedding", "positions", "1 P D -> P D"),
        *under(
            "encoder.layers.{L}",
            "layers.{L}",
            *layer_norm("layer_norm1", "attn_norm"),
            *layer_norm("layer_norm2", "mlp_norm"),
            replace(JOINED_QKV, hf="self_attn.qkv.weight"),
            replace(JOINED_QKV_BIAS, hf="self_attn.qkv.bias"),
            *with_bias("self_attn.projection", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("post_layernorm", "norm"),
    ),
    f"{BLIP_MODULES}:BlipVit",
)


@dataclass(frozen=True, kw_only=True)
class ImageQFormerConfig(QFormerConfig):
    """The keys of `qformer_config`, which transformers gives the width of the tower, and `num_query_tokens`."""

    num_query_tokens: int = 32

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        beside = {key: outer[key] for key in ("num_query_tokens",) if key in outer}
        own = {**cls.keys_of(outer), "encoder_hidden_size": tower.hidden_size}
        return super().from_hf({**own, **beside}, tower, text)

    def contradictions(self, tower: Any) -> Iterator[str]:
        yield from super().contradictions(tower)
        if tower.hidden_size % tower.num_attention_heads:
            yield f"hidden_size={tower.hidden_size} is no multiple of {tower.num_attention_heads} heads"

    @property
    def queries(self) -> int:
        return self.num_query_tokens


IMAGE_QFORMER = Projector(
    ImageQFormerConfig,
    (
        Map("query_tokens", "query", "1 Q A -> Q A"),
        *READER_ROWS,
        *with_bias("language_projection", "matrix", "O A -> A O", "O"),
    ),
    f"{BLIP_MODULES}:ImageQFormer",
)
"""Learned queries that attend to an image and to each other, and a matrix."""


BLIP2_VISION = Modality(
    VISION,
    BLIP_VIT,
    IMAGE_QFORMER,
    prefix="vision_model.",
    projector_prefix="",
    replaces=("vision_model", "query_tokens", "qformer", "language_projection"),
    placeholder_id=50265,
)
"""BLIP-2."""
