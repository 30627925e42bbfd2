"""Prompts that the whole processor of a release prepares, as transformers loads it, through the model: against
transformers' model of what its processor returns. Most processors need torchvision, which the slow test installs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

import tpuconv
from helpers.oracles import torchvision_path
from helpers.processors import word_tokenizer
from helpers.sights import END, IMAGE, SOUND, START
from helpers.whole_sights import difference, made
from tpuconv.errors import UsageError
from tpuconv.models.pictures import Preparer
from tpuconv.models.text_generator import prompt_encoder

BACKEND = "torchvision" if find_spec("torchvision") else "pil"
RNG = np.random.default_rng(0)
IMAGES = [Image.fromarray(RNG.integers(0, 255, size, dtype=np.uint8)) for size in ((90, 60, 3), (54, 78, 3))]
SOUNDS = [np.sin(np.arange(int(16_000 * seconds), dtype=np.float32) / 9) for seconds in (0.3, 0.7)]


@dataclass(frozen=True)
class Prompt:
    """A processor for the model of a case with images or sounds.

    Attributes:
        words: tokens of the tokenizer, by their ids.
        named: attributes of the tokenizer, by the ids of their tokens.
        images, sounds, settings: of the image processor, the feature extractor, and the whole processor.
        text: the prompt; the marker stands for each `@`.
        heard: whether the prompt has sounds, not images.
        of_video: settings of the video processor, which reads none here.
    """

    words: Mapping[int, str]
    named: Mapping[str, int] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    sounds: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = "t5 @ t7 @ t8"
    heard: bool = False
    of_video: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "sound" if self.heard else "image"

    @property
    def items(self) -> Sequence[Any]:
        return (SOUNDS if self.heard else IMAGES)[: self.text.count("@")]


QWEN = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 2048}}
PADS = {IMAGE: "<|image_pad|>", 92: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
MUSE = {IMAGE: "<|patch|>", START: "<|image_start|>", END: "<|image_end|>", 92: "<|video|>", SOUND: "<|audio|>"}
MUSE |= {91: "<|soft_audio_start|>", 90: "<|soft_audio_end|>"}
SLICES = {
    **{IMAGE: "<|image|>", 92: "<|video|>", START: "<image>", END: "</image>"},
    **{91: "</slice>", 90: "<slice>", 89: "<n>", 88: "<image_id>", 87: "</image_id>"},
}
SLICE_NAMES = {
    **{"image_token": IMAGE, "video_token": 92, "image_start_token": START, "image_end_token": END},
    **{"slice_start_token": 90, "slice_end_token": 91, "image_id_start_token": 88, "image_id_end_token": 87},
}
MINICPM, FINE = {"patch_size": 4, "scale_resolution": 32, "max_slice_nums": 2}, {"downsample_mode": "4x"}
LLAVA, PINS = {IMAGE: "<image>", 92: "<video>"}, [[12, 24], [24, 12], [24, 24], [36, 12]]
CROPPED = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}}
MINIMAX = {IMAGE: "]<]image[>[", 92: "]<]video[>[", START: "]<]start of image[>[", END: "]<]end of image[>["}
GEMMA = {IMAGE: "<|image|>", START: "<|image>", END: "<image|>", SOUND: "<|audio|>", 92: "<|audio>", 91: "<audio|>"}
GEMMA |= {90: "<|video|>"}
GEMMA_NAMES = {
    **{"image_token": IMAGE, "boi_token": START, "eoi_token": END},
    **{"audio_token": SOUND, "boa_token": 92, "eoa_token": 91},
}

WHOLE = {
    "idefics2": Prompt(
        {IMAGE: "<image>", START: "<fake_token_around_image>", 92: "<end_of_utterance>"},
        {"image_token": IMAGE, "image_boundary_token": START},
        {"size": {"shortest_edge": 8, "longest_edge": 24}},
        settings={"image_seq_len": 5},
    ),
    "ovis2": Prompt(
        {90: "<image>", IMAGE: "<IMG_ATOM>", START: "<IMG_START>", END: "<IMG_END>", 92: "<IMG_GRID>"},
        images={"size": {"height": 24, "width": 24}},
        settings={"image_seq_length": 9},
    ),
    "video_llava": Prompt(LLAVA, images=CROPPED, settings={"patch_size": 4}),
    "llava_next_video": Prompt(LLAVA, images=CROPPED | {"image_grid_pinpoints": PINS}, settings={"patch_size": 4}),
    "perception_lm": Prompt(
        {IMAGE: "<|image|>", 92: "<|video|>"},
        {"image_token": IMAGE, "video_token": 92},
        {"tile_size": 24, "max_num_tiles": 2},
        settings={"patch_size": 6, "pooling_ratio": 2},
        text="t5 @ t7",
    ),
    "hy_v4_vl": Prompt(PADS, {}, QWEN),
    "lfm3_vl": Prompt(PADS, {}, QWEN),
    "minimax_m3_vl": Prompt(MINIMAX, {}, QWEN),
    "muse_glimmer": Prompt(MUSE, {}, QWEN),
    "muse_spark": Prompt(MUSE, {}, QWEN),
    "minicpmv4_7": Prompt(SLICES, SLICE_NAMES, MINICPM),
    "minicpm_ocr": Prompt(SLICES, SLICE_NAMES, MINICPM | FINE, text="@ t7", of_video=FINE),
    "omniasr": Prompt(
        {SOUND: "<extra_id_1>"},
        settings={"conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2]},
        text="t5 @ t7",
        heard=True,
    ),
}
"""By the name of the case."""

OTHER_SIZES = {
    "minicpmv4_6": Prompt(SLICES, SLICE_NAMES, MINICPM),
    "got_ocr2": Prompt({IMAGE: "<imgpad>", START: "<img>", END: "</img>"}),
    "molmo2": Prompt(
        {IMAGE: "<im_patch>", START: "<im_start>", END: "<im_end>", 92: "<im_col>", 91: "<|image|>", 90: "<|video|>"}
    ),
    "step3p7": Prompt(
        {IMAGE: "<im_patch>", START: "<im_start>", END: "<im_end>", 91: "<patch_start>", 90: "<patch_end>"}
    ),
    "gemma4_unified": Prompt(GEMMA, GEMMA_NAMES),
    "gemma4_unified heard": Prompt(GEMMA, GEMMA_NAMES, heard=True),
    "muse_spark heard": Prompt(MUSE, heard=True),
    "inkling heard": Prompt({IMAGE: "<i>", SOUND: "<a>"}, {"image_token": IMAGE, "audio_token": SOUND}, heard=True),
    "vibevoice_asr heard": Prompt(
        {SOUND: "<|box_start|>", START: "<|object_ref_start|>", END: "<|object_ref_end|>"}, heard=True
    ),
    "moss_transcribe_diarize heard": Prompt({SOUND: "<|audio_pad|>", START: "<|audio_start|>"}, heard=True),
}
"""Processors whose images or sounds have other sizes than a tiny model takes."""


OTHER_TYPES = {"inkling": "inkling_mm_model"}
"""The `model_type` of cases that have another name."""


def processor_of(name: str, prompt: Prompt) -> Any:
    model_type = OTHER_TYPES.get(name, name)
    cls = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    words = dict(prompt.words)
    tokenizer = word_tokenizer(
        words, pad_token="t0", bos_token="t1", extra_special_tokens={n: words[i] for n, i in prompt.named.items()}
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(words.values())})
    parts: dict[str, Any] = {"tokenizer": tokenizer}
    for part in cls.get_attributes():
        if part == "image_processor":
            backends = IMAGE_PROCESSOR_MAPPING_NAMES[model_type]
            parts[part] = getattr(transformers, backends.get(BACKEND) or next(iter(backends.values())))(**prompt.images)
        elif part == "video_processor":
            found = VIDEO_PROCESSOR_MAPPING_NAMES[model_type]
            found = next(iter(found.values())) if isinstance(found, dict) else found
            if found is None:
                raise ImportError("the processor of videos needs torchvision")
            parts[part] = getattr(transformers, found)(**prompt.of_video)
        elif part != "tokenizer":
            parts[part] = getattr(transformers, FEATURE_EXTRACTOR_MAPPING_NAMES[model_type])(**prompt.sounds)
    return cls(**parts, **prompt.settings)


def encoder_of(name: str, prompt: Prompt, whole: Any, tmp_path: Path) -> tuple[Any, Any, str]:
    """Returns the model of a case, what encodes its prompts, and the text of the prompt."""
    try:
        processor = processor_of(name, prompt)
    except ImportError as e:
        pytest.skip(str(e).strip().partition("\n")[0])
    case = made(name)
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(case.config_json()))
    model: Any = tpuconv.load(whole(name)[1])
    encoder = prompt_encoder(processor.tokenizer, model.config, lambda: tmp_path, case.parts)
    assert encoder.preparer is not None
    return model, encoder, prompt.text.replace("@", encoder.preparer.marker_of(prompt.kind)[0])


@pytest.mark.parametrize("name", WHOLE)
def test_logits_of_prompts_are_those_of_the_release(name, whole, tmp_path):
    prompt = WHOLE[name]
    model, encoder, text = encoder_of(name, prompt, whole, tmp_path)
    case = made(name)
    ids, features = encoder.encode_with(text, **{f"{prompt.kind}s": prompt.items})
    given = {"audio" if prompt.heard else "images": list(prompt.items)}
    returned = processor_of(name, prompt)(text=[text], **given, return_tensors="pt")
    assert ids == returned["input_ids"][0].tolist()
    known = signature(case.model.forward).parameters
    with torch.no_grad():
        want = case.model(**{key: value for key, value in returned.items() if key in known}).logits.numpy()
    ids_BT = np.array([ids])
    assert difference(np.asarray(model(ids_BT, seen=model.see(ids_BT, **features))), want) < 2e-5


@pytest.mark.parametrize("case", OTHER_SIZES)
def test_features_of_prompts_are_those_that_the_model_takes(case, whole, tmp_path):
    name, prompt = case.split()[0], OTHER_SIZES[case]
    model, encoder, text = encoder_of(name, prompt, whole, tmp_path)
    ids, features = encoder.encode_with(text, **{f"{prompt.kind}s": prompt.items})
    of_tiny = made(name).features
    takes = {each for part in made(name).parts for each in getattr(model, part).takes}
    assert features
    assert features.keys() <= takes
    assert all(features[each].ndim == of_tiny[each].ndim for each in features.keys() & of_tiny.keys())
    assert (SOUND if prompt.heard else IMAGE) in ids


def test_an_image_without_a_marker_stands_before_the_text(whole, tmp_path):
    prompt = WHOLE["idefics2"]
    _, encoder, _ = encoder_of("idefics2", prompt, whole, tmp_path)
    assert encoder.encode_with("t7", IMAGES[:1])[0] == encoder.encode_with("<image>t7", IMAGES[:1])[0]
    with pytest.raises(UsageError, match="the prompt has 2 markers <image> for 1 image"):
        encoder.encode_with("<image> <image>", IMAGES[:1])


def test_a_processor_that_takes_a_single_image_is_not_run(tmp_path):
    """Fuyu's, which places it itself."""
    processor = processor_of("fuyu", Prompt({IMAGE: "|SPEAKER|", 94: "|NEWLINE|", 92: "<0x04>", 1: "<s>"}))
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "fuyu"}')
    with pytest.raises(UsageError, match="transformers has no processor for fuyu") as e:
        Preparer(tmp_path, processor.tokenizer).prepared("", IMAGES[:1])
    assert "prepare ids and features" in e.value.hint


@pytest.mark.parametrize(("name", "package"), [("molmo2", "torchvision"), ("granite_speech", "torchaudio")])
def test_a_package_that_a_processor_needs_is_named(name, package, tmp_path, monkeypatch):
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    word_tokenizer({}).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(UsageError, match=f"the processor in .* needs {package}, which is not installed") as e:
        Preparer(tmp_path, None).marker_of("image")
    assert f"pip install {package}" in e.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("module", ["test_whole_processors.py", "test_pictures.py"])
def test_beside_torchvision(module):
    tests = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-rs",
        str(tests / module),
    ]
    path = os.pathsep.join([*torchvision_path(), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "needs torchvision" not in done.stdout
