"""The ways in which multimodal families see by the encoder of Qwen-VL."""

from dataclasses import replace

from tpuconv.models.common.beside import VISION, Modality
from tpuconv.models.towers.qwen_vit.family import (
    EXAONE_VIT,
    GLM5_VIT,
    GLM_MERGER,
    GLM_OCR_VIT,
    GLM_VIT,
    HYPERCLOVA_VIT,
    MERGED_MATRIX,
    MERGER,
    OLDER_MERGER,
    QWEN2_VIT,
    QWEN3_OMNI_VIT,
    QWEN3_VIT,
    QWEN25_OMNI_VIT,
    QWEN25_VIT,
    RMS_MERGER,
)

QWEN3_VISION = Modality(
    VISION, QWEN3_VIT, MERGER, prefix="model.visual.", projector_prefix="model.visual.merger.", placeholder_id=151655
)
"""Qwen3-VL."""

QWEN35_VISION = replace(QWEN3_VISION, placeholder_id=248056, defaults={"deepstack_visual_indexes": []})
"""Qwen3.5."""

QWEN25_VISION = replace(
    QWEN3_VISION, tower=QWEN25_VIT, projector=RMS_MERGER, prefix="visual.", projector_prefix="visual.merger."
)
"""Qwen2.5-VL."""

OPENCUA_VISION = replace(
    QWEN25_VISION,
    prefix="vision_tower.",
    projector_prefix="vision_tower.merger.",
    placeholder=("image_token_id", "media_placeholder_token_id"),
    placeholder_id=151664,
)

QWEN2_VISION = replace(QWEN25_VISION, tower=QWEN2_VIT, projector=OLDER_MERGER)
"""Qwen2-VL."""

GLM_VISION = replace(QWEN3_VISION, tower=GLM_VIT, projector=GLM_MERGER, placeholder_id=151343)
"""GLM-4V."""

QWEN3_OMNI_VISION = replace(
    QWEN3_VISION,
    tower=QWEN3_OMNI_VIT,
    projector=OLDER_MERGER,
    prefix="thinker.visual.",
    projector_prefix="thinker.visual.merger.",
    replaces=("thinker.visual",),
)

QWEN25_OMNI_VISION = replace(QWEN3_OMNI_VISION, tower=QWEN25_OMNI_VIT, projector=RMS_MERGER)

EXAONE_VISION = replace(
    QWEN25_VISION, tower=EXAONE_VIT, prefix="model.visual.", projector_prefix="model.visual.merger.", placeholder_id=67
)
"""EXAONE 4.5."""

HYPERCLOVA_VISION = Modality(
    VISION,
    HYPERCLOVA_VIT,
    MERGED_MATRIX,
    prefix="model.vision_model.",
    projector_prefix="model.vision_projector",
    replaces=("vision_model", "vision_projector", "projector"),
    other_parts={".vision_projector": ".projector"},
    placeholder_id=128060,
)
"""HyperCLOVA X SEED Think."""

GLM_OCR_VISION = replace(GLM_VISION, tower=GLM_OCR_VIT, placeholder_id=59280)
"""GLM-OCR."""

GLM5_VISION = replace(GLM_VISION, tower=GLM5_VIT, placeholder_id=154854)
"""GLM-5.3."""

COSMOS3_VISION = replace(
    QWEN3_VISION,
    prefix="",
    projector_prefix="merger.",
    replaces=("visual", "blocks", "patch_embed", "deepstack_merger_list", "pos_embed", "merger"),
    other_prefixes=("model.visual.",),
)
"""Cosmos 3."""

COMPASS_VISION = replace(QWEN3_VISION, placeholder_id=255031)
"""North Micro Vision."""
