"""InternViT and the projector of InternVL: configs and tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, ClassVar, Self

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import VISION, Modality, Projector, ProjectorConfig, Tower
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.rows import (
    DOWN,
    IN_HEADS,
    OUT_OF_HEADS,
    PATCH_MATRIX,
    UP,
    layer_norm,
    with_bias,
    without_bias,
)
from tpuconv.models.towers.siglip.family import GEMMA3_VISION, ImageConfig
from tpuconv.notation.table import Map, under


@dataclass(frozen=True, kw_only=True)
class InternVitConfig(ImageConfig):
    """The keys of `vision_config`. Sizes may have two sides."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"norm_type": ("layer_norm", "rms_norm")}

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    attention_bias: bool = False
    use_qk_norm: bool = False
    hidden_act: str = "gelu"
    norm_type: str = "layer_norm"
    image_size: int = 448
    patch_size: int = 14
    use_mask_token: bool = False
    use_absolute_position_embeddings: bool = True
    use_mean_pooling: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        sides = {key: raw[key] for key in ("image_size", "patch_size") if isinstance(raw.get(key), list | tuple)}
        for key, values in sides.items():
            if len(set(values)) != 1:
                raise UnsupportedConfig(f"{key}={short(values)} of an encoder is not implemented", hint=TEXT_ALONE)
        return super().from_hf({**raw, **{key: values[0] for key, values in sides.items()}})

    @property
    def has_class_token(self) -> bool:
        return True

    @property
    def has_bias_norms(self) -> bool:
        """True if the norms of layers have biases."""
        return self.norm_type == "layer_norm"

    @property
    def has_last_norm(self) -> bool:
        """True if a norm is behind the last layer."""
        return not self.use_mean_pooling


@dataclass(frozen=True, kw_only=True)
class ShuffledConfig(ProjectorConfig):
    """The keys of the projector of InternVL, which joins patches. M is the width of joined patches."""

    projector_bias: ClassVar[bool] = True

    downsample_ratio: float = 0.5
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int = -1
    vision_feature_select_strategy: str = "default"

    def check(self, tower: Any) -> None:
        super().check(tower)
        patches = tower.positions - self.drops_first
        side = int(patches**0.5)
        is_joined = 0 < self.downsample_ratio <= 1 and isclose(self.merge * self.downsample_ratio, 1)
        if not is_joined or side**2 != patches or side % self.merge:
            raise UnsupportedConfig(
                f"downsample_ratio={self.downsample_ratio} of {patches} patches is not implemented", hint=TEXT_ALONE
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return () if self.vision_feature_layer == -1 else (self.vision_feature_layer,)

    @property
    def drops_first(self) -> bool:
        return self.vision_feature_select_strategy == "default"

    @property
    def merge(self) -> int:
        return int(1 / self.downsample_ratio)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "M": tower.sizes["D"] * self.merge**2}


@dataclass(frozen=True, kw_only=True)
class ReleasedShuffledConfig(ShuffledConfig):
    """The same of InternVL with code of its own, whose first version joins patches in another order."""

    ps_version: str = "v1"
    force_image_size: int | None = None

    def check(self, tower: Any) -> None:
        super().check(tower)
        for name, implemented in (("ps_version", ("v2",)), ("force_image_size", (None, 0, tower.image_size))):
            if (value := getattr(self, name)) not in implemented:
                raise UnsupportedConfig(f"config.json: {name}={short(value)} is not implemented", hint=TEXT_ALONE)


HEADS_BIAS = "(N H) -> N H"
_JOINED = "((N H) + (N H) + (N H))"


def _norm(name: str, param: str) -> tuple[Map, Map]:
    return Map(f"{name}.weight", f"{param}.scale", "D"), Map(f"{name}.bias", f"{param}.bias", "D", "has_bias_norms")


_MLP = (*with_bias("mlp.fc1", "mlp.up", UP, "F"), *with_bias("mlp.fc2", "mlp.down", DOWN, "D"))


def _qk_norms(attention: str) -> tuple[Map, ...]:
    return tuple(Map(f"{attention}.{x}_norm.weight", f"attn.{x}_norm.scale", HEADS_BIAS, "use_qk_norm") for x in "qk")


