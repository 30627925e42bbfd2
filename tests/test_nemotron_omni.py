"""Nemotron Omni as it is released: other keys of config.json, and tensors that transformers does not have."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.sights import IMAGE, SOUND, noise
from helpers.whole_sights import logits, made
from tpuconv import api
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.registry import find_family, get_family
from tpuconv.models.towers.parakeet.family import ParakeetConfig
from tpuconv.models.towers.parakeet.modules import distance_waves
from tpuconv.models.towers.radio.family import RadioConfig
from tpuconv.models.towers.radio.released import in_keys_of_radio

KIND = "NemotronH_Nano_Omni_Reasoning_V3"
LETTERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
LLM: Mapping[str, Any] = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": LETTERS},
    **{"hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2},
    **{"head_dim": 128, "intermediate_size": 1856, "vocab_size": 131072, "max_position_embeddings": 262144},
    **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856},
    **{"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2"},
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-05},
}
SOUNDS: Mapping[str, Any] = {
    **{"model_type": "parakeet", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 8, "num_mel_bins": 128, "conv_kernel_size": 9, "convolution_bias": False},
    **{"subsampling_factor": 8, "subsampling_conv_channels": 256, "subsampling_conv_kernel_size": 3},
    **{"subsampling_conv_stride": 2, "projection_hidden_size": 4096, "projection_bias": False},
    "sampling_rate": 16000,
}
RELEASE: Mapping[str, Any] = {
    "architectures": [KIND],
    "model_type": KIND,
    "auto_map": {"AutoModel": f"modeling.{KIND}"},
    **{"downsample_ratio": 0.5, "force_image_size": 512, "image_tag_type": "internvl", "patch_size": 16},
    **{"img_context_token": "<image>", "img_context_token_id": 18, "img_start_token": "<img>"},
    **{"img_end_token": "</img>", "norm_mean": [0.48, 0.46, 0.41], "norm_std": [0.27, 0.26, 0.28]},
    **{"max_sequence_length": 131072, "projector_hidden_size": 20480, "ps_version": "v2", "template": "nemotron6"},
    **{"sound_context_token": "<so_embedding>", "sound_context_token_id": 27, "use_thumbnail": True},
    **{"torch_dtype": "bfloat16", "video_pruning_rate": 0.7, "video_temporal_patch_size": 2, "vit_hidden_size": 1280},
    "llm_config": LLM,
    "sound_config": SOUNDS,
    "vision_config": {
        **{"args": {"model": "vit_huge_patch16_224", "max_num_patches": 13312}, "architectures": ["RADIOModel"]},
        **{"max_resolution": 2048, "patch_size": 16, "version": "radio_v2.5-h", "video_temporal_patch_size": 2},
        "separate_video_embedder": True,
    },
}
TEXT = SimpleNamespace(hidden_size=8, num_nextn_predict_layers=0)


def test_the_parts_of_the_release_have_the_sizes_of_its_config() -> None:
    report = find_family(RELEASE).check_config(RELEASE, parts=("vision", "audio"))
    vision, audio = (report.config.parts[part] for part in ("vision", "audio"))
    assert vision.tower == RadioConfig()
    assert audio.tower == ParakeetConfig(
        num_mel_bins=128, convolution_bias=False, attention_bias=False, scale_input=False
    )
    assert (vision.placeholder, audio.placeholder) == (18, 27)
    assert (vision.sizes["A"], audio.sizes["A"], report.config.num_hidden_layers) == (20480, 4096, 52)
    assert not report.ignored


def test_keys_of_transformers_win_over_those_of_releases() -> None:
    raw = {**RELEASE, "image_token_id": 19, "audio_token_id": None, "audio_config": {**SOUNDS, "num_mel_bins": 80}}
    config = find_family(raw).read_config(raw, parts=("vision", "audio"))
    vision, audio = (config.parts[part] for part in ("vision", "audio"))
    assert (vision.placeholder, audio.placeholder, audio.sizes["M"]) == (19, 27, 80)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"downsample_ratio": 0.25}, "downsample_ratio=0.25 is not implemented"),
        ({"ps_version": "v1"}, "ps_version='v1' is not implemented"),
        ({"vision_hidden_size": 1024}, "vision_hidden_size=1024, and the encoder has hidden_size=1280"),
        ({"video_temporal_patch_size": 4}, "video_temporal_patch_size=4, and the encoder has .*=2"),
        ({"vision_config": {"video_temporal_patch_size": 1}}, "video_temporal_patch_size=1 is less than two frames"),
        ({"vision_config": {"max_img_size": 8}}, "max_img_size=8 is less than patch_size=16"),
        ({"vision_config": {"num_attention_heads": 0}}, "num_attention_heads=0"),
        ({"audio_config": {"num_mel_bins": 20}}, "num_mel_bins=20 is no multiple of 8"),
        ({"audio_config": {"conv_kernel_size": 4}}, "conv_kernel_size=4 is even"),
        ({"audio_config": {"subsampling_factor": 4}}, "subsampling_factor=4 of an encoder is not implemented"),
        ({"audio_config": 3}, "audio_config=3 is not an object"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: dict[str, Any], fault: str) -> None:
    raw = {"vision_config": {}, "audio_config": {}, **keys}
    vision, audio = get_family("nemotron_h_omni.nemotron_h").modalities
    with pytest.raises((ConfigError, UnsupportedConfig)) as caught:
        (vision.read(raw, TEXT), audio.read(raw, TEXT))
    assert re.search(fault, "\n".join([caught.value.message, *caught.value.details]))


ARGS: Mapping[str, Any] = {
    **{"model": "vit_large_patch16_224", "cpe_max_size": 1024, "cls_token_per_teacher": True, "register_multiple": 8},
    **{"cpe_num_registers": None, "teachers": [{"name": "a"}, {"name": "b", "use_summary": False}, {"name": "a"}]},
}


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, {"num_cls_tokens": 2, "num_registers": 6, "max_img_size": 1024, "summary_idxs": (0, 2)}),
        ({"register_multiple": 2}, {"num_registers": 2}),
        ({"register_multiple": None}, {"num_registers": 0}),
        ({"cpe_num_registers": 5}, {"num_registers": 5}),
        ({"cls_token_per_teacher": False}, {"num_cls_tokens": 1, "num_registers": 7, "summary_idxs": None}),
        ({"model": "vit_base_patch16_224"}, {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}),
    ],
)
def test_sizes_of_radio_follow_from_the_arguments_of_its_training(args: dict[str, Any], wanted: dict[str, Any]) -> None:
    vision = in_keys_of_radio({"args": {**ARGS, **args}, "patch_size": 16})
    found = RadioConfig.from_hf(vision)
    assert {key: getattr(found, key) for key in wanted} == wanted
    assert in_keys_of_radio({"args": ARGS, "hidden_size": 9})["hidden_size"] == 9


@pytest.mark.parametrize(
    ("vision", "fault"),
    [
        ({"args": {"model": "vit_giant"}}, "args.model='vit_giant' is not implemented"),
        ({"args": {"model": ["vit_giant"]}}, "args.model=.* is not implemented"),
        ({"args": {"model_norm": True}}, "args.model_norm=true is not implemented"),
        ({"args": {"teachers": 3}}, "args.teachers=3 are no objects with names"),
        ({"args": {"teachers": [3]}}, "args.teachers=.* are no objects with names"),
        ({"args": {**ARGS, "register_multiple": -2}}, "register_multiple=-2"),
        ({"args": {**ARGS, "cpe_num_registers": "many"}}, "cpe_num_registers='many'"),
        ({"args": 3}, "args=3 is not an object"),
        ({"vitdet_window_size": 16}, "vitdet_window_size=16"),
    ],
)
def test_another_radio_is_refused(vision: dict[str, Any], fault: str) -> None:
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault):
        RadioConfig.from_hf(in_keys_of_radio(vision))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers writes it, whose outputs of attention and MLP are scaled by 1, and with the keys and
    tensors of the release."""
    folder = tmp_path_factory.mktemp("nemotron")
    made("nemotron_h_omni").save(folder / "written")
    config, tensors = json.loads((folder / "written" / "config.json").read_text()), read_tensors(folder / "written")
    tensors = {name: np.ones_like(x) if "lambda1" in name else x for name, x in tensors.items()}
    write_checkpoint(folder / "hf", config, tensors)
    text, audio, width = (config.pop(key) for key in ("text_config", "audio_config", "vision_hidden_size"))
    of_release = {key: x for key, x in RELEASE.items() if key not in config}
    ids = {"img_context_token_id": config.pop("image_token_id"), "sound_context_token_id": config.pop("audio_token_id")}
    for config_of, key in ((audio, "attention_bias"), (audio, "scale_input"), (text, "time_step_limit")):
        del config_of[key]
    raw = of_release | config | ids | {"model_type": KIND, "architectures": [KIND], "llm_config": text}
    raw |= {"sound_config": {**audio, "model_type": "parakeet"}, "vit_hidden_size": width}
    tensors = {name: x for name, x in tensors.items() if "lambda1" not in name and "summary_idxs" not in name}
    tensors["vision_model.radio_model.input_conditioner.norm_mean"] = noise(3, 1, 1)
    tensors["vision_model.radio_model.input_conditioner.norm_std"] = noise(3, 1, 1)
    tensors["sound_encoder.encoder.feature_extractor.featurizer.fb"] = noise(1, 16, 257)
    tensors["sound_encoder.encoder.feature_extractor.featurizer.window"] = noise(400)
    write_checkpoint(folder / "src", raw, tensors)
    return folder


