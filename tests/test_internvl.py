"""InternVL with code of its own: its config.json, and the token for images, whose id only the tokenizer's files say."""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, restore
from helpers.families import FIRST, save
from helpers.whole_sights import made
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, CorruptOutput, UnsupportedConfig
from tpuconv.models.common.beside import UNKNOWN_TOKEN
from tpuconv.models.registry import find_family
from tpuconv.models.tokenizer import added_token
from tpuconv.models.wrappers import WRAPPERS

RELEASE: dict[str, Any] = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {
        "_attn_implementation_autoset": True,
        "architectures": ["Qwen3ForCausalLM"],
        "bad_words_ids": None,
        "chunk_size_feed_forward": 0,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "pruned_heads": {},
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "use_bfloat16": True,
        "vocab_size": 151936,
    },
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "output_attentions": False,
    "pad2square": False,
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internvl2_5",
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
    "use_thumbnail": True,
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "drop_path_rate": 0.1,
        "hidden_size": 1024,
        "image_size": 448,
        "intermediate_size": 4096,
        "model_type": "intern_vit_6b",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
    },
}
"""Of InternVL3.5-8B, cut to keys that say something and to one of each kind of the others."""


def test_the_release_has_its_size() -> None:
    family = find_family(RELEASE)
    report = family.check_config(RELEASE, parts=("vision",))
    rows = family.table_without_release(parts=report.config.parts).bind(report.config)
    numbers = [prod(shape) for row in rows for shape in row.src_shapes().values()]
    assert sum(numbers) == pytest.approx(8.53e9, rel=0.005)
    assert not report.ignored


@pytest.mark.parametrize("text_type", WRAPPERS["internvl_chat"].texts)
def test_the_text_model_is_that_of_its_family(text_type: str, tmp_path: Path) -> None:
    alone = save(FIRST[text_type], tmp_path / "text")
    tensors = {f"language_model.{name}": tensor for name, tensor in read_tensors(alone).items()}
    raw = RELEASE | {"llm_config": json.loads((alone / "config.json").read_text())}
    write_checkpoint(tmp_path / "whole", raw, tensors)
    for name in ("text", "whole"):
        api.convert(tmp_path / name, tmp_path / f"{name}-out")
    assert read_manifest(tmp_path / "whole-out").family == f"internvl_chat.{text_type}"
    assert_same(restore(tmp_path / "whole-out"), restore(tmp_path / "text-out"))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ps_version": "v1"}, "ps_version='v1' is not implemented"),
        ({"force_image_size": 224}, "force_image_size=224 is not implemented"),
        ({"llm_config": {"model_type": "gemma"}}, "a text model of the type 'gemma' in internvl_chat"),
        ({"vision_config": [1]}, r"vision_config=\[1\] is not an object"),
    ],
)
def test_other_values_are_refused(change: dict[str, Any], fault: str) -> None:
    with pytest.raises((ConfigError, UnsupportedConfig), match=fault):
        find_family(RELEASE | change).read_config(RELEASE | change, parts=("vision",))


def test_the_text_model_of_the_first_version_is_read() -> None:
    """As the refusal of its encoder says."""
    raw = RELEASE | {"ps_version": "v1"}
    assert find_family(raw).read_config(raw).hidden_size == 4096


def test_a_checkpoint_without_the_token_says_so(whole: Any, tmp_path: Any) -> None:
    src, _ = whole("internvl_chat")
    bare = shutil.copytree(src, tmp_path / "src", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    api.convert(bare, tmp_path / "out")
    model: Any = tpuconv.load(tmp_path / "out")
    assert model.config.parts["vision"].placeholder == UNKNOWN_TOKEN
    case = made("internvl_chat")
    with pytest.raises(ConfigError, match="does not have the token <IMG_CONTEXT>"):
        model.see(case.ids_BT, case.mask_BT, **case.features)
    assert np.isfinite(model(np.array([[5, 9, 11]]))).all()


def test_a_changed_tokenizer_is_told_before_its_token_is_looked_for(whole: Any, tmp_path: Any) -> None:
    src, _ = whole("internvl_chat")
    api.convert(src, tmp_path / "out")
    settings = tmp_path / "out" / "tokenizer_config.json"
    settings.write_text(settings.read_text() + "\n")
    with pytest.raises(CorruptOutput, match=r"tokenizer_config\.json was changed since the checkpoint was made"):
        tpuconv.load(tmp_path / "out")
    assert api.verify(tmp_path / "out", update=True).updated == ["tokenizer_config.json"]
    assert tpuconv.load(tmp_path / "out").config.parts["vision"].placeholder != UNKNOWN_TOKEN


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<a>", "special": True}}}),
        ("added_tokens.json", {"<a>": 7}),
        ("tokenizer.json", {"added_tokens": [{"content": "<a>", "id": 7}], "model": {}}),
    ],
)
def test_added_tokens_are_found_in_each_file(name: str, content: dict[str, Any]) -> None:
    def read(asked: str) -> bytes | None:
        return json.dumps(content).encode() if asked == name else None

    assert added_token("<a>", read) == 7
    assert added_token("<b>", read) is None


@pytest.mark.parametrize("number", ["x", "9" * 5000])
def test_an_id_that_is_no_number_is_none(number: str) -> None:
    settings = {"added_tokens_decoder": {number: {"content": "<a>"}}, "<a>": "x"}
    assert (
        added_token("<a>", lambda name: json.dumps(settings if name == "tokenizer_config.json" else {}).encode())
        is None
    )


def test_a_malformed_list_of_tokens_is_named() -> None:
    with pytest.raises(ConfigError, match=r"added_tokens\.json"):
        added_token("<a>", lambda name: b"{}" if name == "tokenizer_config.json" else b'{"<a>": "7"}')
