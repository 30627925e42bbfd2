"""Gemma 3n whole: images of any size, sounds shorter than their placeholders, ids that the projectors embed."""

from math import prod
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.logits import forward
from helpers.sights import noise
from helpers.sights_gemma3n import END_OF_IMAGE, IMAGE, IMAGES, SOUND, SOUNDS
from helpers.whole_sights import difference, made
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.registry import get_family
from tpuconv.models.towers.gemma3n.family import GEMMA3N_USM
from tpuconv.models.towers.mobilenet.family import MOBILENET
from tpuconv.verify.sights import feature_error

E4B_PARAMETERS = 7_849_978_192
"""Of the release."""
UNREAD = 15 * (2 * 2048 * 512 + 256)
"""Of them the keys, values and norms of the layers that use those of an earlier one."""


def outer(**changes: Any) -> dict[str, Any]:
    return {"vision_config": {}, "audio_config": {}, "text_config": {}, "model_type": "gemma3n", **changes}


def test_a_release_has_the_sizes_that_the_table_says() -> None:
    family = get_family("gemma3n")
    config = family.read_config(outer(), parts=("vision", "audio"))
    rows = family.table_without_release(parts=config.parts).bind(config)
    shapes = {name: shape for row in rows for name, shape in row.src_shapes().items()}
    assert sum(map(prod, shapes.values())) + UNREAD == E4B_PARAMETERS
    encoder = [prod(shape) for name, shape in shapes.items() if name.startswith("model.vision_tower.timm_model.")]
    assert (len(encoder), sum(encoder)) == (548, 294_126_912)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(135, 101), (48, 16), (144, 80), (96, 240)])
def test_images_of_any_size(size: tuple[int, int], whole: Any) -> None:
    """Some have more rows than features, some fewer, some no multiple."""
    import torch

    images, model = noise(2, 3, *size), tpuconv.load(whole("gemma3n")[1])
    with torch.no_grad():
        want = made("gemma3n").model.model.get_image_features(torch.tensor(images)).pooler_output.numpy()
    have = model.see(np.full((2, IMAGES), IMAGE), pixel_values=images).features_XD[: 2 * IMAGES]
    assert feature_error(np.asarray(have).reshape(want.shape), want) < 1e-5


@pytest.mark.slow
def test_ids_behind_an_image_have_the_embeddings_of_the_projector(whole: Any) -> None:
    case, model = made("gemma3n"), tpuconv.load(whole("gemma3n")[1])
    ids_BT, pixels = np.array([[4, *[IMAGE] * IMAGES, END_OF_IMAGE, 7]]), case.features["pixel_values"][:1]
    seen = model.see(ids_BT, pixel_values=pixels)
    before = np.asarray(forward(model, ids_BT, seen=seen))
    model.vision.projector.embedding[...] = model.vision.projector.embedding[...].at[0].multiply(-1)
    after = np.asarray(forward(model, ids_BT, seen=model.see(ids_BT, pixel_values=pixels)))
    assert np.array_equal(before[:, : IMAGES + 1], after[:, : IMAGES + 1])
    assert difference(after[:, IMAGES + 1 :], before[:, IMAGES + 1 :]) > 0.01


@pytest.mark.slow
def test_sounds_longer_than_their_placeholders_are_refused(whole: Any) -> None:
    model: Any = tpuconv.load(whole("gemma3n")[1])
    ids_BT = np.full((1, SOUNDS), SOUND)
    with pytest.raises(UsageError, match="73 frames, which make 7 features, and the text has 6 placeholders"):
        model.see(ids_BT, input_features=noise(1, 73, 10), input_features_mask=np.ones((1, 73), bool))
    model.see(ids_BT, input_features=noise(1, 72, 10), input_features_mask=np.ones((1, 72), bool))


@pytest.mark.parametrize(
    ("tower", "keys", "fault"),
    [
        (MOBILENET, {"model_args": {"msfa_output_resolution": [16]}}, "msfa_output_resolution=[16]"),
        (MOBILENET, {"model_args": {"channel_multiplier": -0.5}}, "channel_multiplier=-0.5 is not positive"),
        (MOBILENET, {"model_args": {"channel_multiplier": "1"}}, "channel_multiplier='1' is not of type"),
        (GEMMA3N_USM, {"sscp_conv_channel_size": [8]}, "sscp_conv_channel_size=[8] are not 2"),
        (GEMMA3N_USM, {"conf_num_attention_heads": 5}, "hidden_size=1536 is no even number for each of 5 heads"),
    ],
)
def test_encoders_that_make_no_sense_are_refused(tower: Any, keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tower.config.from_hf(keys)
    assert any(fault in detail for detail in caught.value.details)


@pytest.mark.parametrize(
    ("tower", "keys", "fault"),
    [
        (MOBILENET, {"architecture": "mobilenetv5_base"}, "architecture='mobilenetv5_base'"),
        (MOBILENET, {"model_args": {"stem_size": 32}}, "model_args={'stem_size': 32}"),
        (GEMMA3N_USM, {"conf_attention_context_right": 1}, "attention_context_right=1"),
        (GEMMA3N_USM, {"sscp_conv_stride_size": [[2, 2], [1, 2]]}, "sscp_conv_stride_size="),
    ],
)
def test_encoders_that_are_not_implemented_are_refused(tower: Any, keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        tower.config.from_hf(keys)
    assert fault in caught.value.message


@pytest.mark.parametrize(
    ("keys", "part", "fault"),
    [
        ({"vision_soft_tokens_per_image": 64}, "vision", "=64, and the encoder makes 256 features"),
        ({"text_config": {"vocab_size": 262000}}, "audio", "vocab_size=262000 of the text model ends outside"),
    ],
)
def test_configs_whose_parts_do_not_fit_are_refused(keys: dict[str, Any], part: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_family("gemma3n").read_config(outer(**keys), parts=(part,))
    assert fault in caught.value.message
