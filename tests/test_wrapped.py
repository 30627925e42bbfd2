"""The table of wrappers: text models of families inside multimodal models, against transformers' class of the whole.

What sees or hears has no weights here: transformers makes it on the device `meta`, and puts the text model of a tiny
case inside.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert
from helpers.encoded import same_bits
from helpers.families import CASES, SIZES, Case
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.wrapper import PREFIXES
from tpuconv.models.registry import family_of_type, find_family, get_family
from tpuconv.models.wrappers import WRAPPERS, Wrapper
from tpuconv.notation.release import Release
from tpuconv.verify.logits import model_logits
from tpuconv.verify.reference_calls import mended

IDS = [[5, 17, 99, 3, 42, 8, 77], [9, 4, 31]]
ON_CPU = {"idefics3"}
"""Text is moved to the device of what sees."""
OF_OTHER_SIZES = {"aya_vision"}
"""Transformers refuses its own default sizes of what sees."""
WITH_TIMM = {"perception_lm", "fast_vlm"}
"""What sees needs the package timm in transformers: the names are those of the rows, and the text model is alone."""
UNKNOWN_TO_TRANSFORMERS = ("interns1", "opencua", "step3_vl", "step_robotics", "step3p5v")
"""Types of releases with code of their own, whose keys are as transformers would have them."""
ROWS = [each for each in WRAPPERS.values() if each.in_keys is None and each.model_type not in UNKNOWN_TO_TRANSFORMERS]
"""Without the ones whose code is in their releases alone."""
PAIRS = [(wrapper, text) for wrapper in ROWS for text in wrapper.texts]
FAST = [(WRAPPERS[name], text) for name, text in (("llava", "mistral"), ("internvl", "qwen3"), ("smolvlm", "llama"))]


def name_of(value: Any) -> str:
    return value.model_type if isinstance(value, Wrapper) else str(value)


def text_case(text_type: str) -> Case:
    """The first case of the family of that name, or of another one that reads this type."""
    return min((case for case in CASES if case.model_type == text_type), key=lambda case: case.family != text_type)


def text_config(text_type: str, **changes: Any) -> dict[str, Any]:
    own = text_case(text_type).config
    sizes = {key: x for key, x in SIZES.items() if key != "intermediate_size" or "ffn_dim" not in own}
    return {**sizes, **own, "model_type": text_type, **changes}


def whole_config(wrapper: Wrapper, text: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    tied = AutoConfig.for_model(**text).tie_word_embeddings
    beside = {}
    if wrapper.model_type == "fun_asr_nano":
        width = text["hidden_size"]
        beside = {"adaptor_config": {"hidden_size": width, "intermediate_size": width // 4}}
    if wrapper.model_type == "blip-2":
        beside = {"image_token_index": text["vocab_size"] - 1}
    if wrapper.model_type in ON_CPU | OF_OTHER_SIZES:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        beside = {"vision_config": sizes}
    return AutoConfig.for_model(wrapper.model_type, text_config=dict(text), tie_word_embeddings=tied, **beside)


def whole_model(wrapper: Wrapper, config: Any) -> Any:
    """Transformers' model, of which the text model alone has weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    causal = transformers.AutoModelForCausalLM.from_config(config.text_config, attn_implementation="eager").eval()
    if wrapper.model_type in WITH_TIMM:
        return causal
    with torch.device("meta"):
        whole = getattr(transformers, wrapper.architecture)(config).eval()
    if wrapper.model_type in ON_CPU:
        whole = whole.to_empty(device="cpu")
    base = causal.base_model
    name = next(name for name, module in whole.named_modules() if type(module) is type(base))
    whole.set_submodule(name, base)
    head = next(name for name, module in whole.named_modules() if name.endswith("lm_head"))
    whole.set_submodule(head, causal.lm_head)
    return mended(whole)