@pytest.fixture(scope="module")
def converted(release: Path) -> Path:
    api.convert(release / "src", release / "out")
    return release / "out"


def test_the_release_of_nemotron_sees_and_hears_what_transformers_does(
    release: Path, converted: Path, tmp_path: Path
) -> None:
    api.convert(release / "hf", tmp_path / "out")
    have, want = (logits(made("nemotron_h_omni"), tpuconv.load(each)) for each in (converted, tmp_path / "out"))
    np.testing.assert_allclose(have, want, atol=1e-6)


def test_tensors_of_the_release_come_back(release: Path, converted: Path, tmp_path: Path) -> None:
    """Those that the processor has too are among them."""
    api.export(converted, tmp_path / "back")
    want, have = read_tensors(release / "src"), read_tensors(tmp_path / "back")
    assert have.keys() == want.keys()
    assert all(np.array_equal(have[name], want[name]) for name in want)


@pytest.mark.parametrize("layerwise", [False, True])
def test_the_release_of_nemotron_is_compared(release: Path, converted: Path, layerwise: bool) -> None:
    """transformers computes what it would have written beside."""
    found = api.compare(converted, source=release / "src", layerwise=layerwise)
    assert found.passed
    assert [sight.part for sight in found.sights] == ["vision", "audio"]


