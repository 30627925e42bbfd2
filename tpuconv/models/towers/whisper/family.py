"""The encoder of Whisper as language models have it, and what follows it in each of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tpuconv.errors import ConfigError
from tpuconv.models.common.beside import AUDIO, Modality, Projector, ProjectorConfig, Tower, TowerConfig
from tpuconv.models.common.config import MOST_OF_A_SIZE
from tpuconv.models.common.encoder_keys import rope_keys
from tpuconv.models.towers.rows import (
    BIASED_MATRIX,
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

STEPS_PER_SECOND = 50
"""The steps of the encoder."""
WHISPER_MODULES = "tpuconv.models.towers.whisper.modules"


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(TowerConfig):
    """The keys of `audio_config`. M is the number of mel channels, P of positions, W the width of what the projector
    reads."""

    aliases: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    }

    num_mel_bins: int = 128
    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_attention_heads: int = 20
    hidden_act: str = "gelu"
    max_source_positions: int = 1500

    def contradictions(self) -> Iterator[str]:
        if self.hidden_size % max(1, self.num_attention_heads):
            yield f"hidden_size={self.hidden_size} is no multiple of {self.num_attention_heads} heads"

    @property
    def joined(self) -> int:
        """The number of steps of the encoder, one after the other, that one feature is made of."""
        return 1

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "D": self.hidden_size,
            "A": self.hidden_size,
            "N": self.num_attention_heads,
            "H": self.hidden_size // self.num_attention_heads,
            "F": self.intermediate_size,
            "L": self.num_hidden_layers,
            "M": self.num_mel_bins,
            "P": self.max_source_positions,
            "W": self.hidden_size,
            "c": 3,
        }


TWO_CONVOLUTIONS = (
    *with_bias("conv1", "convs.0", "D M c -> c M D", "D"),
    *with_bias("conv2", "convs.1", "D A c -> c A D", "D"),
)


def whisper_layers(*, key_bias: bool) -> tuple[Map, ...]:
    """Returns the rows of the layers of Whisper, of which keys may have biases."""
    keys = with_bias("self_attn.k_proj", "attn.k", IN_HEADS, "(N H) -> N H")
    return under(
        "layers.{L}",
        "layers.{L}",
        *layer_norm("self_attn_layer_norm", "attn_norm"),
        *layer_norm("final_layer_norm", "mlp_norm"),
        *with_bias("self_attn.q_proj", "attn.q", IN_HEADS, "(N H) -> N H"),
        *(keys if key_bias else keys[:1]),
        *with_bias("self_attn.v_proj", "attn.v", IN_HEADS, "(N H) -> N H"),
        *with_bias("self_attn.out_proj", "attn.o", OUT_OF_HEADS, "D"),
        *with_bias("fc1", "mlp.up", UP, "F"),
        *with_bias("fc2", "mlp.down", DOWN, "D"),
    )


WHISPER_ROWS = (
    *TWO_CONVOLUTIONS,
    Map("embed_positions.weight", "positions", "P D", buffer=True),
    *whisper_layers(key_bias=False),
    *layer_norm("layer_norm", "norm"),
)


def _whisper(name: str, models: str, encoder: str, config: type[TowerConfig] = WhisperConfig) -> Tower:
    return Tower(name, models, config, WHISPER_ROWS, f"{WHISPER_MODULES}:{encoder}")


QWEN2_AUDIO_WHISPER = _whisper("whisper_qwen2", "Qwen2-Audio", "HalvedWhisper")
FLAMINGO_WHISPER = _whisper("whisper_flamingo", "Audio Flamingo 3", "FlamingoWhisper")
MUSIC_WHISPER = _whisper("whisper_music", "Music Flamingo", "MusicWhisper")


@dataclass(frozen=True, kw_only=True)
class JoinedWhisperConfig(WhisperConfig):
    """Steps are joined up to the width `intermediate_size`."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.intermediate_size % max(1, self.hidden_size):
            yield f"intermediate_size={self.intermediate_size} is no multiple of hidden_size={self.hidden_size}"

    @property
    def joined(self) -> int:
        return self.intermediate_size // self.hidden_size

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "W": self.intermediate_size}