def _tower(embeddings: tuple[str, str, str], layers: tuple[Map, ...], end: str) -> tuple[Map, ...]:
    class_token, positions, patch = embeddings
    return (
        Map(f"embeddings.{class_token}", "class_token", "1 1 D -> D"),
        Map("embeddings.mask_token", "mask_token", "1 1 D -> D", "use_mask_token"),
        Map(f"embeddings.{positions}", "positions", "1 P D -> P D", "use_absolute_position_embeddings"),
        *with_bias(f"embeddings.{patch}", "patch", PATCH_MATRIX, "D"),
        *layers,
        *(replace(row, when="has_last_norm") for row in layer_norm(end, "norm")),
    )


INTERN_VIT = Tower(
    "intern_vit",
    "InternVL, with the names of transformers",
    InternVitConfig,
    _tower(
        ("cls_token", "position_embeddings", "patch_embeddings.projection"),
        under(
            "encoder.layer.{L}",
            "layers.{L}",
            *_norm("layernorm_before", "attn_norm"),
            *_norm("layernorm_after", "mlp_norm"),
            Map("lambda_1", "attn_scale", "D"),
            Map("lambda_2", "mlp_scale", "D"),
            *(Map(f"attention.{x}_proj.weight", f"attn.{x}.kernel", IN_HEADS) for x in "qkv"),
            *(Map(f"attention.{x}_proj.bias", f"attn.{x}.bias", HEADS_BIAS, "attention_bias") for x in "qkv"),
            *_qk_norms("attention"),
            *with_bias("attention.projection_layer", "attn.o", OUT_OF_HEADS, "D"),
            *_MLP,
        ),
        "layernorm",
    ),
    "tpuconv.models.towers.intern_vit.modules:InternVit",
)

RELEASED_INTERN_VIT = Tower(
    "released_intern_vit",
    "InternVL and Qianfan-OCR, with the names of the authors",
    InternVitConfig,
    _tower(
        ("class_embedding", "position_embedding", "patch_embedding"),
        under(
            "encoder.layers.{L}",
            "layers.{L}",
            *_norm("norm1", "attn_norm"),
            *_norm("norm2", "mlp_norm"),
            Map("ls1", "attn_scale", "D"),
            Map("ls2", "mlp_scale", "D"),
            Map(
                "attn.qkv.weight",
                ("attn.q.kernel", "attn.k.kernel", "attn.v.kernel"),
                f"{_JOINED} D -> D N H, D N H, D N H",
            ),
            Map(
                "attn.qkv.bias",
                ("attn.q.bias", "attn.k.bias", "attn.v.bias"),
                f"{_JOINED} -> N H, N H, N H",
                "attention_bias",
            ),
            *_qk_norms("attn"),
            *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
            *_MLP,
        ),
        "layernorm",
    ),
    "tpuconv.models.towers.intern_vit.modules:InternVit",
)


def _shuffled(norm: str, up: str, down: str) -> Projector:
    rows = (
        *layer_norm(norm, "norm", "M"),
        *with_bias(up, "up", "A M -> M A", "A"),
        *with_bias(down, "down", "O A -> A O", "O"),
    )
    return Projector(ShuffledConfig, rows, "tpuconv.models.towers.intern_vit.modules:Shuffled")


SHUFFLED = _shuffled("layer_norm", "linear_1", "linear_2")
"""Patches are joined, and a norm and two matrices follow."""

RELEASED_SHUFFLED = _shuffled("0", "1", "3")
"""The same with the names of the authors."""

INTERNVL_SHUFFLED = replace(RELEASED_SHUFFLED, config=ReleasedShuffledConfig)


