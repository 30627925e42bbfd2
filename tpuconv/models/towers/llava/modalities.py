"""The ways in which multimodal families see by the projectors of LLaVA."""

from dataclasses import replace

from tpuconv.models.common.beside import VIDEO, VISION, Modality
from tpuconv.models.towers.clip.family import CLIP, CLIP_OF_VIDEOS, NO_PROJECTOR
from tpuconv.models.towers.llava.family import (
    ALIGNER,
    LIGHTON_MATRICES,
    LLAVA_MATRICES,
    MERGING_MATRICES,
    ONEVISION_MATRICES,
    RELEASED_MERGING_MATRICES,
    TILED_MATRICES,
    VIP_LLAVA_MATRICES,
)
from tpuconv.models.towers.pixtral.family import PIXTRAL, RELEASED_PIXTRAL
from tpuconv.models.towers.sam.family import HIGH_RESOLUTION
from tpuconv.models.towers.siglip.family import SIGLIP

DEEPSEEK_VL_VISION = Modality(
    VISION,
    SIGLIP,
    ALIGNER,
    prefix="model.vision_model.",
    projector_prefix="model.aligner.",
    placeholder_id=100015,
    other_prefixes=("model.vision_model.vision_model.",),
    tower_types=("siglip_vision_model",),
)
"""DeepSeek-VL."""

DEEPSEEK_VL_HYBRID_VISION = replace(
    DEEPSEEK_VL_VISION,
    projector=HIGH_RESOLUTION,
    projector_prefix="model.",
    replaces=(*DEEPSEEK_VL_VISION.modules, *(f"high_res_vision_{part}" for part in ("model", "neck", "proj", "alpha"))),
)
"""DeepSeek-VL 7B."""

LLAVA_CLIP = Modality(
    VISION,
    CLIP,
    LLAVA_MATRICES,
    prefix="vision_tower.vision_model.",
    placeholder_id=32000,
    other_prefixes=("vision_tower.",),
    tower_types=("clip_vision_model",),
)

LLAVA_SIGLIP = replace(LLAVA_CLIP, tower=SIGLIP, tower_types=("siglip_vision_model",))

LLAVA_VISION = (
    LLAVA_CLIP,
    LLAVA_SIGLIP,
    replace(LLAVA_CLIP, tower=PIXTRAL, tower_types=("pixtral",), prefix="vision_tower.", other_prefixes=()),
)
"""LLaVA, whose releases have one of several towers."""

VIP_LLAVA_VISION = (replace(LLAVA_CLIP, projector=VIP_LLAVA_MATRICES),)
"""ViP-LLaVA."""

VIDEO_LLAVA_VISION = (
    replace(LLAVA_CLIP, prefix="image_tower.vision_model.", other_prefixes=("image_tower.",)),
    replace(
        LLAVA_CLIP,
        part=VIDEO,
        tower=CLIP_OF_VIDEOS,
        projector=NO_PROJECTOR,
        prefix="video_tower.vision_model.",
        projector_prefix="",
        placeholder=("video_token_id", "video_token_index"),
        placeholder_id=32001,
        other_prefixes=("video_tower.",),
    ),
)
"""Video-LLaVA, which has a tower for images and one for videos."""

_WITH_NEWLINE = (*LLAVA_CLIP.modules, "image_newline")

LLAVA_NEXT_VISION = tuple(
    replace(each, projector=TILED_MATRICES, projector_prefix="", replaces=_WITH_NEWLINE)
    for each in (LLAVA_CLIP, LLAVA_SIGLIP)
)
"""LLaVA-NeXT."""

LLAVA_NEXT_VIDEO_VISION = tuple(replace(each, placeholder_id=32001) for each in LLAVA_NEXT_VISION)
"""The images of LLaVA-NeXT-Video."""

ONEVISION_VISION = tuple(
    replace(each, projector=ONEVISION_MATRICES, projector_prefix="", replaces=_WITH_NEWLINE, placeholder_id=151646)
    for each in (LLAVA_SIGLIP, LLAVA_CLIP)
)
"""LLaVA-OneVision."""


MISTRAL3_VISION = Modality(
    VISION, PIXTRAL, MERGING_MATRICES, prefix="vision_tower.", placeholder_id=10, tower_types=("pixtral",)
)
"""Mistral Small 3.1 and later."""

MISTRAL_LARGE4_VISION = replace(
    MISTRAL3_VISION,
    tower=RELEASED_PIXTRAL,
    projector=RELEASED_MERGING_MATRICES,
    prefix="vision_encoder.",
    projector_prefix="",
    replaces=("vision_encoder", "pre_mm_projector_norm", "patch_merger", "vision_language_adapter"),
)
"""Mistral Large 4."""

LIGHTON_VISION = replace(
    MISTRAL3_VISION,
    projector=LIGHTON_MATRICES,
    prefix="model.vision_encoder.",
    projector_prefix="model.vision_projection.",
    placeholder_id=151655,
)
"""LightOnOCR."""