def test_sounds_without_a_mask_are_heard_whole(release: Path) -> None:
    import torch

    case = made("nemotron_h_omni")
    case.save(release / "written")
    api.convert(release / "written", release / "of-written")
    frames = noise(2, 27, 16)
    with torch.no_grad():
        want = case.model.get_audio_features(torch.tensor(frames)).pooler_output.numpy()
    model: Any = tpuconv.load(release / "of-written")
    seen = model.see(np.full((1, len(want)), SOUND), input_features=frames)
    np.testing.assert_allclose(seen.features_XD[seen.slot_BT[0]], want, atol=2e-5)


def test_features_that_do_not_fit_are_named(converted: Path) -> None:
    case, model = made("nemotron_h_omni"), tpuconv.load(converted)
    pixels = case.features["pixel_values"]
    for changed, fault in (
        ({"pixel_values": pixels[:-1]}, r"shape \(91, 48\), image_grid_hw 92 patches"),
        ({"pixel_values": pixels[:, :12]}, "a patch of the model 48 values"),
        ({"image_grid_hw": np.array([(3, 16), (2, 2), (4, 10)])}, "no whole number of blocks of 2 x 2"),
        ({"input_features": case.features["input_features"][..., :8]}, "and the model 16 frequencies"),
        ({"input_features_mask": case.features["input_features_mask"][:2]}, r"input_features_mask \(2, 30\)"),
        ({"pixel_values_videos": noise(1, 2, 6, 8, 8)}, "does not read the features pixel_values_videos"),
    ):
        with pytest.raises(UsageError, match=fault):
            model.see(case.ids_BT, case.mask_BT, **{**case.features, **changed})


def test_one_of_the_parts_may_be_left_out(converted: Path) -> None:
    model: Any = tpuconv.load(converted)
    seen = model.see(np.array([[5, IMAGE, 7]]), pixel_values=noise(4, 48), image_grid_hw=np.array([[2, 2]]))
    assert seen.slot_BT.tolist() == [[-1, 0, -1]]


@pytest.mark.parametrize(("frames", "width"), [(7, 20), (1000, 1024)])
def test_waves_of_distances_are_those_of_transformers(frames: int, width: int) -> None:
    import torch
    from transformers import ParakeetEncoderConfig
    from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderRelPositionalEncoding

    want = ParakeetEncoderRelPositionalEncoding(ParakeetEncoderConfig(hidden_size=width))(torch.zeros(1, frames, width))
    np.testing.assert_allclose(distance_waves(frames, width), want[0].numpy(), atol=2e-5)
