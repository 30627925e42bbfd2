"""Prompts with images and sounds against the processors of releases, with tiny tokenizers."""

import json
import os
import subprocess
import sys
import warnings
import wave
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import wavfile
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.image_processing_utils import select_best_resolution
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.processing_utils import ProcessorMixin

from tpuconv.errors import ConfigError, UsageError
from tpuconv.models import pictures
from tpuconv.models.media_files import image_of, load_image, load_sound, sound_of
from tpuconv.models.pictures import Preparer, load_processor
from tpuconv.models.placeholders import IMAGE, SOUND, placeholder_of
from tpuconv.models.text_generator import PromptEncoder
from tpuconv.models.towers.llava.tiles import fitting_size, inside_padding

PROCESSORS = {**PROCESSOR_MAPPING_NAMES, "fast_vlm": "LlavaProcessor", "mimo_v2": "Qwen2_5_VLProcessor"}
IMAGE_PROCESSORS = {
    **IMAGE_PROCESSOR_MAPPING_NAMES,
    **{"fast_vlm": IMAGE_PROCESSOR_MAPPING_NAMES["clip"], "mimo_v2": IMAGE_PROCESSOR_MAPPING_NAMES["qwen2_vl"]},
}
"""Of FastVLM and MiMo those that their releases name."""
BACKEND = "torchvision" if find_spec("torchvision") else "pil"
"""As transformers chooses it."""
WITHOUT_TORCHVISION = pytest.mark.skipif(BACKEND != "pil", reason="torchvision is installed")
RNG = np.random.default_rng(0)
IMAGES = [Image.fromarray(RNG.integers(0, 255, size, dtype=np.uint8)) for size in ((90, 60, 3), (54, 78, 3))]
SOUNDS = [np.sin(np.arange(int(16_000 * seconds), dtype=np.float32) / 9) for seconds in (0.7, 3.1)]

GRID = {"size": {"shortest_edge": 16 * 28**2, "longest_edge": 64 * 28**2}}
SQUARE = {"size": {"height": 28, "width": 28}}
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
PINS = {"image_grid_pinpoints": [[84, 56], [56, 56]]}
TILED = {"size": {"height": 14, "width": 14}, "max_patches": 4}
SPLIT = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
PATCHES = {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
ONEVISION = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
PIXTRAL = {"patch_size": 7, "spatial_merge_size": 2}
SEEN_BY_PIXTRAL = {"vision_config": {"model_type": "pixtral"}}
CASES = {
    "gemma3": (SQUARE | {"do_pan_and_scan": True}, {"image_seq_length": 4}),
    "gemma3n": (SQUARE, {"image_seq_length": 4}),
    "paligemma": (SQUARE | {"image_seq_length": 4}, {}),
    "gemma4": ({}, {}),
    "mllama": (SQUARE, {}),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v", "exaone4_5"), (GRID, {})),
    **dict.fromkeys(("paddleocr_vl", "hyperclovax_vision_v2", "cohere_compass", "cosmos3_edge"), (GRID, {})),
    "video_llama_3": ({}, {}),
    "internvl": (TILED, {"image_seq_length": 5}),
    "qianfan_ocr": (TILED, {"image_seq_length": 5}),
    "aya_vision": (TILED, {"patch_size": 7, "img_size": 21}),
    "mistral3": ({"size": {"longest_edge": 63}, "patch_size": {"height": 7, "width": 7}}, PIXTRAL),
    "lighton_ocr": (PATCHES, PIXTRAL),
    "idefics3": (SPLIT, {"image_seq_len": 3}),
    "idefics3 whole": (SPLIT | {"do_image_splitting": False}, {"image_seq_len": 3}),
    "smolvlm": (SPLIT, {"image_seq_len": 3}),
    "llava": (CROPPED, LLAVA),
    "vipllava": (CROPPED, LLAVA | {"vision_feature_select_strategy": "full"}),
    "fast_vlm": (CROPPED, LLAVA),
    "llava_next": (CROPPED | PINS | {"do_pad": False}, LLAVA),
    "granite4_vision": (CROPPED | PINS | {"do_pad": False}, LLAVA | {"downsample_rate": "1/2"}),
    "llava_onevision": (PINS | SQUARE, ONEVISION),
    "llava_onevision shrunk": (PINS | SQUARE, ONEVISION | {"vision_aspect_ratio": "anyres_max_1"}),
    "aria": ({}, {"size_conversion": {"980": 5}}),
    "granite_docling": (SQUARE, {"image_seq_len": 3}),
    "deepseek_ocr2": ({"size": {"height": 96, "width": 96}, "tile_size": 80, "max_patches": 4}, {"patch_size": 8}),
    "deepseek_vl": (SQUARE, {"num_image_tokens": 4}),
    "janus": ({}, {"num_image_tokens": 4}),
    "hunyuan_vl": ({}, {}),
    "ernie4_5_vl_moe": (GRID, {}),
    "mimo_v2": (GRID | {"patch_size": 16}, {}),
}
"""Settings of the image processor and of the whole processor, by type of model."""

ALONE = ("mistral3", "mllama", "idefics3", "llava_onevision", "llava_onevision shrunk")
"""Cases that are also run with a single image."""

LONG = [np.tile(SOUNDS[1], 12)]  # 37 s
HEARD = {
    **dict.fromkeys(("qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe", "gemma4", "gemma3n"), tuple(SOUNDS)),
    **dict.fromkeys(("phi4_multimodal", "nemotron_h_omni"), tuple(SOUNDS)),
    **dict.fromkeys(("audioflamingo3", "musicflamingo", "glmasr", "qwen3_asr"), tuple(LONG)),  # one sound for a text
}
VIDEO = {"image_token": "<i>", "video_token": "<v>", "vision_bos_token": "<b>", "vision_eos_token": "<e>"}
OMNI = VIDEO | {"audio_bos_token": "<ab>", "audio_eos_token": "<ae>"}
MORE_TOKENS = {
    "ernie4_5_vl_moe": {
        **{"image_start_token": "<is>", "image_end_token": "<ie>"},
        **{"video_token": "<v>", "video_start_token": "<vs>", "video_end_token": "<ve>"},
    },
    "hunyuan_vl": {"image_token": "<hy>", "image_start_token": "<hs>", "image_end_token": "<he>"},
    "internvl": {"video_token": "<video>"},
    "qwen2_5_omni": OMNI,
    "qwen3_omni_moe": OMNI,
    "qwen3_asr": {"audio_bos_token": "<ab>", "audio_eos_token": "<ae>"},
}
"""Tokens that a processor names beside those of its placeholders."""


def tokenizer_of(named: dict[str, str]) -> transformers.PreTrainedTokenizerFast:
    """A token for each character, and special tokens with names."""
    characters = Tokenizer(BPE(vocab={chr(i): i for i in range(10, 127)}, merges=[]))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, unk_token="~", pad_token="|", eos_token="}", extra_special_tokens=named
    )


