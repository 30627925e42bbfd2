"""MobileNetV5: config and table. It has four stages, of which each begins with a block that halves rows and columns.

The letters p and q are the sides of kernels of 3 x 3, r and s of 5 x 5, W is the width of the output. Words name the
channels of the stem, of each stage and of the blocks that are alike in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import Tower, TowerConfig
from tpuconv.models.towers.timm_args import timm_args
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

MOBILENET_MODULES = "tpuconv.models.towers.mobilenet.modules"


@dataclass(frozen=True, kw_only=True)
class AlikeBlocks:
    """AlikeBlocks of a stage that are alike.

    Attributes:
        name: of them in the words of their axes.
        numbers: of the blocks in their stage.
        widens: the inner channels, by the channels that a block reads; 0 for attention.
        start, mid: the sides of the kernels before the channels are widened and behind that; 0 without one.
        is_edge: whether one convolution both widens the channels and reads neighbours ("edge" residual).
        heads, head_dim: of attention, whose heads share keys and values.
        key_stride: the rows, and columns, for each of which attention has a key.
    """

    name: str
    numbers: Sequence[int]
    widens: int = 0
    start: int = 0
    mid: int = 0
    is_edge: bool = False
    heads: int = 0
    head_dim: int = 0
    key_stride: int = 1


@dataclass(frozen=True)
class NetStage:
    """A stage.

    Attributes:
        width: its channels.
        blocks: all of its blocks.
    """

    width: int
    blocks: tuple[AlikeBlocks, ...]

    def block(self, number: int) -> AlikeBlocks:
        """Returns the blocks of which the one with this number is."""
        return next(each for each in self.blocks if number in each.numbers)

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return sum(len(each.numbers) for each in self.blocks)


STEM = 64
"""The channels of the first convolution."""

NET_STAGES = (
    NetStage(
        128,
        (
            AlikeBlocks(name="halving0", numbers=(0,), widens=4, is_edge=True),
            AlikeBlocks(name="edge0", numbers=(1, 2), widens=4, is_edge=True),
        ),
    ),
    NetStage(
        256,
        (
            AlikeBlocks(name="halving1", numbers=(0,), widens=6, start=3, mid=5),
            AlikeBlocks(name="large1", numbers=(1, 3), widens=4, start=5),
            AlikeBlocks(name="small1", numbers=(2, 4), widens=4, start=3),
        ),
    ),
    NetStage(
        640,
        (
            AlikeBlocks(name="halving2", numbers=(0,), widens=6, start=5, mid=5),
            AlikeBlocks(name="large2", numbers=range(1, 8), widens=4, start=5),
            AlikeBlocks(name="narrow2", numbers=(8,), widens=1),
            AlikeBlocks(name="attention2", numbers=range(9, 36, 2), heads=12, head_dim=64, key_stride=2),
            AlikeBlocks(name="mlp2", numbers=range(10, 37, 2), widens=2),
        ),
    ),
    NetStage(
        1280,
        (
            AlikeBlocks(name="halving3", numbers=(0,), widens=6, start=5, mid=5),
            AlikeBlocks(name="attention3", numbers=range(1, 38, 2), heads=16, head_dim=96),
            AlikeBlocks(name="mlp3", numbers=range(2, 39, 2), widens=2),
        ),
    ),
)
"""The stages of `mobilenetv5_300m_enc`."""

FUSED_STAGES = (2, 3)
"""The stages whose outputs the last block joins."""

declare(
    stem=Word("channels of the first convolution"),
    fused=Word("channels of the stages that are joined"),
    fused_mlp=Word("inner channels of the block that joins stages", "F"),
    **{f"stage{i}": Word(f"channels of stage {i}", "D") for i in range(len(NET_STAGES))},
    **{
        f"{each.name}_blocks": Word("blocks of a stage that are alike") for stage in NET_STAGES for each in stage.blocks
    },
    **{
        f"{each.name}_mlp": Word("inner channels of these blocks", "F")
        for stage in NET_STAGES
        for each in stage.blocks
        if each.widens
    },
    **{
        f"{each.name}_{x}": word
        for stage in NET_STAGES
        for each in stage.blocks
        if each.heads
        for x, word in (("heads", Word("heads of these blocks", "N")), ("head_dim", Word("width of these heads")))
    },
)


@dataclass(frozen=True, kw_only=True)
class MobileNetConfig(TowerConfig):
    """The keys of `vision_config`. Of `model_args`, what timm's `create_model` is called with, `channel_multiplier`
    and `msfa_output_resolution` are read."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "architecture": ("mobilenetv5_300m_enc",),
        "do_pooling": (False,),
    }

    hidden_size: int = 2048
    rms_norm_eps: float = 1e-6
    vocab_size: int = 128
    vocab_offset: int = 262144
    channel_multiplier: float | int = 1.0
    resolution: tuple[int, ...] = (16, 16)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        args = timm_args(raw, ("channel_multiplier", "msfa_output_resolution"))
        side = args.get("msfa_output_resolution", 16)
        own = {"channel_multiplier": args.get("channel_multiplier", 1.0)}
        own["resolution"] = [side, side] if type(side) is int else side
        return super().from_hf({**raw, **own})

    def contradictions(self) -> Iterator[str]:
        if len(self.resolution) != 2 or min(self.resolution) < 1:
            yield f"msfa_output_resolution={list(self.resolution)} are not 2 positive numbers"
        if self.channel_multiplier <= 0:
            yield f"channel_multiplier={self.channel_multiplier} is not positive"

    @property
    def words(self) -> range:
        return range(self.vocab_offset, self.vocab_offset + self.vocab_size)

    @property
    def tokens(self) -> int:
        """The features of an image."""
        return prod(self.resolution)

    def channels(self, count: int) -> int:
        """Returns the channels that `count` of the architecture are with the multiplier: a multiple of 8, at least nine
        tenths of the product, as timm rounds."""
        wanted = count * self.channel_multiplier
        near = max(8, int(wanted + 4) // 8 * 8)
        return near + 8 if near < 0.9 * wanted else near

    @property
    def sizes(self) -> dict[str, Any]:
        stem = STEM if self.channel_multiplier < 1 else self.channels(STEM)
        out: dict[str, Any] = {"stem": stem, "W": self.hidden_size, "V": self.vocab_size}
        out |= {"X": 3, "p": 3, "q": 3, "r": 5, "s": 5}
        before = stem
        for number, stage in enumerate(NET_STAGES):
            width = out[f"stage{number}"] = self.channels(stage.width)
            for each in stage.blocks:
                out[f"{each.name}_blocks"] = tuple(each.numbers)
                if each.widens:
                    out[f"{each.name}_mlp"] = each.widens * (before if 0 in each.numbers else width)
                else:
                    out |= {f"{each.name}_heads": each.heads, f"{each.name}_head_dim": each.head_dim}
            before = width
        fused = sum(out[f"stage{number}"] for number in FUSED_STAGES)
        return {**out, "fused": fused, "fused_mlp": 2 * fused}


SIDES = {3: "p q", 5: "r s"}
"""The letters of the sides of kernels."""


def _normed(name: str, norm: str, param: str, layout: str) -> tuple[Map, Map]:
    """Returns the rows of a convolution and the norm of its channels, which are the last axis."""
    channels = layout.rpartition(" ")[2]
    return Map(f"{name}.weight", f"{param}.kernel", layout), Map(f"{norm}.weight", f"{param}.norm.scale", channels)


def _point(width: str, out: str) -> str:
    return f"{out} {width} 1 1 -> {width} {out}"


def _depth(side: int, width: str) -> str:
    return f"{width} 1 {SIDES[side]} -> {SIDES[side]} 1 {width}"


def _named(name: str, param: str, layout: str) -> tuple[Map, Map]:
    return _normed(f"{name}.conv", f"{name}.bn", param, layout)


def _block(each: AlikeBlocks, before: str, width: str) -> tuple[Map, ...]:
    """Returns the rows of blocks that read channels `before`, and have the channels `width`."""
    mlp, scale = f"{each.name}_mlp", Map("layer_scale.gamma", "scale", width)
    if each.is_edge:
        return (
            *_normed("conv_exp", "bn1", "expand", f"{mlp} {before} p q -> p q {before} {mlp}"),
            *_normed("conv_pwl", "bn2", "project", _point(mlp, width)),
        )
    if each.widens:
        return (
            *(_named("dw_start", "start", _depth(each.start, before)) if each.start else ()),
            *_named("pw_exp", "expand", _point(before, mlp)),
            *(_named("dw_mid", "mid", _depth(each.mid, mlp)) if each.mid else ()),
            *_named("pw_proj", "project", _point(mlp, width)),
            scale,
        )
    N, H = f"{each.name}_heads", f"{each.name}_head_dim"
    reduced = [row for x in ("key", "value") for row in _reduced(x, width)] if each.key_stride > 1 else []
    return (
        Map("norm.weight", "norm.scale", width),
        Map("attn.query.proj.weight", "q.kernel", f"({N} {H}) {width} 1 1 -> {width} {N} {H}"),
        *reduced,
        Map("attn.key.proj.weight", "k.kernel", _point(width, H)),
        Map("attn.value.proj.weight", "v.kernel", _point(width, H)),
        Map("attn.output.proj.weight", "o.kernel", f"{width} ({N} {H}) 1 1 -> {N} {H} {width}"),
        scale,
    )


def _reduced(name: str, width: str) -> tuple[Map, Map]:
    """Returns the rows of the convolution of every second row and column, before keys or values."""
    return _normed(f"attn.{name}.down_conv", f"attn.{name}.norm", f"{name}_reduced", _depth(3, width))


def _stages() -> Iterator[Map]:
    before = "stem"
    for number, stage in enumerate(NET_STAGES):
        for each in stage.blocks:
            numbers, width = f"{number}.{{{each.name}_blocks}}", f"stage{number}"
            rows = _block(each, before if 0 in each.numbers else width, width)
            yield from under(f"blocks.{numbers}", f"stages.{numbers}", *rows)
        before = f"stage{number}"


MOBILENET = Tower(
    "mobilenetv5",
    "Gemma 3n",
    MobileNetConfig,
    (
        *_named("conv_stem", "stem", "stem X p q -> p q X stem"),
        Map("conv_stem.conv.bias", "stem.bias", "stem"),
        *_stages(),
        *under(
            "msfa",
            "fusion",
            *_named("ffn.pw_exp", "expand", _point("fused", "fused_mlp")),
            *_named("ffn.pw_proj", "project", _point("fused_mlp", "W")),
            Map("norm.weight", "norm.scale", "W"),
        ),
    ),
    f"{MOBILENET_MODULES}:MobileNet",
)
