"""The ways in which Gemma 3n sees and hears."""

from dataclasses import replace

from tpuconv.models.towers.gemma3n.family import GEMMA3N_USM, IMAGE_EMBEDDER, SOUND_EMBEDDER
from tpuconv.models.towers.gemma4.family import GEMMA4_AUDIO, GEMMA4_VISION
from tpuconv.models.towers.mobilenet.family import MOBILENET

GEMMA3N_VISION = replace(
    GEMMA4_VISION,
    tower=MOBILENET,
    projector=IMAGE_EMBEDDER,
    prefix="model.vision_tower.timm_model.",
    placeholder_id=262145,
    tower_types=("gemma3n_vision",),
)

GEMMA3N_AUDIO = replace(GEMMA4_AUDIO, tower=GEMMA3N_USM, projector=SOUND_EMBEDDER, placeholder_id=262273)