def tokens_of(config: dict) -> dict[str, str]:
    name, rows = config["model_type"], (placeholder_of(config, kind) for kind in (IMAGE, SOUND))
    return {key: text for row in rows if row for key, text in row.tokens.items() if text} | MORE_TOKENS.get(name, {})


@pytest.fixture
def processor_class(monkeypatch):
    """Returns the class of a type's processor. It takes None for parts that need packages which are not installed."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *a: None)

    def find(name: str):
        cls = PROCESSORS[name]
        folder = "pixtral" if cls == "PixtralProcessor" else name if cls != "LlavaProcessor" else "llava"
        folders = {"Qwen3VLProcessor": "qwen3_vl", "Qwen2_5_VLProcessor": "qwen2_5_vl", "InklingProcessor": "inkling"}
        folder = folders.get(cls, folder)
        needs_torchvision = "transformers.models.pixtral.image_processing_pixtral"
        if folder == "pixtral" and BACKEND == "pil":
            monkeypatch.setitem(sys.modules, needs_torchvision, SimpleNamespace(get_resize_output_image_size=None))
        module = import_module(f"transformers.models.{folder}.processing_{folder}")
        if name == "smolvlm":  # for the names of numbers in the prompts of videos
            monkeypatch.setattr(module, "num2words", True)
        return getattr(module, cls)

    return find


def saved(folder: Path, config: dict, part, settings: dict) -> Path:
    """Writes what a release has beside its weights."""
    part.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def check_equal(have, want, tokenizer) -> None:
    assert tokenizer(have.text)["input_ids"] == np.asarray(want["input_ids"][0]).tolist()
    of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
    of_text |= {"moe_mm_token_type_ids", "cross_attention_mask"}
    assert set(have.features) == set(want) - of_text
    for name, array in have.features.items():
        np.testing.assert_array_equal(array, np.stack([np.asarray(x) for x in want[name]]), name)


@pytest.mark.parametrize(("case", "count"), [*((case, 2) for case in CASES), *((case, 1) for case in ALONE)])
def test_prompts_with_images_are_those_of_the_release(case, count, processor_class, tmp_path):
    name, (of_images, settings) = case.split()[0], CASES[case]
    config = {"model_type": name} | (SEEN_BY_PIXTRAL if name == "mistral3" else {})
    tokenizer = tokenizer_of(tokens_of(config))
    images = getattr(transformers, IMAGE_PROCESSORS[name][BACKEND])(**of_images)
    cls = processor_class(name)
    parts = dict.fromkeys(cls.get_attributes()) | {"tokenizer": tokenizer, "image_processor": images}
    processor = cls(**parts, **settings)
    marker = getattr(tokenizer, placeholder_of(config, IMAGE).marker, None)
    marker = f"<hs>{marker}<he>" if name == "hunyuan_vl" else marker or processor.image_token
    text = f"a {marker}b{marker} c" if count == 2 else f"{marker}"
    want = processor(text=[text], images=[IMAGES[:count]])
    folder = saved(tmp_path, config, images, settings)
    check_equal(Preparer(folder, tokenizer).prepared(text, IMAGES[:count]), want, tokenizer)


@given(st.integers(1, 300), st.integers(1, 300))
def test_tiles_of_llava_next_are_those_of_the_reference(height, width):
    sizes = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    assert fitting_size(height, width, sizes) == tuple(select_best_resolution((height, width), sizes))
    patches, newlines = LlavaNextProcessor._get_unpadded_features(None, height, width, 4, 4, 2, 3)
    rows, columns = map(len, inside_padding(8, 12, height, width))
    assert (rows * columns, rows) == (patches, newlines)


EXTRACTORS = {**FEATURE_EXTRACTOR_MAPPING_NAMES, "nemotron_h_omni": "ParakeetFeatureExtractor"}
"""Of Nemotron Omni the one that its processor is made for."""


@pytest.mark.parametrize("name", HEARD)
def test_prompts_with_sounds_are_those_of_the_release(name, processor_class, tmp_path):
    config = {"model_type": name}
    tokenizer = tokenizer_of(tokens_of(config))
    extractor = getattr(transformers, EXTRACTORS.get(name, "WhisperFeatureExtractor"))()
    cls = processor_class(name)
    part = "audio_processor" if name == "phi4_multimodal" else "feature_extractor"
    processor = cls(**dict.fromkeys(cls.get_attributes()) | {"tokenizer": tokenizer, part: extractor})
    marker = processor.audio_token
    sounds = HEARD[name]
    text = f"a {marker} b" * len(sounds)
    want = processor(text=[text], audio=list(sounds))
    have = Preparer(saved(tmp_path, config, extractor, {}), tokenizer).prepared(text, sounds=sounds)
    check_equal(have, want, tokenizer)


def test_qwen3_asr_hears_all_of_a_sound_with_the_extractor_of_whisper(tmp_path):
    """As its processor asks of any extractor; the extractor of Whisper leaves out the end otherwise."""
    config = {"model_type": "qwen3_asr"}
    folder = saved(tmp_path, config, transformers.WhisperFeatureExtractor(), {})
    found = Preparer(folder, tokenizer_of(tokens_of(config))).prepared("a", sounds=LONG)
    assert found.features["input_features"].shape[2] > 3700


@pytest.mark.parametrize("name", ["qwen2_audio", "gemma3n", "gemma4"])
def test_sounds_of_which_the_end_would_be_left_out_are_refused(name, tmp_path):
    extractor = getattr(transformers, FEATURE_EXTRACTOR_MAPPING_NAMES.get(name, "WhisperFeatureExtractor"))()
    folder = saved(tmp_path, {"model_type": name}, extractor, {})
    tokenizer = tokenizer_of(tokens_of({"model_type": name}))
    with pytest.raises(UsageError, match=r"sound 2 has 37\.2 seconds, and the model hears 30 of a sound"):
        Preparer(folder, tokenizer).prepared("a", sounds=[SOUNDS[0], *LONG])


def test_voxtral_hears_half_minutes(processor_class, tmp_path):
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    sounds = [np.tile(SOUNDS[1], 12), SOUNDS[0]]  # 37 s are two pieces
    cls, call = processor_class("voxtral"), {"padding": True, "truncation": False, "pad_to_multiple_of": 480_000}
    self = SimpleNamespace(feature_extractor=extractor)
    want = cls._retrieve_input_features(self, sounds, 3000, sampling_rate=16_000, return_tensors="pt", **call)
    folder = saved(tmp_path, {"model_type": "voxtral"}, extractor, {})
    have = Preparer(folder, None).prepared("[AUDIO]a[AUDIO]", sounds=sounds)
    np.testing.assert_array_equal(have.features["input_features"], want)
    assert have.text == f"[BEGIN_AUDIO]{'[AUDIO]' * 750}a[BEGIN_AUDIO]{'[AUDIO]' * 375}"


def test_settings_of_older_releases_are_those_of_the_model(tmp_path):
    """Their processor_config.json is missing."""
    clip = {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}}
    config = {"model_type": "llava", "vision_feature_select_strategy": "default", **clip}
    folder = saved(tmp_path, config, transformers.LlavaImageProcessorPil(**CROPPED), {})
    assert Preparer(folder, None).prepared("a <image>", IMAGES[:1]).text == "a " + "<image>" * 4
    (folder / "config.json").write_text(json.dumps(config | {"vision_feature_select_strategy": "full"}))
    assert Preparer(folder, None).prepared("a <image>", IMAGES[:1]).text == "a " + "<image>" * 5
    (folder / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ConfigError, match="has a patch_size"):
        Preparer(folder, None).prepared("a <image>", IMAGES[:1])
    pixtral = {"vision_config": {"model_type": "pixtral", "patch_size": 7}, "spatial_merge_size": 2}
    processor = transformers.PixtralImageProcessorPil(**PATCHES)
    saved(tmp_path, {"model_type": "mistral3"} | pixtral, processor, {})
    row = "[IMG]" * 3
    assert Preparer(folder, None).prepared("[IMG]", IMAGES[:1]).text == "[IMG_BREAK]".join([row] * 4) + "[IMG_END]"


def test_settings_are_read_from_one_file_of_all_parts(tmp_path):
    """As transformers 5 writes them."""
    tokenizer = tokenizer_of(tokens_of({"model_type": "gemma3"}))
    images = transformers.Gemma3ImageProcessorPil(**SQUARE)
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=3).save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    have = Preparer(tmp_path, tokenizer).prepared("<start_of_image>", IMAGES[:1])
    assert have.text.count("<image_soft_token>") == 3
    assert have.features["pixel_values"].shape == (1, 3, 28, 28)


class Stub:
    """An image processor that needs torchvision, with what it returns."""

    def __init__(self, **returned):
        self.returned, self.merge_size, self.patch_size, self.downsample_ratio = returned, 2, 3, 0.5

    def __call__(self, images, **_):
        return dict(self.returned)

    def fetch_images(self, images):
        return images


@pytest.mark.parametrize("ratios", [[(1, 1), (1, 1)], [(2, 3), (1, 2)]])
def test_tiles_of_llama_4_are_those_of_the_release(ratios, processor_class, tmp_path, monkeypatch):
    tokenizer = tokenizer_of(tokens_of({"model_type": "llama4"}))
    images = Stub(pixel_values=torch.ones(9, 3, 56, 56, dtype=torch.bfloat16), aspect_ratios=np.array(ratios))
    want = processor_class("llama4")(images, tokenizer)(text=["a <|image|> b <|image|>"], images=IMAGES)
    (tmp_path / "config.json").write_text('{"model_type": "llama4", "vision_config": {"patch_size": 14}}')
    monkeypatch.setattr(pictures, "load_processor", lambda *_: images)
    have = Preparer(tmp_path, tokenizer).prepared("a <|image|> b <|image|>", IMAGES)
    assert tokenizer(have.text)["input_ids"] == want["input_ids"][0]
    assert set(have.features) == {"pixel_values"}
    assert have.features["pixel_values"].dtype == np.float32


GRID_OF_BLOCKS = np.array([[1, 2, 3], [1, 1, 2]])


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("cohere2_vision", {"pixel_values": torch.ones(4, 3, 6, 6), "num_patches": [3, 1]}),
        ("nemotron_h_omni", {"pixel_values": torch.ones(32, 48), "image_grid_hw": torch.tensor([[4, 6], [2, 4]])}),
        ("inkling_mm_model", {"pixel_values": torch.ones(9, 2, 3, 3, 3), "num_patches": [6, 3]}),
        ("inkling2", {"pixel_values": torch.ones(8, 6, 6, 3), "image_grid_thw": GRID_OF_BLOCKS}),
        (
            "phi4_multimodal",
            {
                "image_pixel_values": torch.ones(2, 3, 3, 4, 4),
                "image_sizes": torch.tensor([[8, 4], [4, 4]]),
                "image_attention_mask": torch.ones(2, 3, 2, 2),
                "num_img_tokens": [9, 6],
            },
        ),
    ],
)
def test_images_that_need_torchvision_are_those_of_the_release(name, features, processor_class, tmp_path, monkeypatch):
    config = {"model_type": name}
    tokenizer, images = tokenizer_of(tokens_of(config)), Stub(**features)
    text = f"a {tokenizer.image_token}b{tokenizer.image_token} c"
    cls = processor_class(name)
    parts = dict.fromkeys(cls.get_attributes()) | {"tokenizer": tokenizer, "image_processor": images}
    want = cls(**parts)(text=[text], images=[IMAGES])
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(pictures, "load_processor", lambda *_: images)
    have = Preparer(tmp_path, tokenizer).prepared(text, IMAGES)
    assert tokenizer(have.text)["input_ids"] == np.asarray(want["input_ids"][0]).tolist()
    assert set(have.features) == {*features} - {"num_patches", "num_img_tokens"}


def test_placeholders_of_kimi_are_those_of_the_release(processor_class, tmp_path, monkeypatch):
    tokenizer = tokenizer_of(tokens_of({"model_type": "kimi_k25"}))
    images = Stub(image_grid_thw=np.array([(1, 4, 6), (1, 2, 8)]), pixel_values=np.zeros((40, 3, 14, 14)))
    want = processor_class("kimi_k25")(images, tokenizer)(text=["<|media_pad|>a<|media_pad|>"], images=IMAGES)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25"}')
    monkeypatch.setattr(pictures, "load_processor", lambda *_: images)
    have = Preparer(tmp_path, tokenizer).prepared("<|media_pad|>a<|media_pad|>", IMAGES)
    check_equal(have, want, tokenizer)


def test_tiles_of_lfm2_are_those_of_the_release(processor_class, tmp_path, monkeypatch):
    tokenizer = tokenizer_of(tokens_of({"model_type": "lfm2_vl"}))
    sizes = [(48, 64), (32, 80)]
    images = Stub(image_rows=[2, 1], image_cols=[3, 1], image_sizes=sizes, pixel_values=np.zeros((8, 16, 768)))
    images.tile_size, images.encoder_patch_size, images.downsample_factor, images.use_thumbnail = 64, 16, 2, True
    want = processor_class("lfm2_vl")(images, tokenizer)(text=["a<image>b<image>"], images=[IMAGES])
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    monkeypatch.setattr(pictures, "load_processor", lambda *_: images)
    have = Preparer(tmp_path, tokenizer).prepared("a<image>b<image>", IMAGES)
    assert tokenizer(have.text)["input_ids"] == want["input_ids"][0]
    assert set(have.features) == {"pixel_values"}


def test_images_of_blip_2_stand_before_the_token_that_begins_a_text(tmp_path):
    """As its processor puts them, which takes no markers."""
    tokenizer = tokenizer_of({"bos_token": "</s>"})
    images = getattr(transformers, IMAGE_PROCESSORS["blip-2"][BACKEND])(**SQUARE)
    want = transformers.Blip2Processor(images, tokenizer, num_query_tokens=4)(text=["a b"], images=IMAGES[:1])
    folder = saved(tmp_path, {"model_type": "blip-2"}, images, {"num_query_tokens": 4})
    have = Preparer(folder, tokenizer).prepared("a b", IMAGES[:1])
    assert have.text == "<image>" * 4 + "</s>a b"
    assert have.begun
    bos = tokenizer.convert_tokens_to_ids("</s>")
    ids = tokenizer(have.text)["input_ids"]
    assert ids[:4] + ids[5:] == want["input_ids"][0]  # this tokenizer begins no text
    assert ids[4] == bos
    assert set(have.features) == {"pixel_values"}
    np.testing.assert_array_equal(have.features["pixel_values"], np.stack(want["pixel_values"]))


FIRST_OCR = {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"]}


def test_tiles_of_deepseek_ocr_are_those_of_the_release(processor_class, tmp_path, monkeypatch):
    """Its features are those of Unlimited-OCR, whose processor takes more tiles."""
    tokenizer = tokenizer_of(tokens_of(FIRST_OCR))
    images = Stub(
        **{"pixel_values": np.zeros((2, 3, 96, 96)), "pixel_values_local": np.zeros((6, 3, 80, 80))},
        **{"num_local_patches": [6, 0], "patches_grid": [[3, 2], [1, 1]]},
    )
    images.size, images.tile_size = {"height": 96, "width": 96}, 80
    want = processor_class("unlimited_ocr")(images, tokenizer, patch_size=8)(text=["a<image>b<image>"], images=[IMAGES])
    (tmp_path / "config.json").write_text(json.dumps(FIRST_OCR))
    (tmp_path / "processor_config.json").write_text('{"patch_size": 8}')
    monkeypatch.setattr(pictures, "load_processor", lambda *_: images)
    have = Preparer(tmp_path, tokenizer).prepared("a<image>b<image>", IMAGES)
    assert tokenizer(have.text)["input_ids"] == want["input_ids"][0]
    assert set(have.features) == {*images.returned}


def test_processors_of_deepseek_ocr_have_the_settings_of_their_code(tmp_path, monkeypatch):
    """Releases have no file of them."""
    made = SimpleNamespace(UnlimitedOcrImageProcessor=lambda: "the first one's")
    (tmp_path / "processor_config.json").write_text('{"patch_size": 16}')
    second = FIRST_OCR | {"architectures": ["DeepseekOCR2ForCausalLM"]}
    processor = load_processor(tmp_path, IMAGE, placeholder_of(second, IMAGE))
    assert (processor.size.height, processor.tile_size) == (1024, 768)
    monkeypatch.setitem(sys.modules, "transformers", made)
    assert load_processor(tmp_path, IMAGE, placeholder_of(FIRST_OCR, IMAGE)) == "the first one's"


@WITHOUT_TORCHVISION
def test_deepseek_ocr_says_that_its_processor_needs_torchvision(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"patch_size": 16}')
    with pytest.raises(UsageError, match="needs torchvision, which is not installed"):
        load_processor(tmp_path, IMAGE, placeholder_of(FIRST_OCR, IMAGE))


@pytest.fixture
def gemma(tmp_path) -> Path:
    processor = transformers.Gemma3ImageProcessorPil(**SQUARE)
    return saved(tmp_path, {"model_type": "gemma3"}, processor, {"image_seq_length": 2})


def row_of(folder: Path):
    return placeholder_of(json.loads((folder / "config.json").read_text()), IMAGE)


def tiles_of_internvl(image: Image.Image, side: int, most: int) -> list[np.ndarray]:
    """The tiles [I, side, side, 3] of an image and the whole one, as the release's `dynamic_preprocess` cuts them."""
    grids = sorted({(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most}, key=np.prod)
    width, height = image.size
    best, least = (1, 1), float("inf")
    for x, y in grids:
        off = abs(width / height - x / y)
        if off < least or (off == least and width * height > side * side * x * y / 2):
            best, least = (x, y), off
    columns, rows = best
    whole = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    boxes = [(x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(rows) for x in range(columns)]
    tiles = [whole.crop(box) for box in boxes]
    if len(tiles) > 1:
        tiles.append(image.resize((side, side), Image.Resampling.BICUBIC))
    return [np.asarray(tile, np.float32) for tile in tiles]


def test_tiles_of_internvl_are_those_of_its_own_code(tmp_path):
    """Its release has the settings of CLIP's image processor, and cuts images by code of its own."""
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    settings = {
        **{"crop_size": 28, "size": 28, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3},
        **{"feature_extractor_type": "CLIPFeatureExtractor", "image_mean": mean.tolist(), "image_std": std.tolist()},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internvl_chat"}))
    images = [*IMAGES, IMAGES[0].resize((29, 200)), IMAGES[0].resize((20, 20))]
    found = Preparer(tmp_path, None).prepared("a <image> b <image> <image> <image>", images)
    want = [tiles_of_internvl(image, 28, 12) for image in images]
    pixels_BYXC = (np.stack([tile for tiles in want for tile in tiles]) / 255 - mean) / std
    np.testing.assert_allclose(found.features["pixel_values"].transpose(0, 2, 3, 1), pixels_BYXC, atol=1e-5)
    texts = ["<img>" + "<IMG_CONTEXT>" * 256 * len(tiles) + "</img>" for tiles in want]
    assert found.text == "a {} b {} {} {}".format(*texts)


def test_markers_and_images_must_match(gemma):
    with pytest.raises(UsageError, match="the prompt has 1 marker <start_of_image> for 2 images") as e:
        Preparer(gemma, None).prepared("<start_of_image>", IMAGES)
    assert "write <start_of_image> once" in e.value.hint


def test_files_are_read(gemma, tmp_path):
    for i, image in enumerate(IMAGES):
        image.save(tmp_path / f"{i}.png")
    have = Preparer(gemma, None).prepared("<start_of_image>" * 2, [tmp_path / "0.png", str(tmp_path / "1.png")])
    want = Preparer(gemma, None).prepared("<start_of_image>" * 2, [np.asarray(image) for image in IMAGES])
    np.testing.assert_array_equal(have.features["pixel_values"], want.features["pixel_values"])
    folder = saved(tmp_path / "heard", {"model_type": "qwen2_audio"}, transformers.WhisperFeatureExtractor(), {})
    samples = np.round(SOUNDS[0] * 30_000).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    heard = Preparer(folder, None).prepared("<|AUDIO|>", sounds=[tmp_path / "a.wav"])
    same = Preparer(folder, None).prepared("<|AUDIO|>", sounds=[samples.astype(np.float32) / 32_768])
    np.testing.assert_array_equal(heard.features["input_features"], same.features["input_features"])


def test_a_prompt_without_images_stays_as_it_is(gemma):
    assert Preparer(gemma, None).prepared("<start_of_image>") == pictures.PreparedPrompt("<start_of_image>", {})


def test_a_model_without_a_row_or_a_processor_is_refused(gemma):
    (gemma / "config.json").write_text('{"model_type": "kimi_k3"}')
    with pytest.raises(UsageError, match="transformers has no processor for kimi_k3"):
        Preparer(gemma, None).prepared("", IMAGES)


def test_a_folder_without_a_processor_is_refused(gemma):
    for name in pictures.FILES:
        (gemma / name).unlink()
    with pytest.raises(UsageError, match="has no image processor") as e:
        Preparer(gemma, None).prepared("", IMAGES)
    assert "preprocessor_config.json" in e.value.hint


def test_a_processor_that_cannot_be_read_is_refused(gemma):
    (gemma / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="the image processor in "):
        load_processor(gemma, IMAGE, row_of(gemma))
    (gemma / "preprocessor_config.json").write_text('{"image_processor_type": "Unknown"}')
    (gemma / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(ConfigError, match="the image processor in ") as e:
        load_processor(gemma, IMAGE, row_of(gemma))
    assert len(str(e.value)) < 1000  # transformers lists all types that it has


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ('{"image_seq_length": 1e9}', "image_seq_length"),
        ('{"patch_size": 0}', "patch_size"),
        ("[]", "processor_config"),
    ],
)
def test_settings_that_are_malformed_are_refused(settings, fault, gemma):
    (gemma / "processor_config.json").write_text(settings)
    with pytest.raises(ConfigError, match=fault):
        Preparer(gemma, None).prepared("<start_of_image>", IMAGES[:1])


def test_images_that_the_processor_cannot_prepare_are_refused(gemma, tmp_path):
    """By name; if it cannot prepare any, its settings are at fault."""
    with pytest.raises(UsageError, match="the checkpoint's processor cannot prepare image 2: ValueError"):
        Preparer(gemma, None).prepared("", [IMAGES[0], np.zeros(3)])
    long = tmp_path / "long.png"
    Image.new("RGB", (1, 300)).save(long)
    qwen = saved(tmp_path / "qwen", {"model_type": "qwen2_vl"}, transformers.Qwen2VLImageProcessorPil(), {})
    with pytest.raises(UsageError, match=f"cannot prepare {long}: .* aspect ratio"):
        Preparer(qwen, None).prepared("", [IMAGES[0], long])
    saved(tmp_path, {"model_type": "gemma3"}, transformers.Gemma3ImageProcessorPil(image_mean=[0.5] * 5), {})
    with pytest.raises(ConfigError, match="cannot prepare image 1, nor any other: ") as e:
        Preparer(tmp_path, None).prepared("", IMAGES[:1])
    assert "preprocessor_config.json" in e.value.hint


IMAGE_TEMPLATE = (
    "{% for m in messages %}({% for p in m.content %}{{ p.text or '<start_of_image>' }}{% endfor %}){% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "prompt", "want"),
    [
        (IMAGE_TEMPLATE, "a", "({0}{0}a)"),
        (IMAGE_TEMPLATE, "a<start_of_image>b<start_of_image>", "(a{0}b{0})"),
        ("{% for m in messages %}({{ m.content }}){% endfor %}", "a", "({0}{0}a)"),
        ("{% for m in messages %}({{ m.content }}){% endfor %}", "<start_of_image>a<start_of_image>", "({0}a{0})"),
        ("{% for m in messages %}{{ '(' + m.content + ')' }}{% endfor %}", "a", "({0}{0}a)"),
    ],
)
def test_images_stand_within_the_conversation(template, prompt, want, gemma):
    """Templates that take a text alone are given the markers in it."""
    tokenizer = tokenizer_of(tokens_of({"model_type": "gemma3"}))
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer, 100, lambda: gemma, ("vision",))
    ids, _ = encoder.encode_with(prompt, IMAGES, chat=True)
    image = f"\n\n<start_of_image>{'<image_soft_token>' * 2}<end_of_image>\n\n"
    assert ids == tokenizer(want.format(image), add_special_tokens=False)["input_ids"]


def test_what_a_prompt_cannot_be_about_is_refused(gemma):
    tokenizer = tokenizer_of(tokens_of({"model_type": "gemma3"}))
    encoder = PromptEncoder(tokenizer, 100, lambda: gemma, ("vision",))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    for media, fault in (
        ({"images": IMAGES, "chat": True}, "the chat template leaves out images"),
        ({"sounds": SOUNDS}, "no part that hears sounds"),
        ({"images": "a.png"}, "images are of type str"),
        ({"images": IMAGES[0]}, "images are of type Image"),
        ({"sounds": SOUNDS[0]}, "sounds are of type ndarray"),
        ({"images": [None]}, "image 1 is of type NoneType"),
        ({"images": ["https://a.b/c.png"]}, "download it"),
    ):
        with pytest.raises(UsageError, match=fault):
            encoder.encode_with("a", **media)
    with pytest.raises(UsageError, match="no part that sees images"):
        PromptEncoder(tokenizer, 100).encode_with("a", IMAGES)


def test_tokens_without_an_embedding_are_refused_beside_images(gemma):
    """The placeholder itself may have none: it stands for features."""
    tokenizer = tokenizer_of(tokens_of({"model_type": "gemma3"}))
    tokenizer.add_tokens(["new"])
    encoder = PromptEncoder(tokenizer, 100, lambda: gemma, ("vision",), rows=117)
    assert max(encoder.encode_with("a", IMAGES)[0]) >= 117
    with pytest.raises(UsageError, match=r"the model has no embedding: .*'new'"):
        encoder.encode_with("a new", IMAGES)


@WITHOUT_TORCHVISION
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama4", "Llama4ImageProcessor"),
        ("phi4_multimodal", "Phi4MultimodalImageProcessor"),
        ("phi4mm", "Phi4MMImageProcessor"),
        ("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3ImageProcessor"),
        ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronNanoVLV2ImageProcessor"),
    ],
)
def test_a_processor_that_needs_torchvision_says_so(name, kind, gemma):
    (gemma / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind}))
    (gemma / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(UsageError, match="needs torchvision, which is not installed"):
        load_processor(gemma, IMAGE, row_of(gemma))


@pytest.mark.slow
def test_a_torchvision_of_another_torch_is_named(gemma, tmp_path):
    """In a process of its own, since transformers looks for torchvision once."""
    package, facts = tmp_path / "torchvision", tmp_path / "torchvision-0.1.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    program = """
import sys
from pathlib import Path
from tpuconv.errors import UsageError
from tpuconv.models.pictures import load_processor
from tpuconv.models.placeholders import PLACEHOLDERS
try:
    load_processor(Path(sys.argv[1]), "image", PLACEHOLDERS["gemma3", "image"])
except UsageError as e:
    print(e)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", program, str(gemma)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert "torchvision cannot be imported" in out.stdout
    assert "operator torchvision::nms does not exist" in out.stdout
    assert "uninstall it" in out.stdout


@pytest.mark.parametrize("package", ["PIL", "transformers"])
def test_a_package_that_is_missing_is_named(package, gemma, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"{'Pillow' if package == 'PIL' else package} is not installed") as e:
        load_processor(gemma, IMAGE, row_of(gemma))
    assert "[hf]" in e.value.hint


def test_images_are_turned_as_the_camera_was_held(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    IMAGES[0].convert("RGBA").save(tmp_path / "a.png", exif=exif)
    image = load_image(tmp_path / "a.png")
    assert (image.size, image.mode) == ((90, 60), "RGB")


PALETTE = IMAGES[0].quantize(16)


@pytest.mark.parametrize(
    ("name", "image", "options"),
    [
        ("a.gif", PALETTE, {"save_all": True, "append_images": [IMAGES[1]]}),
        ("a.webp", IMAGES[0], {"save_all": True, "append_images": [IMAGES[0].rotate(180)]}),
        ("a.png", PALETTE, {"transparency": bytes([0, 128] * 8)}),
        ("a.png", IMAGES[0].convert("LA"), {}),
        ("a.png", IMAGES[0].convert("1"), {}),
        ("a.bmp", IMAGES[0], {}),
        ("a.jpg", IMAGES[0].convert("CMYK"), {}),
        ("a.tiff", IMAGES[0].convert("RGBA"), {}),
        ("a.png", Image.new("1", (100, 90)), {}),
    ],
)
def test_images_of_files_are_those_of_transformers(name, image, options, tmp_path, monkeypatch):
    """Without a warning on the terminal, such as for more pixels than Pillow likes."""
    image.save(tmp_path / name, **options)
    with warnings.catch_warnings(), Image.open(tmp_path / name) as opened:
        warnings.simplefilter("ignore")
        want = np.asarray(transformers.image_utils.load_image(opened))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(np.asarray(load_image(tmp_path / name)), want)


def test_images_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.png"

    def fault() -> str:
        with pytest.raises(UsageError, match=f"^{path} ") as e:
            load_image(path)
        return str(e.value)

    assert "cannot be read as an image: No such file" in fault()
    for mode, values in (("I;16", np.uint16), ("F", np.float32)):  # in RGB white and black
        Image.fromarray(np.linspace(0, 1, 12).reshape(3, 4).astype(values)).save(path, "TIFF")
        assert f"mode {mode} of Pillow" in fault()
    with pytest.raises(UsageError, match="image 3 has values of more than 8 bits"):
        image_of(Image.new("I", (2, 2)), "image 3")
    IMAGES[0].save(path)
    path.write_bytes(path.read_bytes()[:2000])
    assert "image file is truncated" in fault()
    path.write_bytes(b"no image")
    assert "it has no format that Pillow knows" in fault()
    IMAGES[0].save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert "more than 20 pixels" in fault()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_sounds_of_all_widths_are_read(width, channels, tmp_path):
    samples = np.round(0.5 * np.sin(np.arange(100) / 5), 2)
    whole = np.round(samples * 2.0 ** (8 * width - 1)).astype(np.int64)
    raw = (whole + 128).astype(np.uint8) if width == 1 else whole.astype("<i8")
    data = raw.reshape(-1, 1).view(np.uint8)[:, :width] if width > 1 else raw[:, None]
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((channels, width, 8000, 0, "NONE", ""))
        silence = np.full_like(data, 128 if width == 1 else 0)
        file.writeframes(np.hstack([data, silence][:channels]).tobytes())
    sound = load_sound(tmp_path / "a.wav", 8000)
    assert sound.dtype == np.float32
    np.testing.assert_allclose(sound, samples / channels, atol=2.0 ** (1 - 8 * width) + 1e-7)


def test_sounds_are_resampled(tmp_path):
    slow, fast = (np.sin(2 * np.pi * 440 * np.arange(rate) / rate) for rate in (16_000, 44_100))
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 44_100, 0, "NONE", ""))
        file.writeframes((fast * 30_000).astype("<i2").tobytes())
    sound = load_sound(tmp_path / "a.wav", 16_000)
    assert len(sound) == 16_000
    np.testing.assert_allclose(sound[200:-200], slow[200:-200] * 30_000 / 32_768, atol=2e-3)


