"""The ways in which models see by SAM, alone or first; see `tpuconv.models.towers.modalities`."""

from dataclasses import replace

from tpuconv.models.common.beside import VISION, Modality
from tpuconv.models.towers.deepseek_ocr.family import ENDED_MATRIX, OCR_CLIP, OCR_DECODER, SEPARATED_MATRIX
from tpuconv.models.towers.deepseek_ocr.released import CLIP_TYPE, DECODER_TYPE
from tpuconv.models.towers.sam.family import GOT_SAM, UPSAMPLER

GOT_VISION = Modality(VISION, GOT_SAM, UPSAMPLER, prefix="vision_tower.", placeholder_id=151859)
"""GOT-OCR 2.0."""

DEEPSEEK_OCR2_VISION = Modality(
    VISION,
    OCR_DECODER,
    SEPARATED_MATRIX,
    prefix="model.",
    projector_prefix="model.",
    replaces=(
        *("sam_model", "qwen2_model", "projector", "view_seperator"),
        *("vision_tower", "multi_modal_projector", "view_separator"),
    ),
    placeholder_id=128815,
    tower_types=(DECODER_TYPE,),
)
"""DeepSeek-OCR 2."""

DEEPSEEK_OCR_VISION = replace(
    DEEPSEEK_OCR2_VISION,
    tower=OCR_CLIP,
    projector=ENDED_MATRIX,
    replaces=("sam_model", "vision_model", "projector", "image_newline", "view_seperator"),
    tower_types=(CLIP_TYPE,),
)
"""DeepSeek-OCR."""
