"""The audio encoder of Muse Spark: four stages of causal convolutions on samples. Config and table.

The stages have letters of their own: of their widths, of the widths of their MLPs, and of their blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

from tpuconv.models.common.beside import AUDIO, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import rms_norm, with_bias
from tpuconv.notation.table import Map, under

MUSE_AUDIO_MODULES = "tpuconv.models.towers.muse_audio.modules"
STAGE_WIDTHS, STAGE_MLPS, STAGE_PATCHES, STAGE_BLOCKS = "CEGK", "FMWX", "pqrs", "IJfl"


@dataclass(frozen=True, kw_only=True)
class MuseAudioConfig(TowerConfig):
    """The keys of `audio_config`."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"num_hidden_layers": (4,)}

    patch_sizes: tuple[int, ...] = (16, 6, 5, 4)
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (2, 2, 2, 2)
    mlp_ratio: int | float = 4.0
    conv_kernel_size: int = 7
    hidden_act: str = "gelu"
    rms_norm_eps: float = 1e-6

    def contradictions(self) -> Iterator[str]:
        for key in ("patch_sizes", "hidden_sizes", "depths"):
            if len(values := getattr(self, key)) != 4 or min(values) < 1:
                yield f"{key}={list(values)} are not 4 positive numbers"

    @property
    def samples(self) -> int:
        """The number of samples that one feature is made of."""
        return prod(self.patch_sizes)

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            **dict(zip(STAGE_WIDTHS, self.hidden_sizes, strict=True)),
            **{x: int(size * self.mlp_ratio) for x, size in zip(STAGE_MLPS, self.hidden_sizes, strict=True)},
            **dict(zip(STAGE_PATCHES, self.patch_sizes, strict=True)),
            **dict(zip(STAGE_BLOCKS, self.depths, strict=True)),
            "c": self.conv_kernel_size,
        }


def _stage(stage: int) -> tuple[Map, ...]:
    width, mlp, patch, block = (x[stage] for x in (STAGE_WIDTHS, STAGE_MLPS, STAGE_PATCHES, STAGE_BLOCKS))
    before = f"({patch} {STAGE_WIDTHS[stage - 1]})" if stage else patch
    return under(
        f"layers.{stage}",
        f"stages.{stage}",
        *with_bias("patch_embedder.proj", "patch", f"{width} {before} -> {before} {width}", width),
        *rms_norm("patch_embedder.norm", "norm", width),
        *under(
            f"conv_blocks.{{{block}}}",
            f"blocks.{{{block}}}",
            Map("conv.weight", "kernel", f"{width} 1 c -> c {width}"),
            Map("conv.bias", "bias", width),
            *rms_norm("norm", "norm", width),
            *with_bias("mlp.fc1", "up", f"{mlp} {width} -> {width} {mlp}", mlp),
            *with_bias("mlp.fc2", "down", f"{width} {mlp} -> {mlp} {width}", width),
        ),
    )


MUSE_AUDIO_ENCODER = Tower(
    "muse_audio",
    "Muse Spark",
    MuseAudioConfig,
    (*(row for stage in range(4) for row in _stage(stage)), *rms_norm("norm", "norm", "K")),
    f"{MUSE_AUDIO_MODULES}:MuseAudio",
)


@dataclass(frozen=True, kw_only=True)
class NormedSoundConfig(ProjectorConfig):
    """The eps of the text model, by which features are normalized as embeddings are."""

    embed_eps: float = 1e-5

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({**outer, "embed_eps": text.rms_norm_eps}, tower, text)


NORMED_SOUND = Projector(
    NormedSoundConfig,
    (*with_bias("proj", "matrix", "O K -> K O", "O"), *rms_norm("post_proj_norm", "norm", "O")),
    f"{MUSE_AUDIO_MODULES}:NormedSound",
)
"""A matrix and two norms, of which the second has no scale."""


MUSE_AUDIO = Modality(
    AUDIO,
    MUSE_AUDIO_ENCODER,
    NORMED_SOUND,
    prefix="model.audio_tower.",
    projector_prefix="model.audio_tower.",
    placeholder=("audio_token_id",),
    placeholder_id=200038,
    config_key="audio_config",
)