@dataclass(frozen=True, kw_only=True)
class VoxtralWhisperConfig(JoinedWhisperConfig):
    """The keys of Voxtral, whose sounds all have `max_source_positions` steps."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.max_source_positions % max(1, self.joined):
            yield f"max_source_positions={self.max_source_positions} is no multiple of {self.joined}"


VOXTRAL_WHISPER = _whisper("whisper_voxtral", "Voxtral", "Whisper", VoxtralWhisperConfig)


@dataclass(frozen=True, kw_only=True)
class MossWhisperConfig(WhisperConfig):
    """The keys with the defaults of MOSS."""

    num_mel_bins: int = 80
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_size: int = 1024


MOSS_WHISPER = _whisper("whisper_moss", "MOSS-Transcribe-Diarize", "MossWhisper", MossWhisperConfig)


@dataclass(frozen=True, kw_only=True)
class ChunkedWhisperConfig(WhisperConfig):
    """The keys with the defaults of transformers, which the code of MiniCPM-o has."""

    num_mel_bins: int = 80
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    hidden_size: int = 384

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.intermediate_size // 4 != self.hidden_size:
            yield f"encoder_ffn_dim={self.intermediate_size} is not 4 times d_model={self.hidden_size}"


CHUNKED_WHISPER = _whisper("whisper_chunked", "MiniCPM-o", "ChunkedWhisper", ChunkedWhisperConfig)


@dataclass(frozen=True, kw_only=True)
class GlmWhisperConfig(JoinedWhisperConfig):
    """The keys of GLM-ASR, whose encoder has rotary positions."""

    num_key_value_heads: int | None = None
    rope_theta: float = 1e4
    partial_rotary_factor: float = 0.5

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_attention_heads % max(1, self.num_key_value_heads or 1):
            yield f"num_attention_heads={self.num_attention_heads} is no multiple of {self.num_key_value_heads}"

    @property
    def sizes(self) -> dict[str, Any]:
        return {**super().sizes, "K": self.num_key_value_heads or self.num_attention_heads}


GLM_WHISPER = Tower(
    "whisper_glm",
    "GLM-ASR",
    GlmWhisperConfig,
    (
        *TWO_CONVOLUTIONS,
        *under(
            "layers.{L}",
            "layers.{L}",
            *layer_norm("input_layernorm", "attn_norm"),
            *layer_norm("post_attention_layernorm", "mlp_norm"),
            *with_bias("self_attn.q_proj", "attn.q", IN_HEADS, "(N H) -> N H"),
            *without_bias("self_attn.k_proj", "attn.k", IN_KV_HEADS),
            *with_bias("self_attn.v_proj", "attn.v", IN_KV_HEADS, "(K H) -> K H"),
            *with_bias("self_attn.o_proj", "attn.o", OUT_OF_HEADS, "D"),
            *with_bias("mlp.fc1", "mlp.up", UP, "F"),
            *with_bias("mlp.fc2", "mlp.down", DOWN, "D"),
        ),
        *layer_norm("norm", "norm"),
    ),
    f"{WHISPER_MODULES}:GlmWhisper",
)


@dataclass(frozen=True, kw_only=True)
class SoundMlpConfig(ProjectorConfig):
    """The keys of a projector of two matrices. X is the width between them."""

    has_bias: ClassVar[bool] = False
    has_norm: ClassVar[bool] = False
    wider: ClassVar[int] = 1

    projector_hidden_act: str = "gelu"

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {"O": self.out, "X": self.wider * self.out}


@dataclass(frozen=True, kw_only=True)
class GlmMlpConfig(SoundMlpConfig):
    """The same with biases, twice as wide between."""

    has_bias: ClassVar[bool] = True
    wider: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class FlamingoMlpConfig(SoundMlpConfig):
    """The same with biases if `projector_bias`."""

    projector_bias: bool = True

    @property
    def has_bias(self) -> bool:  # type: ignore[override]
        """Whether both matrices have biases."""
        return self.projector_bias


@dataclass(frozen=True, kw_only=True)
class PooledMlpConfig(SoundMlpConfig):
    """The same of MiniCPM-o, behind which features are means of `audio_pool_step` steps. Steps see the ones of their
    chunk of `audio_chunk_length` seconds and of earlier chunks; if that is not positive, all."""

    has_bias: ClassVar[bool] = True

    projector_hidden_act: str = "relu"
    audio_pool_step: int = 2
    audio_chunk_length: float = 1.0

    def check(self, tower: Any) -> None:
        super().check(tower)
        if self.audio_pool_step < 1:
            raise ConfigError(f"config.json: audio_pool_step={self.audio_pool_step}")

    @property
    def joined(self) -> int:
        """The number of steps of the encoder that one feature is made of."""
        return self.audio_pool_step

    @property
    def chunk(self) -> int:
        """The steps of a chunk; 0 if all steps see each other."""
        return max(0, int(min(self.audio_chunk_length * STEPS_PER_SECOND, MOST_OF_A_SIZE)))


@dataclass(frozen=True, kw_only=True)
class MusicMlpConfig(FlamingoMlpConfig):
    """The same of Music Flamingo, before which features turn by the time at which they are."""

    rope_theta: float = 1200.0
    partial_rotary_factor: float = 0.2
    audio_frame_step: float = 0.01

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({**outer, **rope_keys(outer)}, tower, text)


@dataclass(frozen=True, kw_only=True)
class MossMlpConfig(FlamingoMlpConfig):
    """The same of MOSS, with a norm behind it."""

    has_norm: ClassVar[bool] = True

    projector_hidden_act: str = "silu"
    audio_merge_size: int = 4
    eps: float = 1e-6

    @classmethod
    def from_hf(cls, outer: Mapping[str, Any], tower: Any, text: Any) -> Self:
        return super().from_hf({**outer, "eps": text.rms_norm_eps}, tower, text)

    def sizes(self, tower: Any) -> dict[str, Any]:
        return {**super().sizes(tower), "W": tower.hidden_size * self.audio_merge_size}

    @property
    def joined(self) -> int:
        """The number of steps of the encoder that one feature is made of."""
        return self.audio_merge_size


SOUND_MATRIX = Projector(ProjectorConfig, with_bias("linear", "matrix", "O W -> W O", "O"), BIASED_MATRIX)
"""One matrix (Qwen2-Audio)."""

_SOUND_MATRICES = (
    Map("linear_1.weight", "up.kernel", "X W -> W X"),
    Map("linear_1.bias", "up.bias", "X", when="has_bias"),
    Map("linear_2.weight", "down.kernel", "O X -> X O"),
    Map("linear_2.bias", "down.bias", "O", when="has_bias"),
    *(Map(row.hf, row.jax, row.layout, when="has_norm") for row in layer_norm("norm", "norm", "O")),
)


def _mlp(config: type[SoundMlpConfig]) -> Projector:
    return Projector(config, _SOUND_MATRICES, f"{WHISPER_MODULES}:SoundMlp")


VOXTRAL_MLP, FLAMINGO_MLP, MUSIC_MLP = _mlp(SoundMlpConfig), _mlp(FlamingoMlpConfig), _mlp(MusicMlpConfig)
GLM_MLP, MOSS_MLP = _mlp(GlmMlpConfig), _mlp(MossMlpConfig)
POOLED_MLP = Projector(
    PooledMlpConfig,
    (
        *with_bias("linear1", "up", "X W -> W X", "X"),
        *with_bias("linear2", "down", "O X -> X O", "O"),
    ),
    f"{WHISPER_MODULES}:SoundMlp",
)


VOXTRAL_AUDIO = Modality(
    AUDIO,
    VOXTRAL_WHISPER,
    VOXTRAL_MLP,
    prefix="audio_tower.",
    placeholder=("audio_token_id", "audio_token_index"),
    placeholder_id=24,
    config_key="audio_config",
)

QWEN2_AUDIO = replace(VOXTRAL_AUDIO, tower=QWEN2_AUDIO_WHISPER, projector=SOUND_MATRIX, placeholder_id=151646)

FLAMINGO_AUDIO = replace(VOXTRAL_AUDIO, tower=FLAMINGO_WHISPER, projector=FLAMINGO_MLP, placeholder_id=151669)

MUSIC_AUDIO = replace(FLAMINGO_AUDIO, tower=MUSIC_WHISPER, projector=MUSIC_MLP)

GLM_AUDIO = replace(VOXTRAL_AUDIO, tower=GLM_WHISPER, projector=GLM_MLP, placeholder_id=59260)

SPEECH_AUDIO = Modality(
    AUDIO,
    CHUNKED_WHISPER,
    POOLED_MLP,
    prefix="apm.",
    projector_prefix="audio_projection_layer.",
    placeholder=(),
    placeholder_token="<unk>",
    opening_token="<|audio_start|>",
    config_key="audio_config",
)
"""MiniCPM-o."""

MOSS_AUDIO = replace(VOXTRAL_AUDIO, tower=MOSS_WHISPER, projector=MOSS_MLP, placeholder_id=151671)
