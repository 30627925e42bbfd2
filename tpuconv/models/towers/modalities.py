"""The ways in which multimodal families see and hear: a tower, a projector, and what stands before their names on
disk."""

from dataclasses import replace

from tpuconv.models.common.beside import AUDIO, VISION, Modality
from tpuconv.models.towers.gemma4.family import FRAMES, GEMMA4_VIT, NORMED_MATRIX, PATCHES, USM
from tpuconv.models.towers.llama4.family import LLAMA4_MATRIX, LLAMA4_VIT
from tpuconv.models.towers.moonvit.family import MOON_MERGER, MOONVIT, MUSE_ADAPTER, MUSE_SPARK_VIT, MUSE_VIT
from tpuconv.models.towers.muse_audio.family import MUSE_AUDIO_ENCODER, NORMED_SOUND
from tpuconv.models.towers.projectors import POOLED
from tpuconv.models.towers.qwen_audio.family import (
    QWEN3_ASR,
    QWEN3_ASR_ENDS,
    QWEN3_AUDIO,
    QWEN3_SOUND_ENDS,
    QWEN25_AUDIO,
    SOUND_END,
)
from tpuconv.models.towers.qwen_vit.family import (
    GLM_MERGER,
    GLM_VIT,
    MERGER,
    OLDER_MERGER,
    QWEN2_VIT,
    QWEN3_OMNI_VIT,
    QWEN3_VIT,
    QWEN25_OMNI_VIT,
    QWEN25_VIT,
    RMS_MERGER,
)
from tpuconv.models.towers.sanm.family import SANM, SANM_ADAPTOR
from tpuconv.models.towers.siglip.family import SIGLIP
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

GEMMA3_VISION = Modality(
    VISION,
    SIGLIP,
    POOLED,
    prefix="vision_tower.vision_model.",
    projector_prefix="multi_modal_projector.",
    replaces=("vision_tower", "multi_modal_projector"),
    placeholder=("image_token_index", "image_token_id"),
    placeholder_id=262144,
    other_prefixes=("vision_tower.",),
)

GEMMA4_VISION = Modality(
    VISION,
    GEMMA4_VIT,
    NORMED_MATRIX,
    prefix="model.vision_tower.",
    projector_prefix="model.embed_vision.",
    replaces=("vision_tower", "embed_vision"),
    placeholder_id=258880,
)

GEMMA4_AUDIO = Modality(
    AUDIO,
    USM,
    NORMED_MATRIX,
    prefix="model.audio_tower.",
    projector_prefix="model.embed_audio.",
    replaces=("audio_tower", "embed_audio"),
    placeholder=("audio_token_id",),
    placeholder_id=258881,
    config_key="audio_config",
)

GEMMA4_PATCHES = replace(
    GEMMA4_VISION, tower=PATCHES, prefix="model.vision_embedder.", replaces=("vision_embedder", "embed_vision")
)
"""Gemma 4 without encoders."""

GEMMA4_FRAMES = replace(GEMMA4_AUDIO, tower=FRAMES, replaces=("embed_audio",))
"""Gemma 4 without encoders."""

QWEN3_VISION = Modality(
    VISION,
    QWEN3_VIT,
    MERGER,
    prefix="model.visual.",
    projector_prefix="model.visual.merger.",
    replaces=("visual",),
    placeholder_id=151655,
)
"""Qwen3-VL."""

QWEN35_VISION = replace(QWEN3_VISION, placeholder_id=248056, defaults={"deepstack_visual_indexes": []})
"""Qwen3.5."""

QWEN25_VISION = replace(
    QWEN3_VISION,
    tower=QWEN25_VIT,
    projector=RMS_MERGER,
    prefix="visual.",
    projector_prefix="visual.merger.",
)
"""Qwen2.5-VL."""

QWEN2_VISION = replace(QWEN25_VISION, tower=QWEN2_VIT, projector=OLDER_MERGER)
"""Qwen2-VL."""

GLM_VISION = replace(QWEN3_VISION, tower=GLM_VIT, projector=GLM_MERGER, placeholder_id=151343)
"""GLM-4V."""

LLAMA4_VISION = Modality(
    VISION,
    LLAMA4_VIT,
    LLAMA4_MATRIX,
    prefix="vision_model.",
    projector_prefix="multi_modal_projector.",
    replaces=("vision_model", "multi_modal_projector"),
    placeholder_id=200092,
)

KIMI_VISION = Modality(
    VISION,
    MOONVIT,
    MOON_MERGER,
    prefix="vision_tower.",
    projector_prefix="mm_projector.",
    replaces=("vision_tower", "mm_projector"),
    placeholder=("image_token_id", "media_placeholder_token_id"),
    placeholder_id=163605,
    other_prefixes=("vision_tower.encoder.",),
)

MUSE_VISION = Modality(
    VISION,
    MUSE_VIT,
    MUSE_ADAPTER,
    prefix="model.vision_tower.",
    projector_prefix="model.",
    replaces=("vision_tower", "vision_adapter", "vision_projection", "perception_emb_norm"),
    placeholder_id=200092,
)

MUSE_SPARK_VISION = replace(MUSE_VISION, tower=MUSE_SPARK_VIT)

MUSE_AUDIO = Modality(
    AUDIO,
    MUSE_AUDIO_ENCODER,
    NORMED_SOUND,
    prefix="model.audio_tower.",
    projector_prefix="model.audio_tower.",
    replaces=("audio_tower",),
    placeholder=("audio_token_id",),
    placeholder_id=200038,
    config_key="audio_config",
)

VOXTRAL_AUDIO = Modality(
    AUDIO,
    VOXTRAL_WHISPER,
    VOXTRAL_MLP,
    prefix="audio_tower.",
    projector_prefix="multi_modal_projector.",
    replaces=("audio_tower", "multi_modal_projector"),
    placeholder=("audio_token_id", "audio_token_index"),
    placeholder_id=24,
    config_key="audio_config",
)

QWEN2_AUDIO = replace(VOXTRAL_AUDIO, tower=QWEN2_AUDIO_WHISPER, projector=SOUND_MATRIX, placeholder_id=151646)

FLAMINGO_AUDIO = replace(VOXTRAL_AUDIO, tower=FLAMINGO_WHISPER, projector=FLAMINGO_MLP, placeholder_id=151669)

MUSIC_AUDIO = replace(FLAMINGO_AUDIO, tower=MUSIC_WHISPER, projector=MUSIC_MLP)

GLM_AUDIO = replace(VOXTRAL_AUDIO, tower=GLM_WHISPER, projector=GLM_MLP, placeholder_id=59260)

MOSS_AUDIO = replace(VOXTRAL_AUDIO, tower=MOSS_WHISPER, projector=MOSS_MLP, placeholder_id=151671)

QWEN3_OMNI_VISION = replace(
    QWEN3_VISION,
    tower=QWEN3_OMNI_VIT,
    projector=OLDER_MERGER,
    prefix="thinker.visual.",
    projector_prefix="thinker.visual.merger.",
    replaces=("thinker.visual",),
)

QWEN3_OMNI_AUDIO = replace(
    VOXTRAL_AUDIO,
    tower=QWEN3_AUDIO,
    projector=QWEN3_SOUND_ENDS,
    prefix="thinker.audio_tower.",
    projector_prefix="thinker.audio_tower.",
    replaces=("thinker.audio_tower",),
    placeholder_id=151646,
)

QWEN25_OMNI_VISION = replace(QWEN3_OMNI_VISION, tower=QWEN25_OMNI_VIT, projector=RMS_MERGER)

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
