"""How each type of model writes an image or a sound. A prompt has a marker for each; instead of it the text has
placeholders. transformers' processors of many models do not load without torchvision, which their videos need; this
table does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpuconv.jsonfile import Each, Optional, Range
from tpuconv.models.common.beside import AUDIO, VISION
from tpuconv.models.media_texts import (
    FRAME_MASKS,
    GEMMA_IMAGE,
    ItemWriter,
    MediaItem,
    aria,
    as_the_processor,
    aya,
    by_block,
    by_grid,
    by_patch,
    command_a,
    deepseek_ocr,
    deepseek_ocr2,
    framed,
    gemma4,
    gemma4_sound,
    glm_sound,
    granite4,
    granite_docling,
    hunyuan,
    idefics3,
    in_paragraph,
    internvl,
    lfm2,
    lighton,
    llama4,
    llava,
    llava_next,
    merged_patch,
    musicflamingo,
    nemotron_image,
    nemotron_sound,
    onevision,
    phi4_image,
    phi4_sound,
    pixtral,
    qwen2_sound,
    qwen3_sound,
    single,
    voxtral,
)
from tpuconv.models.registry import type_of_family
from tpuconv.models.towers.parakeet.released import NEMOTRON_OMNI_TYPES

IMAGE, SOUND = "image", "sound"
PART_OF_KIND = {IMAGE: VISION, SOUND: AUDIO}
"""The part of a model that takes it."""

FEW, NONE_OR_FEW = Optional((Range(1, 1 << 20), None)), Optional((Range(0, 1 << 20), None))
PROCESSOR_KEYS = {
    **dict.fromkeys(("image_seq_length", "image_seq_len", "num_image_tokens", "num_query_tokens"), FEW),
    **dict.fromkeys(
        ("audio_seq_length", "patch_size", "spatial_merge_size", "n_window", "img_size", "downsample_factor"), FEW
    ),
    "num_additional_image_tokens": NONE_OR_FEW,
    "vision_feature_select_strategy": Optional((str, None)),
    "vision_aspect_ratio": Optional((str, None)),
    "downsample_rate": Optional((str, None)),
    "size_conversion": Optional((Each(Range(1, 1 << 20)), None)),
    "pixel_shuffle_ratio": Optional((float, None)),
    "cat_extra_token": Optional((bool, None)),
}
"""The schema of processor_config.json: only these keys are read."""


@dataclass(frozen=True)
class Placeholder:
    """How one kind of image or sound is written.

    Attributes:
        write: returns the text that stands in place of the marker.
        tokens: the special tokens that it is made of, unless the tokenizer gives another one under the same name. The
            first is the marker.
        call: arguments of the image processor or feature extractor, which go before its settings.
        renamed: features that the model takes under another name.
        frames: the features of a sound are cut into pieces of so many frames; None where they are not.
        windows: sounds are cut before into pieces as long as the feature extractor takes.
        spare: features that no model takes, beside the ones in `COUNTS`.
        nested: the image processor is given the images of a prompt as one of several lists.
        frame: what chat templates write before and after the marker; a prompt without markers gets it too.
        begin: the name of the token that stands behind the last image, where most models have it before the text.
        leading: `begin` stands behind the images that a text begins with instead, if it is not in the text.
        end: what stands at the end of a prompt with images.
        patch: returns the pixels of a side of a patch that the image processor is to take instead of its setting.
        numbered: a pattern of further markers in the prompts of releases, such as numbered ones: `<|image_1|>`.
        processor: the class of transformers that takes the settings of a processor which is code of the release.
        has_settings: whether the class has the settings of the release by default, which may have no file of them.
    """

    write: ItemWriter
    tokens: Mapping[str, str]
    call: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    frames: int | None = None
    windows: bool = False
    spare: tuple[str, ...] = ()
    nested: bool = False
    frame: tuple[str, str] = ("", "")
    begin: str = ""
    leading: bool = False
    end: str = ""
    patch: Callable[[MediaItem], int] | None = None
    numbered: str = ""
    processor: str = ""
    has_settings: bool = False

    @property
    def marker(self) -> str:
        """The name of the token that stands for an image or sound in a prompt."""
        return next(iter(self.tokens))


def _row(write: ItemWriter, **tokens: str) -> Placeholder:
    return Placeholder(write, tokens)


QWEN_IMAGE = Placeholder(by_grid, {"image_token": "<|image_pad|>"}, frame=("<|vision_start|>", "<|vision_end|>"))
GLM_IMAGE = Placeholder(by_grid, {"image_token": "<|image|>"}, frame=("<|begin_of_image|>", "<|end_of_image|>"))
LLAVA_TOKEN = {"image_token": "<image>"}
PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
INTERNVL_TOKENS = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
}
QIANFAN_IMAGE = Placeholder(
    internvl, {"image_placeholder_token": "<image>"} | INTERNVL_TOKENS, call={"crop_to_patches": True}
)
INTERNVL_CHAT_IMAGE = replace(
    QIANFAN_IMAGE, call={**QIANFAN_IMAGE.call, "max_patches": 12}, processor="GotOcr2ImageProcessorPil"
)
IDEFICS_IMAGE = Placeholder(
    idefics3,
    LLAVA_TOKEN | {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
    call={"return_row_col_info": True},
)
DEEPSEEK_IMAGE = _row(framed("", "", 576, key="num_image_tokens"), image_token="<image_placeholder>")
OCR2_IMAGE = Placeholder(deepseek_ocr2, LLAVA_TOKEN, call={"crop_to_patches": True, "min_patches": 2, "max_patches": 6})
INKLING_TOKEN, INKLING_FRAME = {"image_token": "<|unused_200054|>"}, ("<|content_image|>", "")
INKLING2_IMAGE = Placeholder(by_block, INKLING_TOKEN, frame=INKLING_FRAME)
PHI4_IMAGE = Placeholder(phi4_image, {"image_token": "<|image|>"}, spare=("num_img_tokens",))
PHI4_SOUND = Placeholder(phi4_sound, {"audio_token": "<|audio|>"})
GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
MASKED = {"return_attention_mask": True, "padding": "max_length"}
MASK, INPUT_MASK = ({"attention_mask": name} for name in FRAME_MASKS)
WINDOWS = {"return_attention_mask": True}
UNCUT = {"return_attention_mask": True, "padding": True, "truncation": False}
NEMOTRON_IMAGE = Placeholder(
    nemotron_image,
    LLAVA_TOKEN | {"image_start_token": "<img>", "image_end_token": "</img>"},
    processor="NemotronH_Omni_Reasoning_V3ImageProcessor",
)
NEMOTRON_SOUND = Placeholder(
    nemotron_sound,
    {"audio_token": "<so_embedding>", "audio_start_token": "<so_start>", "audio_end_token": "<so_end>"},
    renamed=INPUT_MASK,
    processor="ParakeetFeatureExtractor",
)

PLACEHOLDERS: Mapping[tuple[str, str], Placeholder] = {
    ("gemma3", IMAGE): Placeholder(
        GEMMA_IMAGE,
        {"boi_token": GEMMA_TOKENS["boi_token"]} | GEMMA_TOKENS,
        call={"do_convert_rgb": True, "do_pan_and_scan": False},
    ),
    ("gemma3n", IMAGE): Placeholder(GEMMA_IMAGE, GEMMA_TOKENS),
    ("paligemma", IMAGE): Placeholder(
        as_the_processor, LLAVA_TOKEN | {"bos_token": "<bos>"}, begin="bos_token", end="\n"
    ),
    ("blip-2", IMAGE): Placeholder(
        framed("", "", 32, key="num_query_tokens"), LLAVA_TOKEN | {"bos_token": "</s>"}, begin="bos_token"
    ),
    ("mllama", IMAGE): Placeholder(
        single,
        {"image_token": "<|image|>", "bos_token": "<|begin_of_text|>"},
        spare=("num_tiles",),
        nested=True,
        begin="bos_token",
        leading=True,
    ),
    ("gemma3n", SOUND): _row(
        in_paragraph(framed("boa_token", "eoa_token", 188, kind="audio", key="audio_seq_length")),
        audio_token="<audio_soft_token>",
        boa_token="<start_of_audio>",
        eoa_token="<end_of_audio>",
    ),
    ("gemma4", IMAGE): _row(gemma4, image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>"),
    ("gemma4", SOUND): _row(gemma4_sound, audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>"),
    **{
        (name, IMAGE): QWEN_IMAGE
        for name in (
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
            *("qwen3_omni_moe", "exaone4_5", "hyperclovax_vision_v2", "video_llama_3", "cosmos3_edge", "mimo_v2"),
            "intern_s2_preview",
        )
    },
    **{(name, IMAGE): replace(QWEN_IMAGE, processor="PaddleOCRVLImageProcessorPil") for name in ("Keye", "KeyeVL1_5")},
    ("qwen2_5_omni", IMAGE): Placeholder(
        by_grid, {"image_token": "<|IMAGE|>"}, frame=("<|vision_bos|>", "<|vision_eos|>")
    ),
    ("qwen2_5_omni", SOUND): Placeholder(qwen2_sound, {"audio_token": "<|AUDIO|>"}, MASKED, MASK),
    ("qwen2_audio", SOUND): Placeholder(qwen2_sound, {"audio_token": "<|AUDIO|>"}, MASKED, MASK),
    ("qwen3_omni_moe", SOUND): Placeholder(
        qwen3_sound,
        {"audio_token": "<|audio_pad|>"},
        UNCUT,
        MASK,
        frame=("<|audio_start|>", "<|audio_end|>"),
    ),
    ("qwen3_asr", SOUND): Placeholder(
        qwen3_sound,
        {"audio_token": "<|audio_pad|>"},
        UNCUT,
        INPUT_MASK,
        frame=("<|audio_start|>", "<|audio_end|>"),
    ),
    ("audioflamingo3", SOUND): Placeholder(qwen2_sound, {"audio_token": "<sound>"}, WINDOWS, INPUT_MASK, windows=True),
    ("musicflamingo", SOUND): Placeholder(
        musicflamingo,
        {"audio_token": "<sound>", "audio_bos_token": "<|sound_bos|>", "audio_eos_token": "<|sound_eos|>"},
        WINDOWS,
        INPUT_MASK,
        windows=True,
    ),
    ("glmasr", SOUND): Placeholder(glm_sound, {"audio_token": "<|pad|>"}, WINDOWS, INPUT_MASK, windows=True),
    **{(name, IMAGE): GLM_IMAGE for name in ("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr", "glm5_next")},
    ("cohere_compass", IMAGE): _row(by_grid, image_token="<|IMAGE_PAD|>"),
    ("paddleocr_vl", IMAGE): _row(by_grid, image_token="<|IMAGE_PLACEHOLDER|>"),
    ("ernie4_5_vl_moe", IMAGE): Placeholder(
        by_grid,
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        frame=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        numbered=r"<\|image@placeholder\|>",
    ),
    ("kimi_k25", IMAGE): _row(by_grid, image_token="<|media_pad|>"),
    ("kimi_vl", IMAGE): _row(by_grid, image_token="<|media_pad|>"),
    ("opencua", IMAGE): _row(by_grid, image_token="<|media_placeholder|>"),
    ("dots_ocr", IMAGE): Placeholder(by_grid, {"image_token": "<|imgpad|>"}, frame=("<|img|>", "<|endofimg|>")),
    ("hunyuan_vl", IMAGE): Placeholder(
        hunyuan,
        {"image_token": "<｜hy_place▁holder▁no▁102｜>"},
        frame=("<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"),
    ),
    ("llava", IMAGE): Placeholder(llava, LLAVA_TOKEN),
    **{(name, IMAGE): Placeholder(llava, LLAVA_TOKEN) for name in ("vipllava", "fast_vlm")},
    ("llava_next", IMAGE): Placeholder(llava_next, LLAVA_TOKEN, call={"do_pad": True}),
    ("granite4_vision", IMAGE): Placeholder(granite4, LLAVA_TOKEN, call={"do_pad": True}),
    ("llava_onevision", IMAGE): Placeholder(onevision, LLAVA_TOKEN, nested=True),
    ("aria", IMAGE): Placeholder(aria, {"image_token": "<|img|>"}, call={"max_image_size": 980, "split_image": False}),
    ("granite_docling", IMAGE): Placeholder(granite_docling, IDEFICS_IMAGE.tokens),
    ("lfm2_vl", IMAGE): Placeholder(
        lfm2,
        LLAVA_TOKEN
        | {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
        | {"image_thumbnail_token": "<|img_thumbnail|>"},
        call={"return_row_col_info": True},
        spare=("image_rows", "image_cols", "image_sizes"),
    ),
    ("pixtral", IMAGE): Placeholder(pixtral, PIXTRAL_TOKENS, patch=merged_patch),
    ("lighton_ocr", IMAGE): Placeholder(lighton, PIXTRAL_TOKENS, call={"do_pad": True}),
    **{
        (name, IMAGE): Placeholder(internvl, INTERNVL_TOKENS, call={"crop_to_patches": True})
        for name in ("internvl", "interns1")
    },
    ("qianfan_ocr", IMAGE): QIANFAN_IMAGE,
    ("internvl_chat", IMAGE): INTERNVL_CHAT_IMAGE,
    ("skywork_chat", IMAGE): INTERNVL_CHAT_IMAGE,
    ("aya_vision", IMAGE): Placeholder(
        aya,
        LLAVA_TOKEN
        | {"img_patch_token": "<|IMG_PATCH|>", "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"}
        | {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"},
        call={"crop_to_patches": True},
    ),
    ("inkling_mm_model", IMAGE): Placeholder(by_patch, INKLING_TOKEN, frame=INKLING_FRAME),
    ("inkling2", IMAGE): INKLING2_IMAGE,
    ("inkling2_loop", IMAGE): INKLING2_IMAGE,
    ("phi4_multimodal", IMAGE): PHI4_IMAGE,
    ("phi4_multimodal", SOUND): PHI4_SOUND,
    ("phi4mm", IMAGE): replace(
        PHI4_IMAGE,
        tokens={"image_token": "<|endoftext10|>"},
        numbered=r"<\|image_\d+\|>",
        processor="Phi4MultimodalImageProcessor",
    ),
    ("phi4mm", SOUND): replace(
        PHI4_SOUND,
        tokens={"audio_token": "<|endoftext11|>"},
        numbered=r"<\|audio_\d+\|>",
        processor="Phi4MultimodalFeatureExtractor",
    ),
    ("cohere2_vision", IMAGE): _row(
        command_a,
        image_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
    ),
    ("idefics3", IMAGE): IDEFICS_IMAGE,
    ("smolvlm", IMAGE): IDEFICS_IMAGE,
    ("llama4", IMAGE): Placeholder(
        llama4,
        {
            **{"image_token": "<|image|>", "patch_token": "<|patch|>"},
            **{"start_of_image_token": "<|image_start|>", "end_of_image_token": "<|image_end|>"},
            "tile_x_separator_token": "<|tile_x_separator|>",
            "tile_y_separator_token": "<|tile_y_separator|>",
        },
        call={"return_tensors": "pt"},  # otherwise tiles are not one after the other
    ),
    ("deepseek_ocr2", IMAGE): OCR2_IMAGE,
    ("deepseek_vl_v2", IMAGE): replace(OCR2_IMAGE, processor="DeepseekOcr2ImageProcessor", has_settings=True),
    ("deepseek_ocr", IMAGE): Placeholder(
        deepseek_ocr,
        LLAVA_TOKEN,
        call={"crop_to_patches": True, "min_patches": 2, "max_patches": 9},
        processor="UnlimitedOcrImageProcessor",
        has_settings=True,
    ),
    ("deepseek_vl", IMAGE): DEEPSEEK_IMAGE,
    ("deepseek_vl_hybrid", IMAGE): DEEPSEEK_IMAGE,
    ("janus", IMAGE): _row(
        framed("boi_token", "eoi_token", 576, key="num_image_tokens"),
        image_token="<image_placeholder>",
        boi_token="<begin_of_image>",
        eoi_token="<end_of_image>",
    ),
    **{
        (name, kind): row
        for name in ("nemotron_h_omni", *NEMOTRON_OMNI_TYPES)
        for kind, row in ((IMAGE, NEMOTRON_IMAGE), (SOUND, NEMOTRON_SOUND))
    },
    ("voxtral", SOUND): Placeholder(
        voxtral,
        {"audio_token": "[AUDIO]", "begin_audio_token": "[BEGIN_AUDIO]"},
        {"padding": True, "truncation": False, "pad_to_multiple_of": 480_000},
        frames=3000,
    ),
}
"""By type of model, and image or sound."""


def placeholder_of(config: Mapping[str, Any], kind: str) -> Placeholder | None:
    """Returns how a model writes an image or a sound, by its config.json; None if that is not known. Models that see
    through Pixtral write images as it does, except LightOnOCR, which writes no ends of rows."""
    name, vision = type_of_family({"model_type": "", **config}), config.get("vision_config") or {}
    if kind == IMAGE and vision.get("model_type") == "pixtral" and name != "lighton_ocr":
        name = "pixtral"
    return PLACEHOLDERS.get((str(name), kind))
