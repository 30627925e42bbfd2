"""The encoders of Inkling and Inkling 2: configs and tables, with the names of the authors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import ceil, prod
from typing import Any, ClassVar, Self

import numpy as np

from tpuconv.models.common.beside import AUDIO, VISION, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.packed_vit.family import CLIP_KEYS
from tpuconv.models.towers.qwen_vit.family import QwenVitConfig
from tpuconv.models.towers.rows import (
    DOWN,
    IN_HEADS,
    OUT_OF_HEADS,
    UP,
    layer_norm,
    rms_norm,
    with_bias,
    without_bias,
)
from tpuconv.notation.table import Map, under

INKLING_MODULES = "tpuconv.models.towers.inkling.modules"
MOST_LAYERS = 64
"""The largest number of layers of a folding encoder."""

LARGEST_SIDE = 1 << 12
"""The largest number of frames, pixels and channels of a patch."""

FoldedSize = tuple[int, int, int, int]
"""Frames, rows, columns and channels of what one vector stands for."""


def prime_factors(number: int) -> list[int]:
    """Returns the prime factors, the largest first."""
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found[::-1]


@cache
def folded_sizes(frames: int, side: int, layers: int, channels: int) -> tuple[FoldedSize, ...]:
    """Returns what a vector stands for before the first layer and behind each, of a patch of frames x side x side x
    channels: first rows and columns are folded, then frames, by their prime factors. Layers take the folds that are
    nearest to equal steps of a logarithmic scale, all different ones where there are fewer layers than folds
    (transformers' `plan_out_scales`)."""
    sides, times = (np.cumprod(prime_factors(number)).tolist() for number in (side, frames))
    most = sides[-1] if sides else 1
    known: list[FoldedSize] = [
        (1, 1, 1, channels),
        *((1, s, s, ceil(s * s * channels / 64) * 64) for s in sides),
        *((t, most, most, most * most * channels * t * 64) for t in times),
    ]
    ideal = np.linspace(0, np.log(np.float32(side * side * frames * channels)), layers + 1, dtype=np.float32)
    reached = np.log(np.array([prod(fold[:3]) for fold in known], np.float32))
    cost = np.abs(ideal[:, None] - reached)
    if layers >= len(known):
        chosen = cost.argmin(axis=1)
    else:
        from scipy.optimize import linear_sum_assignment

        chosen = linear_sum_assignment(cost)[1]
    return tuple(known[i] for i in (0, *chosen[1:-1], len(known) - 1))


@dataclass(frozen=True, kw_only=True)
class FoldingConfig(TowerConfig):
    """The keys of `vision_config` of Inkling. A and E are the widths of a layer's input and output, I are the layers
    with a norm, J is the last one, whose output has the width of the text."""

    aliases: ClassVar[Mapping[str, str]] = {"n_layers": "num_hidden_layers"}

    patch_size: int = 40
    temporal_patch_size: int = 2
    num_channels: int = 3
    num_hidden_layers: int = 24

    def contradictions(self) -> Iterator[str]:
        shape = self.temporal_patch_size, self.patch_size, self.num_channels
        if not 0 < self.num_hidden_layers <= MOST_LAYERS or min(shape) < 1 or max(shape) > LARGEST_SIDE:
            yield f"num_hidden_layers={self.num_hidden_layers} of patches of {shape} frames, pixels a side and channels"
            return
        for before, behind in pairwise(self.folds):
            if any(more % less for less, more in zip(before[:3], behind[:3], strict=True)):
                yield f"{behind[:3]} is not made of whole blocks of {before[:3]}"

    @property
    def folds(self) -> tuple[FoldedSize, ...]:
        """The frames, rows, columns and channels of a vector, before the first layer and behind each."""
        return folded_sizes(self.temporal_patch_size, self.patch_size, self.num_hidden_layers, self.num_channels)

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """For each layer how many frames it folds, and how many rows and columns."""
        return tuple((behind[0] // before[0], behind[1] // before[1]) for before, behind in pairwise(self.folds))

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        """The widths of each layer."""
        return {
            layer: {"A": before[3] * t * s * s, "E": behind[3]}
            for layer, ((before, behind), (t, s)) in enumerate(zip(pairwise(self.folds), self.steps, strict=True))
        }

    @property
    def sizes(self) -> dict[str, Any]:
        last = self.num_hidden_layers - 1
        return {"L": last + 1, "I": tuple(range(last)), "J": (last,), **self.layer_sizes[last]}


@dataclass(frozen=True, kw_only=True)
class BinsConfig(TowerConfig):
    """The keys of `audio_config` of Inkling. Z counts the bins of all mel frequencies."""

    aliases: ClassVar[Mapping[str, str]] = {"num_codebooks": "n_mel_bins", "codebook_size": "mel_vocab_size"}

    n_mel_bins: int = 80
    mel_vocab_size: int = 256

    @property
    def sizes(self) -> dict[str, Any]:
        return {"Z": self.n_mel_bins * self.mel_vocab_size}


FOLDING_MLP = Tower(
    "folding_mlp",
    "Inkling",
    FoldingConfig,
    (
        *without_bias("layers.linear_{I}", "layers.{I}.matrix", "E A -> A E"),
        *without_bias("layers.linear_{J}", "layers.{J}.matrix", "O A -> A O"),
        *rms_norm("layers.norm_{I}", "layers.{I}.norm", "E"),
    ),
    f"{INKLING_MODULES}:FoldingMLP",
)

MEL_BINS = Tower(
    "mel_bins", "Inkling", BinsConfig, (Map("encoder.weight", "table", "Z O"),), f"{INKLING_MODULES}:MelBins"
)

LAST_NORM = Projector(ProjectorConfig, rms_norm("final_norm", "norm", "O"), f"{INKLING_MODULES}:FeatureNorm")
"""A norm."""


@dataclass(frozen=True, kw_only=True)
class InklingVitConfig(QwenVitConfig):
    """The keys of `vision_config` of Inkling 2. Each image has a class token."""

    aliases: ClassVar[Mapping[str, str]] = {
        **CLIP_KEYS,
        "native_patch_size": "patch_size",
        "adapter_merge_size": "spatial_merge_size",
    }

    depth: int = 23
    hidden_size: int = 1024
    num_heads: int = 16
    intermediate_size: int | None = None  # type: ignore[assignment]
    mlp_ratio: float = 4.0
    patch_size: int = 20
    temporal_patch_size: int = 1
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    posemb_grid_size: int = 32

    @property
    def positions(self) -> int:
        return self.posemb_grid_size**2

    @property
    def sizes(self) -> dict[str, Any]:
        width = int(self.hidden_size * self.mlp_ratio) if self.intermediate_size is None else self.intermediate_size
        return {**super().sizes, "F": width}


@dataclass(frozen=True, kw_only=True)
class InklingMergerConfig(ProjectorConfig):
    """The keys of `vision_config` that the projector of Inkling 2 reads."""

    projection_hidden_dim: int = 4096
    projector_bias: bool = False

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf(outer.get("vision_config") or {}, tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "W": self.projection_hidden_dim}


INKLING_VIT = Tower(
    "inkling_vit",
    "Inkling 2",
    InklingVitConfig,
    under(
        "backbone",
        "",
        *without_bias("embeddings.patch_embedding", "patch", "D C -> C D"),
        Map("embeddings.position_embedding", "positions", "P D"),
        Map("embeddings.class_embedding", "class_token", "D"),
        Map("embeddings.cls_position_embedding", "class_position", "D"),
        *layer_norm("ln_pre", "norm"),
        *under(
            "layers.{L}",
            "layers.{L}",
            *layer_norm("ln_1", "attn_norm"),
            *layer_norm("ln_2", "mlp_norm"),
            *(row for x in "qkv" for row in with_bias(f"self_attn.{x}_proj", f"attn.{x}", IN_HEADS, "(N H) -> N H")),
            *with_bias("self_attn.out_proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.c_fc", "mlp.up", UP, "F"),
            *with_bias("mlp.c_proj", "mlp.down", DOWN, "D"),
            Map("ls_1.gamma", "attn_scale", "D"),
            Map("ls_2.gamma", "mlp_scale", "D"),
        ),
    ),
    f"{INKLING_MODULES}:InklingVit",
)

INKLING_MERGER = Projector(
    InklingMergerConfig,
    (
        Map("proj_in.weight", "up.kernel", "W M -> M W"),
        Map("proj_in.bias", "up.bias", "W", when="projector_bias"),
        Map("proj_out.weight", "down.kernel", "O W -> W O"),
        Map("proj_out.bias", "down.bias", "O", when="projector_bias"),
    ),
    f"{INKLING_MODULES}:InklingMerger",
)
"""Two matrices of s x s patches."""


INKLING_VISION = Modality(
    VISION,
    FOLDING_MLP,
    LAST_NORM,
    prefix="model.visual.",
    projector_prefix="model.visual.",
    replaces=("visual", "vision_tower"),
    placeholder_id=200054,
)
"""Inkling."""

INKLING2_VISION = replace(INKLING_VISION, tower=INKLING_VIT, projector=INKLING_MERGER)
"""Inkling 2."""

INKLING_AUDIO = Modality(
    AUDIO,
    MEL_BINS,
    LAST_NORM,
    prefix="model.audio.",
    projector_prefix="model.audio.",
    replaces=("audio", "audio_tower"),
    placeholder=("audio_token_id",),
    placeholder_id=200053,
    config_key="audio_config",
)
"""Inkling."""
