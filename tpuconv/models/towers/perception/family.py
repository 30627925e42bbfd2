"""The Perception Encoder of Perception LM (arXiv:2504.13181), with the names and settings of timm: config and table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import VISION, Modality, Projector, Tower
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.llava.family import LLAVA_MATRICES, LlavaConfig
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, PATCH_MATRIX, UP, layer_norm, with_bias, without_bias
from tpuconv.models.towers.siglip.family import ImageConfig
from tpuconv.models.towers.timm_args import timm_args
from tpuconv.notation.table import Map, under

PERCEPTION_MODULES = "tpuconv.models.towers.perception.modules"

_LARGE = {"embed_dim": 1024, "mlp_ratio": 4.0, "class_token": True}
_GIGANTIC = {"embed_dim": 1536, "mlp_ratio": 8960 / 1536, "class_token": False}
_CORE = {"global_pool": "map", "use_post_transformer_norm": True}
_LANG = {"init_values": 0.1}

PERCEPTION_SIZES: Mapping[Any, Mapping[str, Any]] = {
    "vit_pe_core_large_patch14_336": {**_LARGE, **_CORE, "depth": 24, "img_size": 336},
    "vit_pe_core_gigantic_patch14_448": {**_GIGANTIC, **_CORE, "depth": 50, "img_size": 448},
    "vit_pe_lang_large_patch14_448": {**_LARGE, **_LANG, "depth": 23, "img_size": 448},
    "vit_pe_lang_gigantic_patch14_448": {**_GIGANTIC, **_LANG, "depth": 47, "img_size": 448},
}
"""The settings of each architecture of timm, as far as they differ from the defaults of `PerceptionConfig`."""


@dataclass(frozen=True, kw_only=True)
class PerceptionConfig(ImageConfig):
    """The keys of `model_args`, what timm's `create_model` is called with, over the settings of `architecture`. Without
    `init_values` the outputs of attention and MLP are not scaled."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"global_pool": ("", "avg", "token")}
    aliases: ClassVar[Mapping[str, str]] = {
        "embed_dim": "hidden_size",
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "img_size": "image_size",
    }

    num_attention_heads: int = 16
    patch_size: int = 14
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu"
    mlp_ratio: int | float
    class_token: bool
    init_values: int | float | None = None
    use_post_transformer_norm: bool = False
    ref_feat_shape: tuple[int, ...] | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        architecture = raw.get("architecture")
        settings = PERCEPTION_SIZES.get(architecture) if isinstance(architecture, str) else None
        if settings is None:
            raise _unimplemented("architecture", architecture)
        names = {*cls.aliases, *cls.only, *cls.__dataclass_fields__} - {*cls.aliases.values()}
        args = {**settings, **timm_args(raw, names)}
        if isinstance(sides := args["img_size"], list):
            if len(sides) != 2 or sides[0] != sides[1]:
                raise _unimplemented("img_size", sides)
            args["img_size"] = sides[0]
        return super().from_hf(args)

    def contradictions(self) -> Iterator[str]:
        if self.ref_feat_shape is not None and tuple(self.ref_feat_shape) != (self.side, self.side):
            yield f"ref_feat_shape={list(self.ref_feat_shape)}, and images have {self.side} x {self.side} patches"

    @property
    def has_class_token(self) -> bool:
        return self.class_token

    @property
    def has_scales(self) -> bool:
        """True if the outputs of attention and MLP are multiplied by learned factors."""
        return self.init_values is not None

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "F": int(self.hidden_size * self.mlp_ratio)}


def _unimplemented(key: str, value: Any) -> UnsupportedConfig:
    return UnsupportedConfig(f"{key}={short(value)} of an encoder is not implemented", hint=TEXT_ALONE)


@dataclass(frozen=True, kw_only=True)
class MeansConfig(LlavaConfig):
    """The keys of the projector of Perception LM."""

    projector_pooling_ratio: int = 1
    vision_use_cls_token: bool = True

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        own = ("projector_pooling_ratio", "vision_use_cls_token")
        return super().from_hf({key: outer[key] for key in own if key in outer}, tower, text)

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.vision_use_cls_token != tower.class_token:
            raise ConfigError(
                f"config.json: vision_use_cls_token={self.vision_use_cls_token}, and the encoder has "
                f"class_token={tower.class_token}"
            )
        if self.projector_pooling_ratio < 1 or tower.side % self.projector_pooling_ratio:
            raise UnsupportedConfig(
                f"projector_pooling_ratio={self.projector_pooling_ratio} of {tower.side} x {tower.side} patches is not "
                "implemented",
                hint=TEXT_ALONE,
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def drops_first(self) -> bool:
        return self.vision_use_cls_token

    @property
    def merge(self) -> int:
        return self.projector_pooling_ratio

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "M": tower.sizes["D"]}


PERCEPTION = Tower(
    "perception",
    "Perception LM",
    PerceptionConfig,
    (
        Map("cls_token", "class_token", "1 1 D -> D", when="has_class_token"),
        *without_bias("patch_embed.proj", "patch", PATCH_MATRIX),
        Map("pos_embed", "positions", "1 P D -> P D"),
        *layer_norm("norm_pre", "pre_norm"),
        *under(
            "blocks.{L}",
            "layers.{L}",
            *layer_norm("norm1", "attn_norm"),
            *layer_norm("norm2", "mlp_norm"),
            JOINED_QKV,
            JOINED_QKV_BIAS,
            *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
            Map("gamma_1", "attn_scale", "D", when="has_scales"),
            Map("gamma_2", "mlp_scale", "D", when="has_scales"),
        ),
        *(replace(row, when="use_post_transformer_norm") for row in layer_norm("norm", "norm")),
    ),
    f"{PERCEPTION_MODULES}:PerceptionEncoder",
)

MEANS = Projector(MeansConfig, LLAVA_MATRICES.rows, f"{PERCEPTION_MODULES}:Means")
"""Two matrices of each patch, and the means of squares of patches."""


PERCEPTION_VISION = Modality(
    VISION,
    PERCEPTION,
    MEANS,
    prefix="model.vision_tower.timm_model.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=128002,
)
"""Perception LM."""
