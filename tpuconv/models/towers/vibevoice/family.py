"""The encoders of VibeVoice-ASR (arXiv:2508.19205): stages of causal convolutions on samples, in two encoders that read
the same samples. Config and table.

Letters: a stage has C channels before it and E behind, with c taps between, and blocks of the width D and the inner
width F, with p taps of each channel. W and V are the widths of the acoustic and the semantic features; M is O. Words
number the blocks of each stage.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

from tpuconv.jsonfile import short
from tpuconv.models.common.beside import AUDIO, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.key_types import object_of
from tpuconv.models.towers.rows import DOWN, UP, rms_norm, with_bias
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

VIBEVOICE_MODULES = "tpuconv.models.towers.vibevoice.modules"

VOICE_ENCODERS: Mapping[str, tuple[str, int]] = {"acoustic": ("I", 64), "semantic": ("J", 128)}
"""The encoders, the letter of the stages of each, and the width of its features where no key says it."""
MOST_STAGES = 12
"""The most stages behind the stem that the table has rows for; the release has 6."""

declare(
    **{
        f"{name}{i}": Word(f"blocks of stage {i} of the {name} encoder")
        for name in VOICE_ENCODERS
        for i in range(MOST_STAGES + 1)
    }
)


@dataclass(frozen=True, kw_only=True)
class VoiceEncoderConfig(TowerConfig):
    """The keys of `acoustic_tokenizer_encoder_config`, or of `semantic_tokenizer_encoder_config`."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"channels": (1,)}

    hidden_size: int = 64
    kernel_size: int = 7
    rms_norm_eps: float = 1e-5
    num_filters: int = 32
    downsampling_ratios: tuple[int, ...] = (2, 2, 4, 5, 5, 8)
    depths: tuple[int, ...] = (3, 3, 3, 3, 3, 3, 8)
    hidden_act: str = "gelu"
    ffn_expansion: int = 4

    def contradictions(self) -> Iterator[str]:
        ratios, depths = self.downsampling_ratios, self.depths
        if not 1 <= len(ratios) <= MOST_STAGES or min(ratios) < 1:
            yield f"downsampling_ratios={short(list(ratios))} are not 1 to {MOST_STAGES} positive numbers"
        elif len(depths) != len(ratios) + 1 or min(depths) < 0:
            yield f"depths={short(list(depths))} are not of {len(ratios) + 1} stages"
        if self.kernel_size < 1:
            yield f"kernel_size={self.kernel_size}"

    @property
    def samples(self) -> int:
        """The number of samples that one feature is made of."""
        return prod(self.downsampling_ratios)

    @property
    def sizes(self) -> dict[str, Any]:
        return self.stage_sizes["stem"]

    @property
    def stage_sizes(self) -> dict[str, dict[str, int]]:
        """The sizes of each stage, and of the convolution behind them, by the names of their modules."""
        widths = [self.num_filters * 2**i for i in range(len(self.depths))]
        stages = {f"stages.{i}": (widths[i], widths[i + 1], 2 * x) for i, x in enumerate(self.downsampling_ratios)}
        all_of = {"stem": (1, widths[0], self.kernel_size), **stages}
        head = {"C": widths[-1], "E": self.hidden_size, "c": self.kernel_size}
        return {
            name: {"C": before, "E": behind, "c": taps}
            | {"p": self.kernel_size, "D": behind, "F": self.ffn_expansion * behind}
            for name, (before, behind, taps) in all_of.items()
        } | {"head": head}


