"""MiniCPM-o, whose images and sounds have the same placeholder."""

import json
import re
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.sights_released import HEARD, SLICE
from helpers.whole_sights import difference, made
from tpuconv import api
from tpuconv.errors import ConfigError, UsageError

NAME = "minicpmo_2_6"


@pytest.fixture(scope="module")
def model(whole) -> Any:
    return tpuconv.load(whole(NAME)[1])


def of_part(part: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One text with an image, or with a sound whose first step is behind the text, and their features."""
    features = made(NAME).features
    if part == "vision":
        names, ids = ("pixel_values", "tgt_sizes"), [5, *SLICE, 4]
        pixels, sizes = (features[name] for name in names)
        return np.array([ids]), {"pixel_values": pixels[..., : 4 * 6], "tgt_sizes": sizes[:1]}
    ids = [HEARD, *[SLICE[1]] * 10, 90, HEARD, *[SLICE[1]] * 6, 90, 4]
    return np.array([ids]), {name: features[name][:1] for name in ("audio_features", "audio_feature_lens")}


@pytest.mark.parametrize("part", ["vision", pytest.param("audio", marks=pytest.mark.slow)])
def test_images_or_sounds_alone(part, model):
    ids_BT, features = of_part(part)
    mask_BT = np.ones(ids_BT.shape, bool)
    want = made(NAME).reference(ids_BT, mask_BT, features)
    have = np.asarray(model(ids_BT, seen=model.see(ids_BT, **features)))
    assert difference(have, want) < 1e-5


@pytest.mark.parametrize(("part", "other"), [("vision", "audio"), ("audio", "vision")])
def test_placeholders_of_one_part_take_no_features_of_another(part, other, model):
    ids_BT, _ = of_part(part)
    with pytest.raises(UsageError, match=f"and the features of {other} need|pixel_values is missing|audio_features"):
        model.see(ids_BT, **of_part(other)[1])


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"audio_features": np.ones((1, 10, 161))}, "161 frames, more than 160"),
        (
            {"audio_feature_lens": np.array([64])},
            "is [64], audio_features has 1 sounds of 63 frames",
        ),
        ({"audio_feature_lens": np.array([[3], [5]])}, "audio_feature_lens is [3, 5]"),
    ],
)
def test_sounds_that_do_not_fit_are_refused(changed, fault, model):
    ids_BT, features = of_part("audio")
    with pytest.raises(UsageError, match=re.escape(fault)):
        model.see(ids_BT, **{**features, **changed})


def test_a_tokenizer_without_the_token_before_sounds(whole, tmp_path):
    src, _ = whole(NAME)
    for file in src.iterdir():
        text = file.read_text().replace("<|audio_start|>", "<|another|>") if file.suffix == ".json" else None
        (tmp_path / file.name).write_bytes(file.read_bytes() if text is None else text.encode())
    api.convert(tmp_path, out := tmp_path.with_name("out"))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "minicpmo"
    ids_BT, features = of_part("audio")
    with pytest.raises(ConfigError, match=r"does not have the token <\|audio_start\|>"):
        tpuconv.load(out).see(ids_BT, **features)
