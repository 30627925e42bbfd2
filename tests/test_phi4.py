"""Phi-4-multimodal as it is released: with code of its own, and an adapter for images and one for sounds."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.processors import word_tokenizer
from helpers.sights import IMAGE, SOUND
from helpers.whole_sights import logits, made
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.registry import find_family
from tpuconv.models.text_generator import PromptEncoder
from tpuconv.models.towers.phi4.family import Phi4ImageConfig, Phi4SoundConfig
from tpuconv.models.towers.phi4.released import in_keys_of_transformers

RELEASED = {
    r"\.feed_forward_(in|out)\.gate_up_proj": r".feed_forward_\1.net.0.linear",
    r"\.feed_forward_(in|out)\.down_proj": r".feed_forward_\1.net.2",
    r"(audio_embed.*)\.self_attn\.(q|k|v)_proj": r"\1.self_attn.linear_\2",
    r"(audio_embed.*)\.self_attn\.o_proj": r"\1.self_attn.linear_out",
    r"img_projection_up": "img_projection.0",
    r"img_projection_down": "img_projection.2",
    r"global_img_feature_extensor": "glb_GN",
    r"sub_img_feature_extensor": "sub_GN",
    r"up_proj_for_speech": "audio_projection.speech.0",
    r"down_proj_for_speech": "audio_projection.speech.2",
    r"up_proj_for_vision_speech": "audio_projection.vision.0",
    r"down_proj_for_vision_speech": "audio_projection.vision.2",
    r"^(model\.layers\..*(?:qkv|o|gate_up|down)_proj)\.weight": r"\1.base_layer.weight",
}
"""Names of transformers, and the ones of the release."""

ADAPTED = re.compile(r"\.base_layer\.weight$")

AUDIO = {
    **{"activation": "swish", "batch_norm": False, "bias_in_glu": True, "causal": True, "chunk_size": -1},
    **{"attention_dim": 1024, "attention_heads": 16, "cnn_layer_norm": True, "conv_activation": "swish"},
    **{"conv_glu_type": "swish", "depthwise_multiplier": 1, "depthwise_seperable_out_channel": 1024},
    **{"dropout_rate": 0.0, "encoder_embedding_config": {"input_size": 80}, "ext_pw_kernel_size": 1},
    **{"ext_pw_out_channel": 1024, "input_layer": "nemo_conv", "input_size": 80, "kernel_size": 3, "left_chunk": 18},
    **{"linear_units": 1536, "nemo_conv_settings": {"conv_channels": 1024}, "num_blocks": 24, "time_reduction": 8},
    "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
}
ENDS = {
    "audio_embd_layer": {
        **{"compression_rate": 8, "downsample_rate": 1, "embedding_cls": "audio", "projection_cls": "mlp"},
        **{"use_conv_downsample": False, "use_qformer": False},
    },
    "embedding_cls": "image_audio",
    "image_embd_layer": {
        **{"crop_size": 448, "embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
        **{"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp", "use_hd_transform": True},
        "with_learnable_separator": True,
    },
}
RELEASE = {
    "architectures": ["Phi4MMForCausalLM"],
    "model_type": "phi4mm",
    "audio_processor": {"config": AUDIO, "name": "cascades"},
    "embd_layer": ENDS,
    "img_processor": None,
    "speech_lora": {"dp": 0.01, "layer": "(layers.*self_attn)", "lora_alpha": 640, "r": 320},
    "vision_lora": {"dp": 0.0, "layer": "layers.*(self_attn)", "lora_alpha": 512, "r": 256},
}


def read(raw: dict[str, Any]) -> Any:
    return find_family(raw).read_config(raw, parts=("vision", "audio")).parts


def test_the_encoders_of_the_release_have_the_sizes_of_its_config() -> None:
    parts = read(RELEASE)
    assert parts["vision"].tower == Phi4ImageConfig()
    assert parts["audio"].tower == Phi4SoundConfig(bias_max_distance=500)
    assert (parts["vision"].placeholder, parts["audio"].placeholder) == (200010, 200011)
    assert not find_family(RELEASE).check_config(RELEASE).ignored


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("audio_processor", "config", "causal"), False),
        (("audio_processor", "config", "relative_attention_bias_args", "type"), "rotary"),
        (("audio_processor", "config", "time_reduction"), 4),
        (("audio_processor", "config", "conv_activation"), "mish"),
        (("embd_layer", "image_embd_layer", "hd_transform_order"), "glb_sub"),
        (("embd_layer", "audio_embd_layer", "downsample_rate"), 2),
    ],
)
def test_other_encoders_are_refused(at: tuple[str, ...], value: Any) -> None:
    raw = json.loads(json.dumps(RELEASE))
    inner = raw
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    with pytest.raises(UnsupportedConfig, match=at[-1]):
        read(raw)
    assert find_family(raw).read_config(raw) == find_family(RELEASE).read_config(RELEASE)  # the text alone


@pytest.mark.parametrize(
    ("config", "keys", "fault"),
    [
        (Phi4ImageConfig, {"crop_size": 336}, "crop_size=336 is not image_size=448"),
        (Phi4ImageConfig, {"image_size": 14, "crop_size": 14}, "less than two patches"),
        (Phi4SoundConfig, {"ext_pw_out_channel": 512}, "ext_pw_out_channel=512 is not hidden_size=1024"),
        (Phi4SoundConfig, {"chunk_size": 0}, "chunk_size=0"),
        (Phi4SoundConfig, {"kernel_size": 0}, "kernel_size=0"),
    ],
)
def test_encoders_that_contradict_themselves(config: Any, keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.from_hf(keys)
    assert any(fault in detail for detail in caught.value.details)


def test_what_is_no_object_is_an_error() -> None:
    with pytest.raises(ConfigError, match="config=3 is not an object"):
        in_keys_of_transformers(RELEASE | {"audio_processor": {"config": 3}})


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the names and keys of the release, and its two adapters in it and in folders beside. Its
    encoder of images has the default sizes: no key of the release has them."""
    folder = tmp_path_factory.mktemp("phi4")
    made("phi4_multimodal").save(folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    audio, vision = config.pop("audio_config"), config.pop("vision_config")
    sizes = {
        **{"attention_dim": audio["hidden_size"], "attention_heads": audio["num_attention_heads"]},
        **{"linear_units": audio["intermediate_size"], "input_size": audio["input_size"]},
        **{"num_blocks": audio["num_blocks"], "ext_pw_out_channel": audio["ext_pw_out_channel"]},
        "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
        "relative_attention_bias_args": {"t5_bias_max_distance": audio["bias_max_distance"], "type": "t5"},
    }
    ends = {**ENDS, "image_embd_layer": {**ENDS["image_embd_layer"], "crop_size": vision["crop_size"]}}
    raw = config | RELEASE | {"audio_processor": {"config": AUDIO | sizes}, "embd_layer": ends}
    # ids and sizes that the release leaves to its code
    raw |= {"audio_config": {"audio_token_id": SOUND}, "vision_config": {**vision, "image_token_id": IMAGE}}
    tensors = read_tensors(folder / "hf")
    for pattern, name in RELEASED.items():
        tensors = {re.sub(pattern, name, each): tensor for each, tensor in tensors.items()}
    rng = np.random.default_rng(0)
    adapters: dict[str, dict[str, np.ndarray]] = {"vision": {}, "speech": {}}
    for name, tensor in list(tensors.items()):
        for kind, found in adapters.items() if ADAPTED.search(name) else ():
            for part, shape in (("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))):
                values = rng.normal(0, 0.2, shape).astype(np.float32)
                found[ADAPTED.sub(f".lora_{part}.weight", f"base_model.model.{name}")] = values
                tensors[ADAPTED.sub(f".lora_{part}.{kind}.weight", name)] = values
    write_checkpoint(folder / "src", raw, tensors)
    for kind, parts in adapters.items():
        write_adapter(folder / f"{kind}-lora", parts)
    return folder


def write_adapter(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """An adapter as the release has it, whose modules are a pattern."""
    modules = r"model.layers.\d+.((self_attn.(qkv|o)_proj)|(mlp.(gate_up|down)_proj))"
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": "TBA"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps(facts | {"r": 4, "lora_alpha": 8, "target_modules": modules})
    )
    save_file(tensors, folder / "adapter_model.safetensors")


def without_adapters(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}


@pytest.fixture(scope="module")
def converted(release: Path) -> Path:
    api.convert(release / "src", release / "out")
    return release / "out"


def test_the_release_sees_and_hears_what_transformers_does(release: Path, converted: Path, tmp_path: Path) -> None:
    api.convert(release / "hf", tmp_path / "out")
    have, want = (logits(made("phi4_multimodal"), tpuconv.load(folder)) for folder in (converted, tmp_path / "out"))
    assert np.array_equal(have, want)
    skipped = read_manifest(converted).raw["skipped"]
    assert all(".lora_" in each["pattern"] and "in a folder too" in each["reason"] for each in skipped)
    assert sum(each["count"] for each in skipped) == 3 * 4 * 4  # layers, matrices of each, parts of two adapters


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"image_pixel_values": lambda x: x[..., :12]},
            r"the model have 3 x 16 x 16 pixels and 4 x 4 patches",
        ),
        ({"image_sizes": lambda x: 2 * x}, r"image 0 has 32 x 64 pixels by image_sizes, which are 2 x 4 tiles"),
        ({"image_sizes": lambda x: 0 * x}, r"image 0 has 0 x 0 pixels"),
        ({"audio_embed_sizes": lambda x: x + 1}, r"audio_embed_sizes is \[5, 3\].*at most 4 features"),
        ({"audio_input_features": lambda x: x[..., :9]}, r"the model has 12 frequencies"),
    ],
)
def test_features_that_do_not_fit_are_refused(changes: dict[str, Any], fault: str, converted: Path) -> None:
    case, model = made("phi4_multimodal"), tpuconv.load(converted)
    changed = {name: change(case.features[name]) for name, change in changes.items()}
    with pytest.raises(UsageError, match=fault):
        model.see(case.ids_BT, case.mask_BT, **{**case.features, **changed})