def test_what_a_file_has_beside_its_samples_is_ignored(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.array([0, 16_384], "<i2").tobytes())
    data = (tmp_path / "a.wav").read_bytes()
    more = b"bext\4\0\0\0note"
    size = (len(data) - 8 + len(more)).to_bytes(4, "little")
    (tmp_path / "a.wav").write_bytes(data[:4] + size + data[8:12] + more + data[12:])
    np.testing.assert_array_equal(load_sound(tmp_path / "a.wav", 8000), [0, 0.5])


def test_a_sound_of_a_pipe_has_no_length(tmp_path):
    whole = written(tmp_path / "a.wav", np.array([0, 16_384], np.int16))
    (tmp_path / "a.wav").write_bytes(whole[:4] + b"\xff" * 4 + whole[8:40] + b"\xff" * 4 + whole[44:])
    np.testing.assert_array_equal(load_sound(tmp_path / "a.wav", 8000), [0, 0.5])


def written(path: Path, samples: np.ndarray, rate: int = 8000) -> bytes:
    wavfile.write(path, rate, samples)
    return path.read_bytes()


def test_sounds_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = tmp_path / "a.wav"
    whole = written(path, np.zeros(9, np.int16))
    for data, fault in (
        (written(path, np.zeros(0, np.int16)), "a sound without samples"),
        (written(path, np.array([0.5, np.nan], np.float32)), "samples that are infinite or no numbers"),
        (written(path, np.zeros(9, np.int16), 999_999_937), "a sampling rate of 999,999,937, and rates from 1,000"),
        (b"no sound", "is not a WAV file, and soundfile, which reads others, is not installed"),
        (whole[:20] + b"\6\0" + whole[22:], "cannot be read as a sound: Unknown wave file format: ALAW"),
        (whole[:30], "cannot be read as a sound: it has 30 of 62 bytes: the end is missing"),
        (whole[:-6], "cannot be read as a sound: it has 56 of 62 bytes: the end is missing"),
        (whole[:16] + b"\1" + whole[17:], "cannot be read as a sound: "),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=fault) as e:
            load_sound(path, 16_000)
        assert str(path) in str(e.value)
    with pytest.raises(UsageError, match="cannot be read as a sound: No such file"):
        load_sound(tmp_path / "absent.mp3", 16_000)