def saved(wrapper: Wrapper, whole: Any, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of the text model under the names that `save_pretrained` gives them, and one of each other module."""
    outside = {name: x for name, x in whole.state_dict().items() if set(name.split(".")) & {*wrapper.outside}}
    text = {name: x.clone() for name, x in whole.state_dict().items() if name not in outside and not x.is_meta}
    if whole.config.tie_word_embeddings:
        text = {name: x for name, x in text.items() if "lm_head" not in name}
    whole.save_pretrained(folder, state_dict=text)
    out = read_tensors(folder)
    if wrapper.model_type in WITH_TIMM:
        out = {wrapper.prefix + n.removeprefix("model.") if n.startswith("model.") else n: x for n, x in out.items()}
    # transformers 5.23 writes layers of Qianfan-OCR's text model with a name of those that see.
    out = {name.replace("language_model.model.encoder.", "language_model.model."): x for name, x in out.items()}
    front = "model." if wrapper.prefix.startswith("model.") else ""
    return out | {f"{front}{module}.weight": np.zeros(2, np.float32) for module in wrapper.outside}


def checkpoint(wrapper: Wrapper, text_type: str, folder: Path, **changes: Any) -> tuple[Path, Any]:
    config = whole_config(wrapper, text_config(text_type, **changes))
    whole = whole_model(wrapper, config)
    raw = json.loads(config.to_json_string()) | {"architectures": [wrapper.architecture]}
    return write_checkpoint(folder, raw, saved(wrapper, whole, folder.with_name("written"))), whole


def logits_of(whole: Any) -> list[np.ndarray]:
    import torch

    with torch.no_grad():
        return [whole(input_ids=torch.tensor([ids])).logits[0].float().numpy() for ids in IDS]


@pytest.mark.parametrize(
    ("wrapper", "text_type"),
    [
        pytest.param(
            *pair, marks=() if pair[0].model_type in FAST and pair[1] == pair[0].texts[0] else pytest.mark.slow
        )
        for pair in PAIRS
    ],
    ids=name_of,
)
def test_the_text_has_the_logits_of_the_whole_and_comes_back(
    wrapper: Wrapper, text_type: str, tmp_path: Path, record_property: Any
) -> None:
    folder, whole = checkpoint(wrapper, text_type, tmp_path / "hf")
    plan = convert(folder, tmp_path / "out")
    assert plan.family == f"{wrapper.model_type}.{text_type}"
    assert read_manifest(tmp_path / "out").release == Release()  # transformers writes the names of releases
    assert {skip.reason for skip in plan.skipped} <= set(wrapper.outside.values())
    pairs = zip(logits_of(whole), model_logits(tmp_path / "out", IDS, "float32"), strict=True)
    difference = max(float(np.abs(want - have).max() / np.abs(want).max()) for want, have in pairs)
    record_property("difference", difference)
    assert difference <= 2e-5
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=folder)
    assert_same(read_tensors(tmp_path / "back"), read_tensors(folder))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_every_release_are_known(prefix: str, tmp_path: Path) -> None:
    wrapper = WRAPPERS["llava"]
    folder, _ = checkpoint(wrapper, "llama", tmp_path / "hf")
    raw = json.loads((folder / "config.json").read_text())
    head = PREFIXES[wrapper.prefix]
    tensors = {
        PREFIXES[prefix] + name.removeprefix(head)
        if name.startswith(head)
        else prefix + name.removeprefix(wrapper.prefix)
        if name.startswith(wrapper.prefix)
        else name: x
        for name, x in read_tensors(folder).items()
    }
    convert(write_checkpoint(tmp_path / "other", raw, tensors), tmp_path / "out")
    release = read_manifest(tmp_path / "out").release
    assert bool(release.spelling) == (prefix != wrapper.prefix)
    assert not release.forms


@pytest.mark.parametrize("wrapper", ROWS, ids=name_of)
def test_every_row_reads_the_config_of_transformers(wrapper: Wrapper) -> None:
    """With no key left over: what transformers reads beside the text is named."""
    for text_type in wrapper.texts:
        raw = json.loads(whole_config(wrapper, text_config(text_type)).to_json_string())
        raw["architectures"] = [wrapper.architecture]
        family = find_family(raw)
        assert family is get_family(f"{wrapper.model_type}.{text_type}")
        report = family.check_config(raw)
        assert not report.ignored
        own = family_of_type(text_type)
        assert own is not None
        alone = {key: value for key, value in raw["text_config"].items() if key not in wrapper.only}
        assert report.config.sizes == own.check_config({**alone, "architectures": []}).config.sizes
        with pytest.raises(UnsupportedConfig, match="chunk_size_feed_forward=8 is not implemented"):
            family.check_config(raw | {"text_config": raw["text_config"] | {"chunk_size_feed_forward": 8}})
    del raw["text_config"]["model_type"]
    assert find_family(raw).name == f"{wrapper.model_type}.{wrapper.texts[0]}"


RELEASED: dict[str, dict[str, Any]] = {
    "paligemma": {
        **{"_vocab_size": 257152, "hidden_size": 2048, "image_token_index": 257152, "projection_dim": 2048},
        "text_config": {"model_type": "gemma", "num_image_tokens": 256, "num_key_value_heads": 1, "vocab_size": 257216},
    },
    "llava": {
        **{"ignore_index": -100, "image_token_index": 32000, "pad_token_id": 32001, "vocab_size": 32064},
        **{"projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        "text_config": {"_name_or_path": "x", "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
    },
    "llava_next": {
        **{"ignore_index": -100, "image_grid_pinpoints": [[336, 672]], "image_token_index": 32000, "vocab_size": 32064},
        "text_config": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32064},
    },
    "aya_vision": {
        **{"adapter_layer_norm_eps": 1e-6, "alignment_intermediate_size": 28672, "downsample_factor": 2},
        **{"image_token_index": 255036, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "text_config": {
            **{"model_type": "cohere2", "cache_implementation": "hybrid", "head_dim": 128, "logit_scale": 0.25},
            **{"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"},
            **{"rotary_pct": 1.0, "sliding_window_pattern": 4, "use_gated_activation": True, "vocab_size": 256000},
            **{"use_embedding_sharing": True, "use_parallel_block": True, "use_parallel_embedding": False},
        },
    },
    "qwen2_audio": {
        **{"audio_config": {}, "audio_token_index": 151646, "ignore_index": -100, "vocab_size": 156032},
        "text_config": {"model_type": "qwen2", "rope_theta": 10000, "use_mrope": False, "vocab_size": 156032},
    },
    "smolvlm": {
        **{"image_token_id": 49190, "pad_token_id": 128002, "scale_factor": 4, "tie_word_embeddings": False},
        **{"vision_config": {}, "vocab_size": 49280, "use_cache": False},
        "text_config": {
            **{"model_type": "llama", "head_dim": 64, "hidden_size": 2048, "rope_interleaved": False},
            **{"rope_theta": 273768.0, "is_llama_config": True, "vocab_size": 49280},
        },
    },
    "internvl": {
        **{"downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151667},
        "text_config": {
            **{"model_type": "qwen2", "max_window_layers": 70, "sliding_window": None, "vocab_size": 151674},
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        },
    },
    "lfm2_vl": {
        **{"do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, "max_tiles": 10},
        **{"projector_bias": True, "tile_size": 512, "use_thumbnail": True, "max_pixels_tolerance": 2.0},
        "text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    },
    "voxtral": {
        **{"audio_config": {}, "audio_token_id": 24, "hidden_size": 3072, "vocab_size": 131072},
        "text_config": {"model_type": "llama", "head_dim": 128, "rope_theta": 1e8, "vocab_size": 131072},
    },
}
"""What config.json of releases says beside the text, and some of what it says about it."""


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read(name: str) -> None:
    raw = {"model_type": name, "architectures": [WRAPPERS[name].architecture], **RELEASED[name]}
    report = find_family(raw).check_config(raw)
    assert not {key.key for key in report.ignored} & raw.keys()
    if (vocabulary := raw["text_config"].get("vocab_size")) is not None:
        assert report.config.sizes["V"] == vocabulary


def test_a_text_model_of_no_family_is_refused() -> None:
    raw = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "x"},
    }
    with pytest.raises(UnsupportedConfig, match="no family reads a text model of the type 'x' in llava"):
        find_family(raw)
    with pytest.raises(UnsupportedConfig, match=r"llava\.llama reads model_type 'llava', but not its architecture"):
        find_family(raw | {"architectures": ["Other"], "text_config": {}})
    with pytest.raises(UsageError, match=r"there is no family 'llama\.llava'"):
        get_family("llama.llava")


def test_targets_have_the_text_model(tmp_path: Path) -> None:
    """By the table of its own family."""
    folder, _ = checkpoint(WRAPPERS["llava"], "mistral", tmp_path / "hf")
    api.convert(folder, tmp_path / "out", target="maxtext", scan_layers=True)
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=folder)
    source = read_tensors(folder)
    back = read_tensors(tmp_path / "back")
    assert all(np.allclose(x, source[name], rtol=1e-6) for name, x in back.items())
    assert set(back) == set(source)


def test_it_is_saved_as_it_was(tmp_path: Path) -> None:
    folder, _ = checkpoint(WRAPPERS["internvl"], "qwen3", tmp_path / "hf")
    convert(folder, tmp_path / "out")
    tpuconv.save(tpuconv.load(tmp_path / "out"), tmp_path / "saved", like=tmp_path / "out")
    with pytest.raises(UsageError, match="contains only the text model"):
        api.export(tmp_path / "saved", tmp_path / "back")
    api.export(tmp_path / "saved", tmp_path / "back", with_skipped=folder)
    source = read_tensors(folder)
    assert read_tensors(tmp_path / "back").keys() == source.keys()
    assert all(same_bits(x, source[name]) for name, x in read_tensors(tmp_path / "back").items())
