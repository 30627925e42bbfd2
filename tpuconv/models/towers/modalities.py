"""The ways in which multimodal families see: a tower, a projector, and what stands before their names on disk."""

from dataclasses import replace

from tpuconv.models.common.beside import VISION, Modality
from tpuconv.models.towers.blip.family import BLIP_VIT, IMAGE_QFORMER
from tpuconv.models.towers.gemma4.family import GEMMA4_VIT, NORMED_MATRIX, PATCHES
from tpuconv.models.towers.granite_docling.family import CONNECTOR, DOCLING_VIT
from tpuconv.models.towers.inkling.family import FOLDING_MLP, INKLING_MERGER, INKLING_VIT, LAST_NORM
from tpuconv.models.towers.intern_vit.family import (
    GATED,
    NORMED_GATED,
)
from tpuconv.models.towers.janus.family import JANUS_ALIGNER, JANUS_VIT
from tpuconv.models.towers.llama4.family import LLAMA4_MATRIX, LLAMA4_VIT
from tpuconv.models.towers.llava.family import (
    ALIGNER,
    LIGHTON_MATRICES,
    MERGING_MATRICES,
    READOUT,
    RELEASED_MERGING_MATRICES,
)
from tpuconv.models.towers.minicpm.family import CANVAS_VIT, MARKED_ROUNDS, MINICPM_VIT, ROUNDS
from tpuconv.models.towers.moonvit.family import (
    MOON_MATRICES,
    MOON_MERGER,
    MOON_MERGER2,
    MOONVIT,
    MOONVIT2,
    MUSE_ADAPTER,
    MUSE_VIT,
)
from tpuconv.models.towers.navit.family import JOINED_MATRIX, LEARNED_QUERIES, NAVIT, OLDER_NAVIT, PERCEIVER
from tpuconv.models.towers.ovis.family import OVIS_VIT, VISUAL_WORDS
from tpuconv.models.towers.packed_vit.family import (
    EDGE_VIT,
    ENDED_ROWS,
    FRAMED_ROWS,
    HUNYUAN_VIT,
    HY_VIT,
    MINIMAX_VIT,
    TWICE,
    WIDE_MERGER,
)
from tpuconv.models.towers.packed_vit.gated_family import GATED_VIT, NORMED_MERGER
from tpuconv.models.towers.phi4.family import PHI4_IMAGE_ENDS, PHI4_VIT
from tpuconv.models.towers.phi4.released import RELEASED_VECTORS
from tpuconv.models.towers.pixtral.family import PIXTRAL, RELEASED_PIXTRAL
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
from tpuconv.models.towers.sam.family import HIGH_RESOLUTION
from tpuconv.models.towers.siglip.family import POOLED, PROMPT_MATRIX, SIGLIP
from tpuconv.models.towers.siglip2.family import BLOCK_MATRICES, PADDLE_MATRICES, PADDLE_VIT, SIGLIP2, VIDEO_LLAMA_VIT
from tpuconv.models.towers.step_vit.family import STEP_MATRIX, STEP_VIT

GEMMA3_VISION = Modality(
    VISION,
    SIGLIP,
    POOLED,
    prefix="vision_tower.vision_model.",
    placeholder=("image_token_index", "image_token_id"),
    placeholder_id=262144,
    other_prefixes=("vision_tower.",),
)

PALIGEMMA_VISION = replace(GEMMA3_VISION, projector=PROMPT_MATRIX, placeholder_id=256000)

GEMMA4_VISION = Modality(
    VISION,
    GEMMA4_VIT,
    NORMED_MATRIX,
    prefix="model.vision_tower.",
    projector_prefix="model.embed_vision.",
    placeholder_id=258880,
)

GEMMA4_PATCHES = replace(
    GEMMA4_VISION,
    tower=PATCHES,
    prefix="model.vision_embedder.",
    other_parts={"vision_embedder.": "embed_vision.", "embed_vision.": "embed_vision.multimodal_embedder."},
)
"""Gemma 4 without encoders."""

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