@dataclass(frozen=True, kw_only=True)
class VibeVoiceConfig(TowerConfig):
    """The keys of both encoders, and the samples of a sound that are encoded at once."""

    acoustic: VoiceEncoderConfig
    semantic: VoiceEncoderConfig
    acoustic_tokenizer_chunk_size: int = 1_440_000

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        each = {
            name: VoiceEncoderConfig.from_hf({"hidden_size": width, **object_of(raw, config_key_of(name))})
            for name, (_, width) in VOICE_ENCODERS.items()
        }
        return super().from_hf({**raw, **each})

    def contradictions(self) -> Iterator[str]:
        samples, chunk = self.acoustic.samples, self.acoustic_tokenizer_chunk_size
        if self.semantic.samples != samples:
            yield f"a feature is made of {samples} samples in one encoder, of {self.semantic.samples} in the other"
        elif not chunk or chunk % samples:
            yield f"acoustic_tokenizer_chunk_size={chunk} is no multiple of {samples} samples"

    @property
    def module_sizes(self) -> Mapping[str, Mapping[str, int]]:
        """The sizes of each stage."""
        return {
            f"{name}.{stage}": sizes
            for name in VOICE_ENCODERS
            for stage, sizes in getattr(self, name).stage_sizes.items()
        }

    @property
    def sizes(self) -> dict[str, Any]:
        out: dict[str, Any] = {**self.acoustic.sizes, "W": self.acoustic.hidden_size, "V": self.semantic.hidden_size}
        for name, (stages, _) in VOICE_ENCODERS.items():
            depths = getattr(self, name).depths
            out[stages] = len(depths) - 1
            out |= {f"{name}{i}": range(depths[i] if i < len(depths) else 0) for i in range(MOST_STAGES + 1)}
        return out


def config_key_of(encoder: str) -> str:
    """Returns the key of config.json that has the config of an encoder."""
    return f"{encoder}_tokenizer_encoder_config"


VIBEVOICE_KEYS = (*map(config_key_of, VOICE_ENCODERS), "acoustic_tokenizer_chunk_size")
"""The keys beside `text_config`."""


def with_one_audio_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parsed config.json of VibeVoice-ASR with the keys of both encoders in one object, `audio_config`."""
    return {**raw, "audio_config": {key: raw[key] for key in VIBEVOICE_KEYS if key in raw}}


def _blocks(hf: str, jax: str, number: str) -> tuple[Map, ...]:
    return under(
        f"{hf}.stage.{{{number}}}",
        f"{jax}.blocks.{{{number}}}",
        *rms_norm("norm", "norm"),
        *with_bias("mixer.conv", "mixer", "D 1 p -> p D", "D"),
        Map("gamma", "scale", "D"),
        *rms_norm("ffn_norm", "mlp_norm"),
        *with_bias("ffn.linear1", "up", UP, "F"),
        *with_bias("ffn.linear2", "down", DOWN, "D"),
        Map("ffn_gamma", "mlp_scale", "D"),
    )


def _encoder(name: str, stages: str) -> tuple[Map, ...]:
    layout = "E C c -> c C E"
    return under(
        f"{name}_tokenizer_encoder",
        name,
        *with_bias("stem.conv.conv", "stem.conv", layout, "E"),
        *_blocks("stem", "stem", f"{name}0"),
        *with_bias(f"conv_layers.{{{stages}}}.conv.conv", f"stages.{{{stages}}}.conv", layout, "E"),
        *(row for i in range(MOST_STAGES) for row in _blocks(f"conv_layers.{i}", f"stages.{i}", f"{name}{i + 1}")),
        *with_bias("head.conv", "head", layout, "E"),
    )


VIBEVOICE = Tower(
    "vibevoice",
    "VibeVoice-ASR",
    VibeVoiceConfig,
    tuple(row for name, (stages, _) in VOICE_ENCODERS.items() for row in _encoder(name, stages)),
    f"{VIBEVOICE_MODULES}:VibeVoice",
)


class SumConfig(ProjectorConfig):
    """The width of the text, which is that between the matrices too."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "M": self.out}


SUM_OF_FEATURES = Projector(
    SumConfig,
    tuple(
        row
        for name, width in (("acoustic", "W"), ("semantic", "V"))
        for row in (
            *with_bias(f"{name}_linear_1", f"{name}.first", f"M {width} -> {width} M", "M"),
            *rms_norm(f"{name}_norm", f"{name}.norm", "M"),
            *with_bias(f"{name}_linear_2", f"{name}.last", "O M -> M O", "O"),
        )
    ),
    f"{VIBEVOICE_MODULES}:SumOfFeatures",
)
"""Two matrices and a norm between them for the features of each encoder, whose sum is read."""

VIBEVOICE_AUDIO = Modality(
    AUDIO,
    VIBEVOICE,
    SUM_OF_FEATURES,
    prefix="model.",
    projector_prefix="model.multi_modal_projector.",
    replaces=(*(f"{name}_tokenizer_encoder" for name in VOICE_ENCODERS), "multi_modal_projector"),
    placeholder=("audio_token_id",),
    placeholder_id=151648,
    config_key="audio_config",
)
