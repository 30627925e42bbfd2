"""The audio encoders of Qwen-Omni and Qwen3-ASR: layers of Whisper on chunks of sound. Configs and tables."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpuconv.models.common.beside import Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.towers.rows import layer_norm, with_bias, without_bias
from tpuconv.models.towers.whisper.family import TWO_CONVOLUTIONS, VOXTRAL_AUDIO, WhisperConfig, whisper_layers
from tpuconv.notation.table import Map

QWEN_AUDIO_MODULES = "tpuconv.models.towers.qwen_audio.modules"


def halved(length: Any, times: int) -> Any:
    """Returns the length of what convolutions of three taps with a stride of two make of a length; 0 of 0."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


@dataclass(frozen=True, kw_only=True)
class Qwen25AudioConfig(WhisperConfig):
    """The keys of Qwen2.5-Omni. A chunk has 2 `n_window` frames."""

    n_window: int = 100

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if not self.n_window:
            yield "n_window=0 makes no chunks"


QWEN25_AUDIO = Tower(
    "qwen25_audio",
    "Qwen2.5-Omni",
    Qwen25AudioConfig,
    (
        *TWO_CONVOLUTIONS,
        *whisper_layers(key_bias=False),
        *layer_norm("ln_post", "norm"),
    ),
    f"{QWEN_AUDIO_MODULES}:Qwen25Audio",
)


@dataclass(frozen=True, kw_only=True)
class SoundEndConfig(ProjectorConfig):
    """The sizes of the projector of Qwen2.5-Omni: z is the number of vectors."""

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "z": 2}


SOUND_END = Projector(
    SoundEndConfig,
    (
        *with_bias("proj", "matrix", "O W -> W O", "O"),
        Map("audio_bos_eos_token.weight", "ends", "z O"),
    ),
    f"{QWEN_AUDIO_MODULES}:SoundEnd",
)
"""A matrix, and vectors for the begin and the end of a sound that nothing reads."""


@dataclass(frozen=True, kw_only=True)
class Qwen3AudioConfig(WhisperConfig):
    """The keys of Qwen3-Omni. C is the number of channels of the convolutions, M of mel channels after them."""

    n_window: int = 50
    n_window_infer: int = 800
    downsample_hidden_size: int = 480

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if halved(2 * self.n_window, 3) != 13:  # the reference counts 13 for every chunk
            yield f"n_window={self.n_window} does not make chunks of 13 features"
        elif self.n_window_infer < 2 * self.n_window:
            yield f"n_window_infer={self.n_window_infer} is less than a chunk of {2 * self.n_window} frames"

    @property
    def sizes(self) -> dict[str, Any]:
        channels = self.downsample_hidden_size
        return {**super().sizes, "C": channels, "E": channels, "M": halved(self.num_mel_bins, 3), "p": 3, "q": 3}


@dataclass(frozen=True, kw_only=True)
class Qwen3AsrConfig(Qwen3AudioConfig):
    """The keys with the defaults of Qwen3-ASR."""

    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_size: int = 1024


def _qwen3_audio(name: str, models: str, config: type[TowerConfig], encoder: str) -> Tower:
    rows = (
        *with_bias("conv2d1", "convs.0", "C 1 p q -> q p 1 C", "C"),
        *with_bias("conv2d2", "convs.1", "C E p q -> q p E C", "C"),
        *with_bias("conv2d3", "convs.2", "C E p q -> q p E C", "C"),
        *without_bias("conv_out", "entry", "D (C M) -> M C D"),
        *whisper_layers(key_bias=True),
        *layer_norm("ln_post", "norm"),
    )
    return Tower(name, models, config, rows, f"{QWEN_AUDIO_MODULES}:{encoder}")


QWEN3_AUDIO = _qwen3_audio("qwen3_audio", "Qwen3-Omni", Qwen3AudioConfig, "Qwen3Audio")
QWEN3_ASR = _qwen3_audio("qwen3_asr_audio", "Qwen3-ASR", Qwen3AsrConfig, "Qwen3AsrAudio")


def _two_matrices(first: str, second: str) -> Projector:
    rows = (*with_bias(first, "up", "A D -> D A", "A"), *with_bias(second, "down", "O A -> A O", "O"))
    return Projector(ProjectorConfig, rows, f"{QWEN_AUDIO_MODULES}:SoundEnds")


QWEN3_SOUND_ENDS, QWEN3_ASR_ENDS = _two_matrices("proj1", "proj2"), _two_matrices("linear_1", "linear_2")


QWEN3_OMNI_AUDIO = replace(
    VOXTRAL_AUDIO,
    tower=QWEN3_AUDIO,
    projector=QWEN3_SOUND_ENDS,
    prefix="thinker.audio_tower.",
    projector_prefix="thinker.audio_tower.",
    replaces=("thinker.audio_tower",),
    placeholder_id=151646,
)

QWEN25_OMNI_AUDIO = replace(QWEN3_OMNI_AUDIO, tower=QWEN25_AUDIO, projector=SOUND_END)

QWEN3_ASR_AUDIO = replace(
    VOXTRAL_AUDIO,
    tower=QWEN3_ASR,
    projector=QWEN3_ASR_ENDS,
    prefix="model.audio_tower.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=151676,
)
