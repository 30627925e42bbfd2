"""The tower of Molmo 2 and its pooling: configs and tables."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import VISION, Modality, PartConfig, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.key_types import checked_values, object_of
from tpuconv.models.towers.rows import (
    DOWN,
    IN_HEADS,
    IN_KV_HEADS,
    OUT_OF_HEADS,
    UP,
    layer_norm,
    with_bias,
    without_bias,
)
from tpuconv.notation.table import Map, under

MOLMO_MODULES = "tpuconv.models.towers.molmo.modules"
COUNTED_LAYERS = "num_hidden_layers"


@dataclass(frozen=True, kw_only=True)
class MolmoVitConfig(TowerConfig):
    """The keys of `vision_config`. K counts the heads of keys and values."""

    aliases: ClassVar[Mapping[str, str]] = {
        "image_default_input_size": "image_size",
        "image_patch_size": "patch_size",
        "image_num_pos": "num_position_embeddings",
    }

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 25
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 72
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    image_size: tuple[int, ...] | None = None
    patch_size: int = 14
    num_position_embeddings: int | None = None
    num_channels: int = 3
    attention_bias: bool = True

    @property
    def positions(self) -> int:
        """The number of patches of a crop, each with a learned position."""
        if self.num_position_embeddings is not None:
            return self.num_position_embeddings
        height, width = (self.image_size or (378, 378))[:2]
        return (height // self.patch_size) * (width // self.patch_size)

    def contradictions(self) -> Iterator[str]:
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        sides = list(self.image_size or (378, 378))
        if len(sides) != 2:
            yield f"image_size={short(sides)} is not a height and a width"

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "K": self.num_key_value_heads,
            "H": self.head_dim,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "C": self.num_channels * self.patch_size**2,
            "P": self.positions,
        }


MOLMO_VIT = Tower(
    "molmo_vit",
    "Molmo 2",
    MolmoVitConfig,
    (
        *with_bias("patch_embedding", "patch", "D C -> C D", "D"),
        Map("positional_embedding", "positions", "P D"),
        *under(
            "transformer.resblocks.{L}",
            "layers.{L}",
            *layer_norm("attention_norm", "attn_norm"),
            *layer_norm("ffn_norm", "mlp_norm"),
            *with_bias("attention.wq", "attn.q", IN_HEADS, "(N H) -> N H", "attention_bias"),
            *with_bias("attention.wk", "attn.k", IN_KV_HEADS, "(K H) -> K H", "attention_bias"),
            *with_bias("attention.wv", "attn.v", IN_KV_HEADS, "(K H) -> K H", "attention_bias"),
            *with_bias("attention.wo", "attn.o", OUT_OF_HEADS, "D", "attention_bias"),
            *with_bias("feed_forward.w1", "mlp.up", UP, "F"),
            *with_bias("feed_forward.w2", "mlp.down", DOWN, "D"),
        ),
    ),
    f"{MOLMO_MODULES}:MolmoVit",
)


@dataclass(frozen=True, kw_only=True)
class PoolingConfig(ProjectorConfig):
    """The keys of `adapter_config`, under names that the tower does not have, and ids of tokens beside it. M is the
    width of hidden states side by side, A the width of the attention's output, with G heads of width E and R heads of
    keys and values; W is the width of the MLP."""

    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_size": "pooling_width",
        "num_attention_heads": "pooling_heads",
        "num_key_value_heads": "pooling_kv_heads",
        "head_dim": "pooling_head_dim",
        "attention_bias": "pooling_bias",
        "hidden_act": "pooling_hidden_act",
        "intermediate_size": "mlp_width",
        "vit_layers": "vision_feature_layer",
    }

    pooling_width: int = 1152
    pooling_heads: int = 16
    pooling_kv_heads: int = 16
    pooling_head_dim: int = 72
    pooling_bias: bool = True
    pooling_hidden_act: str = "silu"
    mlp_width: int = 18944
    mlp_bias: bool = False
    vision_feature_layer: tuple[int, ...] | None = None
    image_patch_id: int = 151938
    image_col_id: int = 151939
    image_low_res_id: int = 151942
    image_start_token_id: int = 151936
    image_end_token_id: int = 151937
    low_res_image_start_token_id: int | None = 151940
    frame_start_token_id: int = 151943
    frame_end_token_id: int = 151944

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        inside = object_of(outer, "adapter_config")
        named = {cls.renamed.get(key, key): value for key, value in inside.items()}
        return super().from_hf({**outer, **named}, tower, text)

    def check(self, tower: Any) -> None:
        super().check(tower)
        if not self.pooling_kv_heads or self.pooling_heads % self.pooling_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={self.pooling_heads} of adapter_config is no multiple of "
                f"num_key_value_heads={self.pooling_kv_heads}"
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        layers = RELEASED_LAYERS if self.vision_feature_layer is None else self.vision_feature_layer
        return tuple(layer + 1 if layer >= 0 else layer for layer in layers)

    @property
    def adds_features(self) -> bool:
        return True

    @property
    def block_tokens(self) -> tuple[int, ...]:
        ids = (
            *(self.image_patch_id, self.image_col_id, self.image_low_res_id, self.image_start_token_id),
            *(self.image_end_token_id, self.low_res_image_start_token_id),
            *(self.frame_start_token_id, self.frame_end_token_id),
        )
        return tuple(token for token in ids if token is not None)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {
            "O": self.out,
            "M": tower.sizes["D"] * len(self.feature_layers),
            "A": self.pooling_width,
            "G": self.pooling_heads,
            "R": self.pooling_kv_heads,
            "E": self.pooling_head_dim,
            "W": self.mlp_width,
        }


RELEASED_LAYERS = (24, 18)
"""The layers of the tower whose outputs are pooled."""

POOLING_KV = "(R E) M -> M R E"

MOLMO_POOLING = Projector(
    PoolingConfig,
    (
        *with_bias("image_pooling_2d.wq", "q", "(G E) M -> M G E", "(G E) -> G E", "pooling_bias"),
        *with_bias("image_pooling_2d.wk", "k", POOLING_KV, "(R E) -> R E", "pooling_bias"),
        *with_bias("image_pooling_2d.wv", "v", POOLING_KV, "(R E) -> R E", "pooling_bias"),
        *with_bias("image_pooling_2d.wo", "o", "A (G E) -> G E A", "A", "pooling_bias"),
        *with_bias("image_projector.w1", "gate", "W A -> A W", "W", "mlp_bias"),
        *with_bias("image_projector.w3", "up", "W A -> A W", "W", "mlp_bias"),
        *without_bias("image_projector.w2", "down", "O W -> W O"),
    ),
    f"{MOLMO_MODULES}:Pooling",
)
"""Attention of the mean of some patches to each of them, and an MLP."""


class MolmoModality(Modality):
    """The way in which Molmo 2 sees. Releases have `vit_config` in place of `vision_config`, which counts layers behind
    the last one that is read; there are no tensors of them (`Molmo2Config` of transformers)."""

    def read(self, outer: Mapping[str, Any], text: Any, tensors: Collection[str] = ()) -> PartConfig:
        vit, adapter = outer.get("vit_config"), outer.get("adapter_config") or {}
        if outer.get("vision_config") is not None or not isinstance(vit, Mapping) or not isinstance(adapter, Mapping):
            return super().read(outer, text, tensors)
        count = checked_values(vit, {COUNTED_LAYERS: int}).get(COUNTED_LAYERS, MolmoVitConfig.num_hidden_layers)
        given = checked_values(adapter, {"vit_layers": tuple[int, ...], "vision_feature_layer": tuple[int, ...]})
        layers = [layer % max(1, count) for layer in next(iter(given.values()), RELEASED_LAYERS)]
        read = {key: value for key, value in adapter.items() if key != "vit_layers"} | {"vision_feature_layer": layers}
        trimmed = {**vit, COUNTED_LAYERS: max(layers, default=count - 1) + 1}
        return super().read({**outer, "vision_config": trimmed, "adapter_config": read}, text, tensors)


MOLMO_VISION = MolmoModality(
    VISION,
    MOLMO_VIT,
    MOLMO_POOLING,
    prefix="model.vision_backbone.image_vit.",
    projector_prefix="model.vision_backbone.",
    replaces=("vision_backbone",),
    placeholder=("image_patch_id", "image_token_id"),
    placeholder_id=151938,
)
"""Molmo 2."""
