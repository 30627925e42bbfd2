"""Multimodal releases with code of their own: their config.json, and the prompts that their processors write."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, restore
from helpers.families import FIRST, save
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.pictures import Preparer
from tpuconv.models.registry import find_family

DOTS: Mapping[str, Any] = {
    "architectures": ["DotsOCRForCausalLM"],
    "model_type": "dots_ocr",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dots.DotsOCRConfig"},
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_token_id": 151665,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "attn_implementation": "flash_attention_2",
        "embed_dim": 1536,
        "gradient_checkpointing": False,
        "hidden_size": 1536,
        "init_merger_std": 0.02,
        "initializer_range": 0.02,
        "intermediate_size": 4224,
        "is_causal": False,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 42,
        "patch_size": 14,
        "post_norm": True,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "use_bias": False,
    },
    "vocab_size": 151936,
}
RELEASES: Mapping[str, tuple[Mapping[str, Any], float]] = {"dots_ocr": (DOTS, 3.04e9)}
"""By case the config.json of a release, and the number of its parameters."""


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_has_its_size(name: str) -> None:
    raw, size = RELEASES[name]
    family = find_family(raw)
    report = family.check_config(raw, parts=("vision",))
    rows = family.table_without_release(parts=report.config.parts).bind(report.config)
    numbers = [prod(shape) for row in rows for shape in row.src_shapes().values()]
    assert sum(numbers) == pytest.approx(size, rel=0.005)
    assert not report.ignored


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("dots_ocr", {"attention_bias": False}, "attention_bias=False is not implemented"),
        ("dots_ocr", {"vision_config": {"use_bias": True}}, "use_bias=True of an encoder is not implemented"),
        ("dots_ocr", {"vision_config": {"post_norm": False}}, "post_norm=False of an encoder is not implemented"),
        ("dots_ocr", {"vision_config": {"temporal_patch_size": 2}}, "temporal_patch_size=2 of an encoder"),
        ("dots_ocr", {"vision_config": [1]}, r"vision_config=\[1\] is not an object"),
    ],
)
def test_other_values_are_refused(name: str, change: dict[str, Any], fault: str) -> None:
    raw = {**RELEASES[name][0], **change}
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault):
        find_family(raw).read_config(raw, parts=("vision",))


def test_the_text_of_dots_ocr_is_qwen2(tmp_path: Path) -> None:
    alone = save(FIRST["qwen2"], tmp_path / "text")
    text = json.loads((alone / "config.json").read_text())
    raw = {**text, **{key: DOTS[key] for key in ("architectures", "model_type", "attention_bias", "vision_config")}}
    write_checkpoint(tmp_path / "whole", raw, read_tensors(alone))
    for name in ("text", "whole"):
        api.convert(tmp_path / name, tmp_path / f"{name}-out")
    assert read_manifest(tmp_path / "whole-out").family == "dots_ocr.qwen2"
    assert_same(restore(tmp_path / "whole-out"), restore(tmp_path / "text-out"))


def test_prompts_of_dots_ocr(tmp_path: Path) -> None:
    """Its processor is Qwen2-VL's with other tokens, and patches are of one frame."""
    size = {"min_pixels": 3136, "max_pixels": 11289600}
    settings = {
        **{"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "DotsVLProcessor", **size},
        **{"patch_size": 14, "temporal_patch_size": 1, "merge_size": 2},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(DOTS))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 140, 3), dtype=np.uint8))
    found = Preparer(tmp_path, None).prepared("Read it.", [image])
    assert found.text == "<|img|>" + "<|imgpad|>" * 15 + "<|endofimg|>Read it."
    assert found.features["image_grid_thw"].tolist() == [[1, 6, 10]]
    processor = transformers.Qwen2VLImageProcessorPil
    own = {"mean": np.array(processor.image_mean), "std": np.array(processor.image_std)}
    pixels = (np.asarray(image) / 255 - own["mean"]) / own["std"]
    first = found.features["pixel_values"][1].reshape(3, 14, 14)
    np.testing.assert_allclose(first, pixels[:14, 14:28].transpose(2, 0, 1), atol=1e-5)