LLAMA4_VISION = Modality(VISION, LLAMA4_VIT, LLAMA4_MATRIX, prefix="vision_model.", placeholder_id=200092)

KIMI_VISION = Modality(
    VISION,
    MOONVIT,
    MOON_MERGER,
    prefix="vision_tower.",
    projector_prefix="mm_projector.",
    placeholder=("image_token_id", "media_placeholder_token_id"),
    placeholder_id=163605,
    other_prefixes=("vision_tower.encoder.",),
)

KIMI_VL_VISION = replace(KIMI_VISION, projector=MOON_MATRICES, projector_prefix="multi_modal_projector.")
"""Kimi-VL: its frames are images."""

KIMI_K3_VISION = replace(KIMI_VISION, tower=MOONVIT2, projector=MOON_MERGER2, other_prefixes=())

MUSE_VISION = Modality(
    VISION,
    MUSE_VIT,
    MUSE_ADAPTER,
    prefix="model.vision_tower.",
    projector_prefix="model.",
    replaces=("vision_tower", "vision_adapter", "vision_projection", "perception_emb_norm"),
    placeholder_id=200092,
)

QWEN3_OMNI_VISION = replace(
    QWEN3_VISION,
    tower=QWEN3_OMNI_VIT,
    projector=OLDER_MERGER,
    prefix="thinker.visual.",
    projector_prefix="thinker.visual.merger.",
    replaces=("thinker.visual",),
)

QWEN25_OMNI_VISION = replace(QWEN3_OMNI_VISION, tower=QWEN25_OMNI_VIT, projector=RMS_MERGER)

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

AYA_VISION = replace(GEMMA3_VISION, projector=NORMED_GATED, placeholder_id=255036)
"""Aya Vision."""

COMMAND_A_VISION = replace(AYA_VISION, projector=GATED)
"""Command A Vision."""

IDEFICS3_VISION = Modality(
    VISION,
    NAVIT,
    JOINED_MATRIX,
    prefix="model.vision_model.",
    projector_prefix="model.connector.",
    placeholder_id=128257,
)
"""Idefics 3 and SmolVLM."""

IDEFICS2_VISION = replace(IDEFICS3_VISION, tower=OLDER_NAVIT, projector=PERCEIVER, placeholder_id=32001)
"""Idefics 2."""

ARIA_VISION = Modality(
    VISION,
    NAVIT,
    LEARNED_QUERIES,
    prefix="vision_tower.",
    placeholder_id=9,
    other_prefixes=("vision_tower.vision_model.",),
    tower_types=("idefics3_vision", "idefics3_vision_model", "aria_vision_model"),
)
"""Aria."""

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

BLIP2_VISION = Modality(
    VISION,
    BLIP_VIT,
    IMAGE_QFORMER,
    prefix="vision_model.",
    projector_prefix="",
    replaces=("vision_model", "query_tokens", "qformer", "language_projection"),
    placeholder_id=50265,
)
"""BLIP-2."""

JANUS_VISION = Modality(
    VISION,
    JANUS_VIT,
    JANUS_ALIGNER,
    prefix="model.vision_model.",
    projector_prefix="model.aligner.",
    placeholder_id=100581,
)
"""Janus Pro."""

LFM2_VISION = Modality(
    VISION,
    SIGLIP2,
    BLOCK_MATRICES,
    prefix="model.vision_tower.vision_model.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=396,
    other_prefixes=("model.vision_tower.",),
    tower_types=("siglip2_vision_model",),
)
"""LFM2-VL."""

LFM3_VISION = Modality(
    VISION,
    GATED_VIT,
    NORMED_MERGER,
    prefix="model.vision_tower.",
    projector_prefix="model.multi_modal_projector.",
    placeholder_id=125030,
)
"""LFM3-VL."""

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

COSMOS3_EDGE_VISION = replace(
    QWEN3_VISION,
    tower=EDGE_VIT,
    projector=WIDE_MERGER,
    projector_prefix="model.projector.",
    placeholder_id=19,
    # transformers renames these layers as the text's when it saves them.
    other_parts={**{f".{x}_proj.": f".to_{x}." for x in "qkv"}, **{".fc1.": ".up_proj.", ".fc2.": ".down_proj."}},
)
"""Cosmos 3 Edge."""