@dataclass(frozen=True, kw_only=True)
class GatedConfig(ProjectorConfig):
    """The keys of the projector of Command A Vision, which joins patches behind the tower's last norm. M is the width
    of joined patches, A the width within the gated MLP.

    Attributes:
        norm_eps: the epsilon of a norm of joined patches; None where there is none.
    """

    norm_eps: ClassVar[float | None] = None

    downsample_factor: int = 2
    alignment_intermediate_size: int = 36864

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.downsample_factor < 1 or tower.side % self.downsample_factor:
            raise UnsupportedConfig(
                f"downsample_factor={self.downsample_factor} of {tower.side} x {tower.side} patches is not implemented",
                hint=TEXT_ALONE,
            )

    @property
    def merge(self) -> int:
        return self.downsample_factor

    def sizes(self, tower: Any) -> dict[str, Any]:
        width = tower.sizes["D"] * self.downsample_factor**2
        return {"O": self.out, "A": self.alignment_intermediate_size // 2, "M": width}


@dataclass(frozen=True, kw_only=True)
class NormedGatedConfig(GatedConfig):
    """The keys of the projector of Aya Vision."""

    alignment_intermediate_size: int
    adapter_layer_norm_eps: float = 1e-6
    vision_feature_layer: int = -1
    vision_feature_select_strategy: str = "full"

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({"alignment_intermediate_size": text.hidden_size, **outer}, tower, text)

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.vision_feature_select_strategy != "full":
            raise UnsupportedConfig(
                f"vision_feature_select_strategy={short(self.vision_feature_select_strategy)} is not implemented: "
                "SigLIP has no class token",
                hint=TEXT_ALONE,
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.vision_feature_layer,)

    @property
    def norm_eps(self) -> float:  # type: ignore[override]
        return self.adapter_layer_norm_eps


_GATED_ROWS = (
    Map("linear_1.weight", ("up.kernel", "gate.kernel"), "(A + A) M -> M A, M A"),
    Map("linear_1.bias", ("up.bias", "gate.bias"), "(A + A) -> A, A"),
    *with_bias("linear_2", "down", "O A -> A O", "O"),
)

GATED = Projector(GatedConfig, _GATED_ROWS, "tpuconv.models.towers.intern_vit.modules:Gated")
"""Patches are joined, and a gated MLP follows."""

NORMED_GATED = replace(GATED, config=NormedGatedConfig, rows=(*layer_norm("layernorm", "norm", "M"), *_GATED_ROWS))
"""The same behind a norm."""


AYA_VISION = replace(GEMMA3_VISION, projector=NORMED_GATED, placeholder_id=255036)
"""Aya Vision."""

COMMAND_A_VISION = replace(AYA_VISION, projector=GATED)
"""Command A Vision."""

INTERNVL_VISION = Modality(
    VISION, INTERN_VIT, SHUFFLED, prefix="vision_tower.", placeholder_id=151667, tower_types=("internvl_vision",)
)
"""InternVL in the form of transformers."""

INTERNS1_VISION = replace(
    INTERNVL_VISION,
    prefix="model.vision_tower.",
    projector_prefix="model.multi_modal_projector.",
    tower_types=("interns1_vision",),
)
"""Intern-S1."""

QIANFAN_VISION = replace(
    INTERNVL_VISION,
    tower=RELEASED_INTERN_VIT,
    projector=RELEASED_SHUFFLED,
    prefix="vision_model.",
    projector_prefix="mlp1.",
    defaults={"attention_bias": True},
    tower_types=("qianfan_ocr_vision",),
)
"""Qianfan-OCR."""

INTERNVL_CHAT_VISION = replace(
    QIANFAN_VISION,
    projector=INTERNVL_SHUFFLED,
    defaults={},
    placeholder_id=None,
    placeholder_token="<IMG_CONTEXT>",
    tower_types=("intern_vit_6b",),
)
"""InternVL with the names of the authors."""


@dataclass(frozen=True, kw_only=True)
class PaddedInternVitConfig(InternVitConfig):
    """The keys of NVLM-D, whose tower has more heads than config.json says: the code of servers (vLLM) has their
    number."""

    further_heads: ClassVar[int] = 7

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "N": self.num_attention_heads + self.further_heads}


@dataclass(frozen=True, kw_only=True)
class WideShuffledConfig(ReleasedShuffledConfig):
    """The keys of the projector of NVLM-D, which is as wide between its matrices as the MLPs of the text model."""

    projector_bias: ClassVar[bool] = False

    text_width: int

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "text_width": text.intermediate_size}

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {**super().sizes(tower), "A": self.text_width}


NVLM_VISION = replace(
    INTERNVL_CHAT_VISION,
    tower=replace(
        RELEASED_INTERN_VIT,
        name="padded_intern_vit",
        summary="NVLM-D",
        config=PaddedInternVitConfig,
        encoder="tpuconv.models.towers.intern_vit.modules:PaddedInternVit",
    ),
    projector=replace(
        INTERNVL_SHUFFLED,
        config=WideShuffledConfig,
        rows=(
            *layer_norm("0", "norm", "M"),
            *without_bias("1", "up", "A M -> M A"),
            *without_bias("3", "down", "O A -> A O"),
        ),
    ),
    placeholder_token="<|vision_pad|>",
)
"""NVLM-D."""
