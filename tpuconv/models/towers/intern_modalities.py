"""How the InternVL models see: InternViT with the names of transformers and with the names of the authors."""

from dataclasses import replace

from tpuconv.models.common.beside import VISION, Modality
from tpuconv.models.towers.intern_vit.family import (
    INTERN_VIT,
    INTERNVL_SHUFFLED,
    RELEASED_INTERN_VIT,
    RELEASED_SHUFFLED,
    SHUFFLED,
)

INTERNVL_VISION = Modality(
    VISION, INTERN_VIT, SHUFFLED, prefix="vision_tower.", placeholder_id=151667, tower_types=("internvl_vision",)
)
"""InternVL in the form of transformers."""

QIANFAN_VISION = replace(
    INTERNVL_VISION,
    tower=RELEASED_INTERN_VIT,
    projector=RELEASED_SHUFFLED,
    prefix="vision_model.",
    projector_prefix="mlp1.",
    defaults={"attention_bias": True},
    tower_types=("qianfan_ocr_vision",),
)
"""Qianfan-OCR."""

INTERNVL_CHAT_VISION = replace(
    QIANFAN_VISION,
    projector=INTERNVL_SHUFFLED,
    defaults={},
    placeholder_id=None,
    placeholder_token="<IMG_CONTEXT>",
    tower_types=("intern_vit_6b",),
)
"""InternVL with the names of the authors."""