def test_the_bytes_of_a_sound_decide_who_reads_it(tmp_path, monkeypatch):
    """Names may be wrong, and WAV files hold more formats than scipy reads."""
    samples = np.array([[0.5, 0], [0.25, 0.25]], np.float32)
    whole = written(tmp_path / "a.mp3", samples)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    np.testing.assert_array_equal(load_sound(tmp_path / "a.mp3", 8000), [0.25, 0.25])
    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(read=lambda file, dtype: (2 * samples, 8000)))
    for data in (b"fLaC", whole[:20] + b"\6\0" + whole[22:]):
        (tmp_path / "a.wav").write_bytes(data)
        np.testing.assert_array_equal(load_sound(tmp_path / "a.wav", 8000), [0.5, 0.5])


@pytest.mark.parametrize(
    ("sound", "fault"),
    [
        (np.zeros(9, np.int16), r"an array \[9\] of int16"),
        (np.zeros((9, 2), np.float32), r"an array \[9, 2\] of float32"),
        ((SOUNDS[0], 16_000), "of type tuple"),
        (None, "of type NoneType"),
        ([], "without samples"),
        ([0.5, np.inf], "samples that are infinite"),
    ],
)
def test_samples_that_are_no_sound_are_refused(sound, fault):
    with pytest.raises(UsageError, match=f"sound 1 .*{fault}"):
        sound_of(sound, "sound 1", 16_000)


def test_samples_may_be_a_list():
    np.testing.assert_array_equal(sound_of([0.5, 0.25], "sound 1", 16_000), np.array([0.5, 0.25], np.float32))


@pytest.mark.parametrize("rate", [None, 0, 1 << 40])
def test_a_feature_extractor_without_a_rate_is_refused(rate, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_audio"}')
    monkeypatch.setattr(pictures, "load_processor", lambda *_: SimpleNamespace(sampling_rate=rate))
    with pytest.raises(ConfigError, match=f"has the sampling_rate {rate}"):
        Preparer(tmp_path, None).prepared("", sounds=SOUNDS)
