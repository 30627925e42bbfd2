"""The ways in which multimodal families see and hear: a tower, a projector, and what stands before their names on
disk."""

from dataclasses import replace

from tpuconv.models.common.beside import VISION, Modality
from tpuconv.models.towers.projectors import POOLED
from tpuconv.models.towers.qwen_vit.family import (
    GLM_MERGER,
    GLM_VIT,
    MERGER,
    OLDER_MERGER,
    QWEN2_VIT,
    QWEN3_VIT,
    QWEN25_VIT,
    RMS_MERGER,
)
from tpuconv.models.towers.siglip.family import SIGLIP

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
