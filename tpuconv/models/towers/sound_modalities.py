"""The ways in which multimodal families hear: an encoder, a projector, and what stands before their names on disk."""

from dataclasses import replace

from tpuconv.models.common.beside import AUDIO, Modality
from tpuconv.models.towers.conformer.family import CONFORMER
from tpuconv.models.towers.gemma4.family import FRAMES, NORMED_MATRIX, USM
from tpuconv.models.towers.inkling.family import LAST_NORM, MEL_BINS
from tpuconv.models.towers.muse_audio.family import MUSE_AUDIO_ENCODER, NORMED_SOUND
from tpuconv.models.towers.phi4.family import PHI4_CONFORMER, PHI4_SOUND_ENDS
from tpuconv.models.towers.phi4.released import RELEASED_HEADS
from tpuconv.models.towers.qformer.family import QFORMER
from tpuconv.models.towers.qwen_audio.family import (
    QWEN3_ASR,
    QWEN3_ASR_ENDS,
    QWEN3_AUDIO,
    QWEN3_SOUND_ENDS,
    QWEN25_AUDIO,
    SOUND_END,
)
from tpuconv.models.towers.sanm.family import SANM, SANM_ADAPTOR
from tpuconv.models.towers.whisper.family import (
    FLAMINGO_MLP,
    FLAMINGO_WHISPER,
    GLM_MLP,
    GLM_WHISPER,
    MOSS_MLP,
    MOSS_WHISPER,
    MUSIC_MLP,
    MUSIC_WHISPER,
    QWEN2_AUDIO_WHISPER,
    SOUND_MATRIX,
    VOXTRAL_MLP,
    VOXTRAL_WHISPER,
)

GEMMA4_AUDIO = Modality(
    AUDIO,
    USM,
    NORMED_MATRIX,
    prefix="model.audio_tower.",
    projector_prefix="model.embed_audio.",
    placeholder=("audio_token_id",),
    placeholder_id=258881,
    config_key="audio_config",
)

GEMMA4_FRAMES = replace(GEMMA4_AUDIO, tower=FRAMES, replaces=("embed_audio",))
"""Gemma 4 without encoders."""

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

MOSS_AUDIO = replace(VOXTRAL_AUDIO, tower=MOSS_WHISPER, projector=MOSS_MLP, placeholder_id=151671)

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

FUN_AUDIO = replace(
    VOXTRAL_AUDIO,
    tower=SANM,
    projector=SANM_ADAPTOR,
    prefix="model.audio_tower.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=151646,
)

GRANITE_AUDIO = Modality(
    AUDIO,
    CONFORMER,
    QFORMER,
    prefix="encoder.",
    projector_prefix="projector.",
    placeholder=("audio_token_id", "audio_token_index"),
    placeholder_id=49155,
    config_key="encoder_config",
)
"""Granite Speech."""

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

PHI4_AUDIO = Modality(
    AUDIO,
    PHI4_CONFORMER,
    PHI4_SOUND_ENDS,
    prefix="model.embed_tokens_extend.audio_embed.encoder.",
    projector_prefix="model.embed_tokens_extend.audio_embed.",
    replaces=("embed_tokens_extend.audio_embed",),
    placeholder=("audio_token_id",),
    placeholder_id=200011,
    config_key="audio_config",
    other_parts=RELEASED_HEADS,
)
