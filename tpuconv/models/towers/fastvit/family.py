"""FastViT of FastVLM (arXiv:2303.14189, arXiv:2412.13303), with the names of timm, whose branches are joined to one
convolution: config and tables. It has five stages, of which each but the first halves rows and columns; the last two
have attention.

The letters p and q are the sides of kernels of 3 x 3, r and s of 7 x 7, W is the width of the output, G the width
between the matrices of its gate. Words name the channels of each stage.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.beside import Projector, Tower, TowerConfig
from tpuconv.models.common.encoder_keys import TEXT_ALONE
from tpuconv.models.towers.llava.family import LLAVA_MATRICES, LlavaConfig
from tpuconv.models.towers.perception.family import PERCEPTION_VISION
from tpuconv.models.towers.rows import layer_norm, with_bias
from tpuconv.models.towers.timm_args import timm_args
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

FASTVIT_MODULES = "tpuconv.models.towers.fastvit.modules"

FAST_STAGES = range(5)
WITH_ATTENTION = (3, 4)
"""The stages that have attention; the others have convolutions in its place."""
FAST_HEAD = 32
"""The width of a head."""

declare(
    **{f"fast{i}": Word(f"channels of stage {i}", "D") for i in FAST_STAGES},
    **{f"fast{i}_out": Word(f"channels of stage {i}, behind a matrix of them", "D") for i in FAST_STAGES},
    **{f"fast{i}_mlp": Word(f"inner channels of stage {i}", "F") for i in FAST_STAGES},
    **{f"fast{i}_heads": Word(f"heads of stage {i}", "N") for i in WITH_ATTENTION},
    **{f"fast{i}_blocks": Word(f"blocks of stage {i}") for i in FAST_STAGES},
)


@dataclass(frozen=True, kw_only=True)
class FastVitConfig(TowerConfig):
    """The keys of `vision_config`. Of `model_args`, what timm's `create_model` is called with, `inference_mode` is
    needed, and `layers` and `embed_dims` are read: the blocks and the channels of each stage."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"architecture": ("fastvit_mci3",), "inference_mode": (True,)}

    hidden_size: int = 3072
    layers: tuple[int, ...] = (2, 12, 24, 4, 2)
    embed_dims: tuple[int, ...] = (96, 192, 384, 768, 1536)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        args = timm_args(raw, ("inference_mode", "layers", "embed_dims"))
        return super().from_hf({**raw, "inference_mode": False, **args})

    def contradictions(self) -> Iterator[str]:
        for name, each in (("layers", self.layers), ("embed_dims", self.embed_dims)):
            if len(each) != len(FAST_STAGES) or min(each) < 1:
                yield f"{name}={list(each)} are not {len(FAST_STAGES)} positive numbers"
                return
        if any(wide % narrow for narrow, wide in pairwise(self.embed_dims)):
            yield f"embed_dims={list(self.embed_dims)}: each must be a multiple of the one before"
        for i in WITH_ATTENTION:
            if self.embed_dims[i] % FAST_HEAD:
                yield f"embed_dims={list(self.embed_dims)}: stage {i} is no multiple of {FAST_HEAD}"
        if self.hidden_size != 2 * self.embed_dims[-1]:
            yield f"hidden_size={self.hidden_size} is not twice the last of embed_dims={list(self.embed_dims)}"

    @property
    def sizes(self) -> dict[str, Any]:
        out: dict[str, Any] = {"X": 3, "p": 3, "q": 3, "r": 7, "s": 7, "H": FAST_HEAD, "W": self.hidden_size}
        out["G"] = max(1, int(self.hidden_size / 16 + 0.5))  # as timm rounds
        for i, (depth, width) in enumerate(zip(self.layers, self.embed_dims, strict=True)):
            out |= {f"fast{i}": width, f"fast{i}_out": width, f"fast{i}_mlp": 4 * width}
            out[f"fast{i}_blocks"] = range(depth)
            if i in WITH_ATTENTION:
                out[f"fast{i}_heads"] = width // FAST_HEAD
        return out


def _convolution(name: str, param: str, layout: str) -> tuple[Map, Map]:
    """Returns the rows of a convolution and its bias, whose channels are the last axis."""
    return with_bias(f"{name}.reparam_conv", param, layout, layout.rpartition(" ")[2])