def test_a_sound_beside_images_has_another_projector(converted: Path) -> None:
    """As in transformers, also where the images are in another text."""
    case, model = made("phi4_multimodal"), tpuconv.load(converted)
    sounds = {name: x for name, x in case.features.items() if name.startswith("audio_")}
    alone = model.see(np.where(case.ids_BT == IMAGE, 4, case.ids_BT), case.mask_BT, **sounds)
    beside = model.see(case.ids_BT, case.mask_BT, **case.features)
    found = [np.asarray(each.features_XD[each.slot_BT])[case.ids_BT == SOUND] for each in (alone, beside)]
    assert np.abs(found[0] - found[1]).max() > 0.1


@pytest.mark.parametrize("layerwise", [False, True])
def test_the_release_is_compared(release: Path, converted: Path, layerwise: bool) -> None:
    found = api.compare(converted, source=release / "src", layerwise=layerwise)
    assert found.passed
    assert [sight.part for sight in found.sights] == ["vision", "audio"]


def test_names_of_the_release_come_back(release: Path, converted: Path, tmp_path: Path) -> None:
    api.export(converted, tmp_path / "back")
    want, have = without_adapters(read_tensors(release / "src")), read_tensors(tmp_path / "back")
    assert have.keys() == want.keys()
    assert all(np.array_equal(have[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", ["vision", "speech"])
def test_an_adapter_of_the_release_is_merged(release: Path, converted: Path, kind: str, tmp_path: Path) -> None:
    """With what peft makes of it, images and sounds included."""
    lora = release / f"{kind}-lora"
    api.convert(release / "src", tmp_path / "out", adapter=[str(lora)])
    changed, plain = (logits(made("phi4_multimodal"), tpuconv.load(each)) for each in (tmp_path / "out", converted))
    assert np.abs(changed - plain).max() > 0.1
    found = api.compare(tmp_path / "out", source=release / "src", adapter=[str(lora)])
    assert found.passed
    assert [sight.part for sight in found.sights] == ["vision", "audio"]


SOUNDS_OF_RELEASE = {
    "auto_map": {"AutoFeatureExtractor": "processing_phi4mm.Phi4MMAudioFeatureExtractor"},
    **{"audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1, "dynamic_hd": 36},
    **{"feature_extractor_type": "Phi4MMAudioFeatureExtractor", "image_processor_type": "Phi4MMImageProcessor"},
    "processor_class": "Phi4MMProcessor",
}


def test_numbered_markers_of_the_release_are_read(tmp_path: Path) -> None:
    """Its own feature extractor is code of the release: transformers' class has its settings."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4mm"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SOUNDS_OF_RELEASE))
    words = {SOUND: "<|endoftext11|>", 7: "<|user|>", 8: "<|end|>"}
    tokenizer = word_tokenizer(words)
    tokenizer.add_special_tokens({"additional_special_tokens": [words[SOUND]]})
    tokenizer.chat_template = "{% for m in messages %}{{ '<|user|> ' + m['content'] + ' <|end|>' }}{% endfor %}"
    encoder = PromptEncoder(tokenizer, 1000, lambda: tmp_path, ("audio",))
    sound = np.sin(np.arange(4000, dtype=np.float32) / 9)
    ids, features = encoder.encode_with("<|audio_1|> t5 <|audio_2|>", sounds=[sound, sound[:3000]], chat=True)
    assert ids == [7, *[SOUND] * 3, 5, *[SOUND] * 3, 8]
    assert set(features) == {"audio_input_features", "audio_embed_sizes", "audio_attention_mask"}
    encoder = PromptEncoder(tokenizer, 1000, lambda: tmp_path, ("audio",), placeholders={"audio": SOUND})
    with pytest.raises(UsageError, match=r"the prompt has <\|audio_1\|>, which stands for a sound, and no sound is"):
        encoder.encode(["t5 <|audio_1|>"])
