"""RADIO with the names of its authors, and the projector of Nemotron Omni: configs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.common.rows import when
from tpuconv.models.towers.qwen_vit.family import JOINED_QKV, JOINED_QKV_BIAS
from tpuconv.models.towers.rows import DOWN, OUT_OF_HEADS, UP, layer_norm, rms_norm, with_bias, without_bias
from tpuconv.models.towers.siglip2.family import SIGLIP2_MODULES
from tpuconv.notation.table import Map, under

RADIO_MODULES = "tpuconv.models.towers.radio.modules"


@dataclass(frozen=True, kw_only=True)
class RadioConfig(TowerConfig):
    """The keys of `vision_config`. C are the values of a patch, V of a patch of several frames, P the learned
    positions, R the tokens before the patches, S the tokens that a summary is made of, which nothing here reads.

    Attributes:
        has_scales: whether the outputs of attention and MLP have learned factors, as transformers writes them.
        has_summary: whether the release has the numbers of the tokens of a summary.
        has_conditioner: whether the release has the mean and deviation of colours, by which its processor normalizes.
    """

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(
            ("feature_normalizer_config", "inter_feature_normalizer_config", "vitdet_window_size"), (None,)
        ),
    }
    told: ClassVar[Mapping[str, str]] = {
        "has_scales": r"\.layer_scale1\.|\.attn_scale$",
        "has_summary": r"\.summary_idxs$",
        "has_conditioner": r"\.input_conditioner\.",
    }

    hidden_size: int = 1280
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    mlp_ratio: int | float = 4.0
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    use_swiglu_ffn: bool = False
    qkv_bias: bool = True
    num_channels: int = 3
    patch_size: int = 16
    max_img_size: int = 2048
    num_cls_tokens: int = 3
    num_registers: int = 7
    video_temporal_patch_size: int | None = 2
    summary_idxs: tuple[int, ...] | None = None
    has_scales: bool = False
    has_summary: bool = False
    has_conditioner: bool = False

    def contradictions(self) -> Iterator[str]:
        if self.video_temporal_patch_size is not None and self.video_temporal_patch_size < 2:
            yield f"video_temporal_patch_size={self.video_temporal_patch_size} is less than two frames"
        if self.side < 1:
            yield f"max_img_size={self.max_img_size} is less than patch_size={self.patch_size}"

    @property
    def joins_frames(self) -> bool:
        """True if a matrix of its own reads several frames of a video at once."""
        return self.video_temporal_patch_size is not None

    @property
    def side(self) -> int:
        """The number of learned positions along one side of their table."""
        return self.max_img_size // self.patch_size

    @property
    def first_tokens(self) -> int:
        """The number of learned tokens that stand before the patches of an image."""
        return self.num_cls_tokens + self.num_registers

    @property
    def mlp_size(self) -> int:
        """The width within an MLP. A gated one has two thirds of it, up to a multiple of eight."""
        width = int(self.hidden_size * self.mlp_ratio)
        return -(-int(width * 2 / 3) // 8) * 8 if self.use_swiglu_ffn else width

    @property
    def sizes(self) -> dict[str, Any]:
        values = self.num_channels * self.patch_size**2
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.mlp_size,
            "L": self.num_hidden_layers,
            "X": self.num_channels,
            "C": values,
            "V": (self.video_temporal_patch_size or 0) * values,
            "P": self.side**2,
            "R": self.first_tokens,
            "S": 2 if self.summary_idxs is None else len(self.summary_idxs),
        }


RADIO = Tower(
    "radio",
    "RADIO",
    RadioConfig,
    (
        *when(
            "has_conditioner",
            Map("input_conditioner.norm_mean", "input_conditioner.mean", "X 1 1 -> X", buffer=True),
            Map("input_conditioner.norm_std", "input_conditioner.deviation", "X 1 1 -> X", buffer=True),
        ),
        Map("summary_idxs", "summary_idxs", "S", when="has_summary", buffer=True),
        *under(
            "model.patch_generator",
            "",
            *without_bias("embedder", "patch", "D C -> C D"),
            *when("joins_frames", *without_bias("video_embedder", "video_patch", "D V -> V D")),
            Map("pos_embed", "positions", "1 P D -> P D"),
            Map("cls_token.token", "first", "R D"),
        ),
        *under(
            "model.blocks.{L}",
            "layers.{L}",
            *layer_norm("norm1", "attn_norm"),
            *layer_norm("norm2", "mlp_norm"),
            JOINED_QKV,
            replace(JOINED_QKV_BIAS, when="qkv_bias"),
            *with_bias("attn.proj", "attn.o", OUT_OF_HEADS, "D"),
            Map("layer_scale1.lambda1", "attn_scale", "D", "has_scales"),
            Map("layer_scale2.lambda1", "mlp_scale", "D", "has_scales"),
            *when(
                "not use_swiglu_ffn",
                *with_bias("mlp.fc1", "mlp.up", UP, "F"),
                *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
            ),
            *when(
                "use_swiglu_ffn",
                *with_bias("mlp.gate_proj", "mlp.gate", UP, "F"),
                *with_bias("mlp.up_proj", "mlp.up", UP, "F"),
                *with_bias("mlp.down_proj", "mlp.down", DOWN, "D"),
            ),
        ),
    ),
    f"{RADIO_MODULES}:Radio",
)


@dataclass(frozen=True, kw_only=True)
class SquaresConfig(ProjectorConfig):
    """The keys of a projector that joins squares of four patches. M is the width of joined patches."""

    downsample_ratio: int | float = 0.5
    projector_hidden_size: int = 4096
    ps_version: str = "v2"
    vision_hidden_size: int = 1280
    video_temporal_patch_size: int | None = 2

    def check(self, tower: Any) -> None:
        super().check(tower)
        for name, implemented in (("downsample_ratio", 0.5), ("ps_version", "v2")):
            if (value := getattr(self, name)) != implemented:
                raise UnsupportedConfig(f"config.json: {name}={short(value)} is not implemented", hint=TEXT_ALONE)
        for own, key in (("vision_hidden_size", "hidden_size"), ("video_temporal_patch_size",) * 2):
            if (have := getattr(self, own)) != (want := getattr(tower, key)):
                raise ConfigError(f"config.json: {own}={have}, and the encoder has {key}={want}")

    @property
    def merge(self) -> int:
        return 2

    def joined(self, tower: Any) -> int:
        """Returns the width of joined patches."""
        return int(tower.sizes["D"] * self.merge**2)


@dataclass(frozen=True, kw_only=True)
class SquaredConfig(SquaresConfig):
    """The keys of the projector of images of Nemotron Omni. A is the width between its matrices.

    Attributes:
        has_final_norm: whether patches are normalized before they are joined, as beside layers for further tokens.
    """

    projection_bias: ClassVar[bool] = False

    has_final_norm: bool

    @classmethod
    def of_text(cls, text: Any) -> dict[str, Any]:
        return {**super().of_text(text), "has_final_norm": text.num_nextn_predict_layers > 0}

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.projector_hidden_size, "M": self.joined(tower)}


@dataclass(frozen=True, kw_only=True)
class LlamaSquaresConfig(SquaresConfig):
    """The keys of the projector of Llama Nemotron Nano VL, with the facts that LFM2-VL's has as keys. W is the width
    between its matrices."""

    projector_hidden_act: ClassVar[str] = "gelu"
    projector_bias: ClassVar[bool] = True
    projector_use_layernorm: ClassVar[bool] = True

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": self.projector_hidden_size, "M": self.joined(tower)}


def squared_rows(norm: str, up: str, down: str, width: str) -> tuple[Map, ...]:
    """Returns the rows of an RMS norm and two matrices; `width` is the letter of what is normalized."""
    return (
        *rms_norm(norm, "norm", width),
        *without_bias(up, "up", f"A {width} -> {width} A"),
        *without_bias(down, "down", "O A -> A O"),
    )


SQUARES = Projector(
    SquaredConfig,
    (
        *when("has_final_norm", *layer_norm("vision_projector.vision_final_layernorm", "final_norm")),
        *squared_rows("mlp1.0", "mlp1.1", "mlp1.3", "M"),
    ),
    f"{RADIO_MODULES}:Squares",
)
"""Squares of patches are joined; a norm and two matrices with a squared ReLU between follow."""

LLAMA_SQUARES = Projector(
    LlamaSquaresConfig,
    (
        *layer_norm("mlp1.0", "norm", "M"),
        *with_bias("mlp1.1", "up", "W M -> M W", "W"),
        *with_bias("mlp1.3", "down", "O W -> W O", "O"),
    ),
    f"{SIGLIP2_MODULES}:BlockMatrices",
)
"""Squares of patches are joined; a norm with a bias and two matrices with a GELU between follow."""