HY4_VISION = Modality(
    VISION,
    HY_VIT,
    ENDED_ROWS,
    prefix="vit.",
    projector_prefix="vit.perceive.",
    replaces=("vit", "vision_tower"),
    placeholder_id=120120,
)
"""Hy4-VL."""

HUNYUAN_VISION = replace(HY4_VISION, tower=HUNYUAN_VIT, projector=FRAMED_ROWS)
"""Hunyuan-VL."""

MINIMAX_VISION = Modality(
    VISION,
    MINIMAX_VIT,
    TWICE,
    prefix="vision_tower.vision_model.",
    projector_prefix="",
    replaces=("vision_tower", "multi_modal_projector", "patch_merge_mlp"),
    placeholder_id=200025,
)
"""MiniMax-M3."""

STEP_VISION = Modality(
    VISION,
    STEP_VIT,
    STEP_MATRIX,
    prefix="vision_model.",
    projector_prefix="vit_large_projector",
    replaces=("vision_model", "vit_large_projector", "multi_modal_projector"),
    placeholder_id=151679,
)
"""Step-3.7."""

COMPASS_VISION = replace(QWEN3_VISION, placeholder_id=255031)
"""North Micro Vision."""

PADDLE_VISION = Modality(
    VISION,
    PADDLE_VIT,
    PADDLE_MATRICES,
    prefix="visual.vision_model.",
    projector_prefix="mlp_AR.",
    replaces=("visual", "mlp_AR", "projector"),
    other_parts={"mlp_AR.": "model.projector."},
    placeholder_id=100295,
    unused=("head.*", "embeddings.packing_position_embedding.*"),
)
"""PaddleOCR-VL."""

VIDEO_LLAMA3_VISION = Modality(
    VISION,
    VIDEO_LLAMA_VIT,
    READOUT,
    prefix="model.vision_model.",
    projector_prefix="model.projector.",
    placeholder_id=151655,
)
"""VideoLLaMA 3."""

MINICPM_VISION = Modality(VISION, MINICPM_VIT, ROUNDS, prefix="model.vision_tower.", projector_prefix="model.merger.")
"""MiniCPM-V 4.6 and MiniCPM-OCR."""

MINICPM47_VISION = replace(MINICPM_VISION, tower=CANVAS_VIT, projector=MARKED_ROUNDS)
"""MiniCPM-V 4.7."""

DOCLING_VISION = Modality(
    VISION,
    DOCLING_VIT,
    CONNECTOR,
    prefix="model.vision_model.",
    projector_prefix="model.",
    replaces=("vision_model", "density_router"),
    placeholder_id=100337,
)
"""Granite for Docling."""

OVIS_VISION = Modality(
    VISION,
    OVIS_VIT,
    VISUAL_WORDS,
    prefix="model.vision_tower.",
    projector_prefix="model.visual_embeddings_table",
    placeholder_id=151665,
)
"""Ovis 2."""

INKLING_VISION = Modality(
    VISION,
    FOLDING_MLP,
    LAST_NORM,
    prefix="model.visual.",
    projector_prefix="model.visual.",
    replaces=("visual", "vision_tower"),
    placeholder_id=200054,
)
"""Inkling."""

INKLING2_VISION = replace(INKLING_VISION, tower=INKLING_VIT, projector=INKLING_MERGER)
"""Inkling 2."""

PHI4_VISION = Modality(
    VISION,
    PHI4_VIT,
    PHI4_IMAGE_ENDS,
    prefix="model.embed_tokens_extend.image_embed.img_processor.",
    projector_prefix="model.embed_tokens_extend.image_embed.",
    replaces=("embed_tokens_extend.image_embed",),
    placeholder=("image_token_id",),
    placeholder_id=200010,
    other_parts=RELEASED_VECTORS,
)
