"""Llama 3.2 Vision: layers that attend to images."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

import tpuconv
from helpers.logits import forward
from helpers.sights import IMAGE
from helpers.whole_sights import made
from tpuconv.errors import ConfigError, UsageError
from tpuconv.models.registry import find_family
from tpuconv.models.seeing import SeeingGenerator
from tpuconv.models.towers.mllama.family import MLLAMA_VIT
from tpuconv.models.towers.mllama.modules import tiles_seen

NAME = "mllama_of_several_images"
OLD_KEYS: Mapping[str, Any] = {
    **{"_name_or_path": "", "add_cross_attention": False, "architectures": None, "bad_words_ids": None},
    **{"chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "diversity_penalty": 0.0, "do_sample": False},
    **{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "is_decoder": False},
    **{"is_encoder_decoder": False, "length_penalty": 1.0, "max_length": 20, "num_beams": 1, "pruned_heads": {}},
    **{"return_dict": True, "temperature": 1.0, "tie_encoder_decoder": False, "torchscript": False, "top_k": 50},
    **{"torch_dtype": "bfloat16", "use_bfloat16": False},
}
"""Some of the keys that transformers 4.45 wrote into each object of config.json."""
RELEASE: Mapping[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"],
    "image_token_index": 128256,
    "model_type": "mllama",
    "text_config": {
        **OLD_KEYS,
        **{"bos_token_id": 128000, "cross_attention_layers": list(range(3, 40, 5)), "dropout": 0},
        **{"eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096},
        **{"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072},
        **{"model_type": "mllama_text_model", "num_attention_heads": 32, "num_hidden_layers": 40},
        **{"num_key_value_heads": 8, "pad_token_id": 128004, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
        "rope_scaling": {
            **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
        **{"tie_word_embeddings": False, "use_cache": True, "vocab_size": 128256},
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "vision_config": {
        **OLD_KEYS,
        **{"attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280, "image_size": 560},
        **{"intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120, "max_num_tiles": 4},
        **{"model_type": "mllama_vision_model", "norm_eps": 1e-05, "num_channels": 3, "num_global_layers": 8},
        **{"num_hidden_layers": 32, "patch_size": 14, "tie_word_embeddings": True, "vision_output_dim": 7680},
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    },
}
LARGER = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 100, "num_attention_heads": 64}
"""The sizes of the text model of 90B."""


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [({}, 10_670_220_835), (LARGER | {"cross_attention_layers": list(range(3, 100, 5))}, 88_593_355_323)],
)
def test_releases_have_the_parameters_that_transformers_counts(sizes: dict[str, Any], parameters: int) -> None:
    raw = {**RELEASE, "text_config": RELEASE["text_config"] | sizes}
    family = find_family(raw)
    family.check_config(raw)
    config = family.read_config(raw, parts=("vision",))
    bindings = family.table_without_release(parts=config.parts).bind(config)
    assert sum(prod(shape) for each in bindings for shape in each.dst_shapes().values()) == parameters
    assert config.period == 5  # so that layers can be stacked


@given(st.lists(st.sampled_from([5, IMAGE]), min_size=1, max_size=12), st.integers(1, 4))
def test_tokens_attend_to_the_images_of_the_processor(ids, tiles):
    counts = [1 + number % tiles for number in range(ids.count(IMAGE))]
    if not counts:
        return
    want = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(ids, IMAGE)], [counts], tiles, len(ids)
    )
    assert np.array_equal(tiles_seen(np.array([ids]) == IMAGE, np.array([counts]), tiles), want)


def test_the_mask_of_a_processor_may_be_left_out(whole):
    case, model = made(NAME), tpuconv.load(whole(NAME)[1])
    given_, without = case.features, {k: x for k, x in case.features.items() if k != "cross_attention_mask"}
    found = (model.see(case.ids_BT, case.mask_BT, **features).across for features in (given_, without))
    have, want = ((each.features_BSD, each.sees_BTU) for each in found)
    assert all(map(np.array_equal, have, want))


@pytest.mark.slow
def test_text_is_generated_after_images(whole):
    """Prompts with other numbers of images one after the other, of other lengths, on a cache with static shapes."""
    case, model = made(NAME), tpuconv.load(whole(NAME)[1])
    generator = SeeingGenerator(model)
    for rows, images in ((case.rows, slice(None)), (case.rows[1:], slice(0, 1))):
        features = {name: x[-len(rows) :] for name, x in case.features.items() if name != "cross_attention_mask"}
        features = {name: x[:, images] for name, x in features.items()}
        have = np.stack(list(generator(rows, 4, features=features)), axis=1)
        ids_BT, mask_BT = case.ids_BT[-len(rows) :], case.mask_BT[-len(rows) :]
        for token in range(4):
            seen = model.see(ids_BT, mask_BT, **features)
            chosen_B = np.asarray(forward(model, ids_BT, mask_BT, seen=seen))[:, -1].argmax(axis=-1)
            assert np.array_equal(chosen_B, have[:, token])
            ids_BT = np.concatenate([ids_BT, chosen_B[:, None]], axis=1)
            mask_BT = np.pad(mask_BT, ((0, 0), (0, 1)), constant_values=True)


def test_keys_of_images_are_rounded_in_an_int8_cache(whole):
    case, model = made(NAME), tpuconv.load(whole(NAME)[1])
    seen = model.see(case.ids_BT, case.mask_BT, **case.features)
    cache = model.init_cache(len(case.rows), case.ids_BT.shape[1], jnp.int8)
    have, cache = forward(model, case.ids_BT, case.mask_BT, cache=cache, seen=seen)
    kv, slots = cache.layers[1]
    assert kv.k_BSKH.dtype == jnp.int8
    assert kv.k_BSKH.shape[1] == slots.is_seen_BS.shape[1] == model.vision.slots(case.features)
    want = np.asarray(forward(model, case.ids_BT, case.mask_BT, seen=seen))
    error = np.abs(np.asarray(have) - want)[case.mask_BT].max() / np.abs(want).max()
    assert 0 < error < 0.05


def test_features_of_another_shape_are_refused(whole):
    case, model = made(NAME), tpuconv.load(whole(NAME)[1])
    features = case.features
    for changed, fault in (
        ({"pixel_values": features["pixel_values"][:, :, 1:]}, "the model takes 3 tiles of 12 x 12"),
        ({"aspect_ratio_ids": features["aspect_ratio_ids"] + 5}, "aspect_ratio_ids has 9, and the model knows 1 to 5"),
        ({"cross_attention_mask": features["cross_attention_mask"][:, :, :1]}, "cross_attention_mask has shape"),
    ):
        with pytest.raises(UsageError, match=fault):
            model.see(case.ids_BT, case.mask_BT, **{**features, **changed})


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"intermediate_layers_indices": [3, 40], "vision_output_dim": 3840}, "intermediate_layers_indices has [40]"),
        ({"vision_output_dim": 1280}, "vision_output_dim=1280 is not 7680"),
        ({"attention_heads": 7}, "no multiple of attention_heads=7"),
        ({"num_attention_heads": 7}, "no multiple of attention_heads=7"),
    ],
)
def test_configs_that_contradict_themselves(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MLLAMA_VIT.config.from_hf(keys)
    assert any(fault in detail for detail in caught.value.details)
