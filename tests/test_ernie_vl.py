"""ERNIE 4.5 VL beside its case of `helpers.sights`: clips, who takes which experts, keys of config.json."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.logits import forward
from helpers.sights import END, IMAGE, START, noise
from helpers.sights_ernie import VIDEO
from helpers.whole_sights import difference, made
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.common.mrope import COLUMN, ROW, TIME
from tpuconv.models.registry import find_family
from tpuconv.notation.sizes import sets_of_layers
from tpuconv.verify.reference_types import reference_config

NAME = "ernie4_5_vl_moe"
RELEASE: dict[str, Any] = {
    "model_type": NAME,
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "mlp_layer_types": ["dense", *["sparse"] * 27],
        "moe_intermediate_size": [1536, 512],
        "moe_k": 6,
        "moe_num_experts": 64,
        "num_attention_heads": 20,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"mrope_section": [22, 22, 20], "rope_theta": 500000.0, "rope_type": "default"},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 5120},
}


KEYS_OF_TRANSFORMERS = ("rope_parameters", "mlp_layer_types")
OF_ITS_OWN_CODE: dict[str, Any] = {
    "model_type": "ernie4_5_moe_vl",
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLMoEConfig"},
    **{key: value for key, value in RELEASE["text_config"].items() if key not in KEYS_OF_TRANSFORMERS},
    **{"moe_num_experts": [64, 64], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28]},
    **{"moe_layer_interval": 1, "moe_use_aux_free": True, "moe_gate": "topk", "rope_3d": True, "freq_allocation": 20},
    **{"rope_theta": 500000, "rope_scaling": {"type": "default", "mrope_section": [22, 22, 20]}},
    **{"im_patch_id": 100295, "spatial_conv_size": 2, "temporal_conv_size": 2, "tie_word_embeddings": True},
    "vision_config": {
        **{"model_type": "DFNRope_vision_transformer", "depth": 32, "embed_dim": 1280, "hidden_size": 1280},
        **{"mlp_ratio": 4, "num_heads": 16, "patch_size": 14, "vit_first_fwd_bsz": 128, "attn_sep": True},
    },
}


def test_the_config_of_its_own_code_is_read(tmp_path: Path) -> None:
    family = find_family(OF_ITS_OWN_CODE)
    config = family.check_config(OF_ITS_OWN_CODE, parts=("vision",)).config
    assert config == find_family(RELEASE).read_config(RELEASE, parts=("vision",))
    (tmp_path / "config.json").write_text(json.dumps(OF_ITS_OWN_CODE))
    theirs = json.loads(reference_config(tmp_path).to_json_string(use_diff=False))
    assert config == family.read_config(theirs, parts=("vision",))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"moe_num_experts": [64, 32]}, "moe_num_experts=[64, 32] differs between text and images"),
        ({"moe_layer_start_index": [1, 2]}, "the layers with experts=.* differs between text and images"),
        ({"moe_layer_end_index": [29]}, "no numbers of layers"),
        ({"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid' is not implemented"),
        ({"freq_allocation": 16}, "freq_allocation=16"),
        ({"vision_config": [1]}, r"vision_config=\[1\] is not an object"),
        ({"vision_config": {"mlp_ratio": "4"}}, "is not a number"),
        ({"spatial_conv_size": 3, "vision_config": {"spatial_merge_size": 2}}, "spatial_conv_size=3"),
    ],
)
def test_other_values_of_its_own_code_are_refused(change: dict[str, Any], fault: str) -> None:
    raw = OF_ITS_OWN_CODE | change
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault.replace("[64, 32]", r"\[64, 32\]")):
        find_family(raw).read_config(raw, parts=("vision",))


def test_the_released_sizes() -> None:
    config = find_family(RELEASE).read_config(RELEASE, parts={"vision": None})
    assert (config.sizes["M"], config.sizes["image_width"], config.sizes["W"]) == (1536, 512, 3072)
    assert config.layer_sets["I"] == (0,)
    assert config.layer_sets["image_experts"] == range(64, 128)
    assert "image_experts" not in sets_of_layers(config)
    axes = config.mrope.axis_of_angles(64)
    assert axes == [*(ROW, COLUMN) * 22, *(TIME,) * 20]
    assert config.parts["vision"].block_tokens == (101304, 101305, 101306, 101307)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"moe_intermediate_size": [1536]}, "are not the widths of experts for text and images"),
        ({"moe_intermediate_size": [1536, 0]}, "are not the widths"),
        ({"moe_k": 65}, "moe_k=65 is more than moe_num_experts=64"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries"),
        ({"rope_parameters": {"mrope_section": [22, 20, 22]}}, "are not rows, as many columns, and time of 64 pairs"),
        ({"rope_parameters": {"mrope_section": [22, 22]}}, "are not rows"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear' is not implemented"),
        ({"use_bias": True}, "use_bias=True"),
    ],
)
def test_keys_that_the_reference_does_not_have_are_refused(change: dict[str, Any], fault: str) -> None:
    raw = RELEASE | {"text_config": RELEASE["text_config"] | change}
    with pytest.raises((ConfigError, UnsupportedConfig)) as error:
        find_family(raw).read_config(raw)
    assert fault in "\n".join((error.value.message, *error.value.details))


@pytest.mark.slow
def test_a_text_without_images_does_not_run_the_experts_for_images(whole: Any) -> None:
    model: Any = tpuconv.load(whole(NAME)[1])
    for layer in model.layers:
        if (experts := getattr(layer, "moe", None)) is not None:
            experts.images.down.kernel[...] = jnp.full_like(experts.images.down.kernel[...], jnp.nan)
    case = made(NAME)
    assert np.isfinite(model(np.array([[5, 9, 11, 7]]))).all()
    seen = model.see(case.ids_BT, case.mask_BT, **case.features)
    assert not np.isfinite(model(case.ids_BT, case.mask_BT, seen=seen)).all()


@pytest.mark.slow
def test_clips_are_those_of_the_reference(whole: Any) -> None:
    """The reference takes clips as videos alone, whose placeholders have another id."""
    case, grids = made(NAME), np.array([(4, 4, 6), (2, 6, 4), (1, 4, 4)])
    model: Any = tpuconv.load(whole(NAME)[1])
    patches = noise(int(grids.prod(axis=1).sum()), 3 * 4 * 4, seed=2)
    ids_BT = np.array([[5, START, *[IMAGE] * 12, END, 9, START, *[IMAGE] * 6, END, START, *[IMAGE] * 4, END, 3]])
    mask_BT = np.ones(ids_BT.shape, bool)
    of_videos = (ids_BT == IMAGE) & (np.arange(ids_BT.shape[1]) < 23)
    clips = int(grids[:2].prod(axis=1).sum())
    features = {
        **{"pixel_values_videos": patches[:clips], "video_grid_thw": grids[:2]},
        **{"pixel_values": patches[clips:], "image_grid_thw": grids[2:]},
    }
    want = case.reference(np.where(of_videos, VIDEO, ids_BT), mask_BT, features)
    seen = model.see(ids_BT, mask_BT, pixel_values=patches, image_grid_thw=grids)
    have = np.asarray(forward(model, ids_BT, mask_BT, seen=seen))
    assert difference(have, want) < case.tolerance


def test_a_clip_of_an_odd_number_of_frames_is_an_error(whole: Any) -> None:
    model: Any = tpuconv.load(whole(NAME)[1])
    with pytest.raises(UsageError, match="a clip of 3 frames, which are joined in pairs"):
        model.see(np.full((1, 4), IMAGE), pixel_values=noise(48, 48), image_grid_thw=np.array([(3, 4, 4)]))