def _stage(i: int) -> Iterator[Map]:
    D, F, N = f"fast{i}", f"fast{i}_mlp", f"fast{i}_heads"
    if i:
        yield from _convolution("downsample.proj.0", "large", f"{D} 1 r s -> r s 1 {D}")
        yield from _convolution("downsample.proj.1", "point", f"{D}_out {D} 1 1 -> {D} {D}_out")
    mlp = (
        Map("mlp.conv.conv.weight", "mlp.near.kernel", f"{D} 1 r s -> r s 1 {D}"),
        *layer_norm("mlp.conv.bn", "mlp.norm", D),
        Map("mlp.conv.bn.running_mean", "mlp.norm.mean", D),
        Map("mlp.conv.bn.running_var", "mlp.norm.variance", D),
        Map("mlp.conv.bn.num_batches_tracked", "mlp.norm.batches", "", buffer=True),
        *with_bias("mlp.fc1", "mlp.up", f"{F} {D} 1 1 -> {D} {F}", F),
        *with_bias("mlp.fc2", "mlp.down", f"{D} {F} 1 1 -> {F} {D}", D),
    )
    if i not in WITH_ATTENTION:
        rows: tuple[Map, ...] = (
            *_convolution("token_mixer", "mixer", f"{D} 1 p q -> p q 1 {D}"),
            *mlp,
            Map("layer_scale.gamma", "scale", f"{D} 1 1 -> {D}"),
        )
    else:
        yield from _convolution("pos_emb", "places", f"{D} 1 r s -> r s 1 {D}")
        joined, each = " + ".join([f"({N} H)"] * 3), ", ".join([f"{D} {N} H"] * 3)
        rows = (
            *layer_norm("norm", "norm", D),
            Map("token_mixer.qkv.weight", tuple(f"attn.{x}.kernel" for x in "qkv"), f"({joined}) {D} -> {each}"),
            *with_bias("token_mixer.proj", "attn.o", f"{D} ({N} H) -> {N} H {D}", D),
            Map("layer_scale_1.gamma", "attn_scale", f"{D} 1 1 -> {D}"),
            *mlp,
            Map("layer_scale_2.gamma", "scale", f"{D} 1 1 -> {D}"),
        )
    yield from under(f"blocks.{{fast{i}_blocks}}", f"blocks.{{fast{i}_blocks}}", *rows)


FASTVIT = Tower(
    "fastvit",
    "FastVLM",
    FastVitConfig,
    (
        *_convolution("stem.0", "stem.0", "fast0 X p q -> p q X fast0"),
        *_convolution("stem.1", "stem.1", "fast0 1 p q -> p q 1 fast0"),
        *_convolution("stem.2", "stem.2", "fast0_out fast0 1 1 -> fast0 fast0_out"),
        *(row for i in FAST_STAGES for row in under(f"stages.{i}", f"stages.{i}", *_stage(i))),
        *_convolution("final_conv", "last", "W 1 p q -> p q 1 W"),
        *with_bias("final_conv.se.fc1", "gate.up", "G W 1 1 -> W G", "G"),
        *with_bias("final_conv.se.fc2", "gate.down", "W G 1 1 -> G W", "W"),
    ),
    f"{FASTVIT_MODULES}:FastVit",
)


@dataclass(frozen=True, kw_only=True)
class FastMatricesConfig(LlavaConfig):
    """The keys of the projector of FastVLM."""

    vision_feature_layer: int = -1
    vision_feature_select_strategy: str = "full"

    def check(self, tower: Any) -> None:
        for key, value in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")):
            if (given := getattr(self, key)) != value:
                raise UnsupportedConfig(f"{key}={short(given)} is not implemented", hint=TEXT_ALONE)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "A": self.out, "M": tower.hidden_size}


FAST_MATRICES = Projector(FastMatricesConfig, LLAVA_MATRICES.rows, "tpuconv.models.towers.llava.modules:LlavaMatrices")
"""Two matrices of each place."""


FAST_VISION = replace(PERCEPTION_VISION, tower=FASTVIT, projector=FAST_MATRICES, placeholder_id=151646)
"""FastVLM."""
