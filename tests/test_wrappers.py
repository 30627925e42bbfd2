"""Text models inside multimodal ones: the prefixes of every release of transformers, tying, and what is skipped."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import assert_same, convert, restore
from helpers.encoded import assert_came_back, same_bits
from helpers.experts import stacked
from helpers.families import CASES, FIRST, VISION, Case, is_inseparable
from helpers.released_code import MODELS
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.common.wrapper import PREFIXES
from tpuconv.models.logits import whole_texts
from tpuconv.models.registry import all_families, find_family, get_family
from tpuconv.verify.layerwise import compare_layers
from tpuconv.verify.logits import model_logits
from tpuconv.verify.reference import reference

WRAPPERS = [family for family in all_families() if family.name in VISION]
OWN_HEAD = next(case for case in CASES if case.id == "gemma3-own-head")
WRAPPED = [FIRST[name] for name in VISION]
KNOWN = [case for case in WRAPPED if case.family not in MODELS and not case.written_as]
"""Without the ones whose types transformers does not have."""
NOT_LOADED = {"hy_v4_vl"}
"""Families of whose releases transformers 5.24 does not load all: of Hy4-VL it misses the weights that join the
residual streams, under the names that Hy4's releases have. `test_models.py` compares the same logits in memory."""
IDS = [[5, 17, 99, 3, 42, 8, 77], [9, 4, 31]]


def renamed(folder: Path, out: Path, released: str, prefix: str) -> Path:
    """A wrapper's checkpoint with the text model under another prefix."""
    tensors = {}
    for name, x in read_tensors(folder).items():
        if name.startswith(head := PREFIXES[released]):
            name = PREFIXES[prefix] + name.removeprefix(head)
        elif name.startswith(released):
            name = prefix + name.removeprefix(released)
        tensors[name] = x
    return write_checkpoint(out, json.loads((folder / "config.json").read_text()), tensors)


def released_prefix(name: str) -> str:
    return next(prefix for prefix in PREFIXES if get_family(name).table.rows[0].hf_names[0].startswith(prefix))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_every_release_convert_and_come_back(prefix: str, hf: Any, tmp_path: Path) -> None:
    plain = hf(OWN_HEAD, "bfloat16")
    folder = renamed(plain, tmp_path / "hf", released_prefix("gemma3"), prefix)
    plan = convert(folder, tmp_path / "out")
    assert_came_back(folder, tmp_path / "out", plan)
    convert(plain, tmp_path / "plain")
    assert_same(restore(tmp_path / "out"), restore(tmp_path / "plain"))
    assert {skip.reason.partition(" ")[0] for skip in plan.skipped} == {"vision", "multimodal"}
    # What is saved or quantized from a checkpoint keeps the names of its source.
    tpuconv.save(tpuconv.load(tmp_path / "out"), tmp_path / "saved", like=tmp_path / "out")
    source = read_tensors(folder)
    for name in ("out", "saved"):
        api.export(tmp_path / name, tmp_path / f"{name}-back", with_skipped=folder)
        back = read_tensors(tmp_path / f"{name}-back")
        assert back.keys() == source.keys()
        assert all(same_bits(x, source[tensor]) for tensor, x in back.items())


@pytest.mark.parametrize("name", sorted(NOT_LOADED))
def test_weights_that_transformers_does_not_load_are_told(name: str, hf: Any) -> None:
    with pytest.raises(UnsupportedConfig, match="did not load 3 weights"):
        reference(hf(FIRST[name]), whole_texts(IDS), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in KNOWN if case.family not in NOT_LOADED], ids=str)
def test_the_text_is_compared_with_the_class_of_the_whole(case: Case, hf: Any, orbax: Any) -> None:
    theirs, ours = reference(hf(case), whole_texts(IDS), "float32").logits, model_logits(orbax(case), IDS, "float32")
    for want, have in zip(theirs, ours, strict=True):
        assert np.abs(want - have).max() <= 2e-5 * np.abs(want).max()
    if is_inseparable(case):
        with pytest.raises(
            UsageError,
            match=r"cannot be compared layer by layer: (its layers|layers hand|some of its layers)",
        ):
            compare_layers(read_manifest(orbax(case)), hf(case), whole_texts(IDS), "float32")
        return
    errors = compare_layers(read_manifest(orbax(case)), hf(case), whole_texts(IDS), "float32").errors
    assert max(error.own_error for error in errors) < 1e-4


def copied(folder: Path, out: Path, change: Any, **config: Any) -> Path:
    """A checkpoint with changed tensors and another config.json."""
    raw = json.loads((folder / "config.json").read_text()) | config
    return write_checkpoint(out, {k: x for k, x in raw.items() if x is not None}, change(read_tensors(folder)))


def in_major(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    stacked = ("experts.gate_up_proj", "experts.down_proj")
    return {n: np.ascontiguousarray(x.swapaxes(1, 2)) if n.endswith(stacked) else x for n, x in tensors.items()}


def numbered(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, x in tensors.items():
        front, _, part = name.rpartition(".experts.")
        if part == "gate_up_proj":
            halves = zip(("gate", "up"), np.split(x, 2, axis=1), strict=True)
            out |= {f"{front}.experts.{e}.{kind}_proj.weight": y for kind, half in halves for e, y in enumerate(half)}
        elif part == "down_proj":
            out |= {f"{front}.experts.{e}.down_proj.weight": y for e, y in enumerate(x)}
        else:
            out[name] = x
    return {name: np.ascontiguousarray(x) for name, x in out.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe-plain", "qwen3_5_moe_text-plain", "qwen4_exp-plain"])
def test_experts_of_qwen3_5_come_in_two_forms(name: str, hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == name)
    copied(hf(case), tmp_path / "hf", stacked)
    plan = convert(tmp_path / "hf", tmp_path / "out")
    assert "stacked" in read_manifest(tmp_path / "out").release.forms.values()
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    assert_came_back(tmp_path / "hf", tmp_path / "out", plan)


@pytest.mark.slow
def test_experts_of_gemma4_may_be_numbered(hf: Any, orbax: Any, tmp_path: Path) -> None:
    """As quantized releases have them."""
    case = next(case for case in CASES if case.id == "gemma4_text-experts")
    copied(hf(case), tmp_path / "hf", numbered)
    plan = convert(tmp_path / "hf", tmp_path / "out")
    assert "one" in read_manifest(tmp_path / "out").release.forms.values()
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    assert_came_back(tmp_path / "hf", tmp_path / "out", plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl_moe-plain", "qwen3_vl_moe-dense-layers"])
@pytest.mark.parametrize("change", [in_major, numbered])
def test_experts_come_in_three_forms(name: str, change: Any, hf: Any, orbax: Any, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == name)
    copied(hf(case), tmp_path / "hf", change, transformers_version="4.57.1" if change is in_major else "5.1.0")
    plan = convert(tmp_path / "hf", tmp_path / "out")
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    assert_came_back(tmp_path / "hf", tmp_path / "out", plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5-plain", "qwen3_5_moe-plain", "qwen4_exp-plain"])
def test_the_config_of_the_text_model_beside_the_names_of_the_whole(
    name: str, hf: Any, orbax: Any, tmp_path: Path
) -> None:
    """As users publish models that they make of Qwen3.5."""
    case = next(case for case in CASES if case.id == name)
    raw = json.loads((hf(case) / "config.json").read_text())
    text = {**raw["text_config"], "architectures": raw["architectures"]}
    write_checkpoint(tmp_path / "hf", text, read_tensors(hf(case)))
    plan = convert(tmp_path / "hf", tmp_path / "out")
    assert_same(restore(tmp_path / "out"), restore(orbax(case)))
    assert_came_back(tmp_path / "hf", tmp_path / "out", plan)


def test_keys_of_the_text_may_stand_at_the_root(hf: Any) -> None:
    """As Qwen2.5-VL is released."""
    case = next(case for case in CASES if case.id == "qwen2_5_vl-windows")
    nested = json.loads(case.hf_config().to_json_string())
    text = {key: value for key, value in nested["text_config"].items() if key != "model_type"}
    rope = dict(text.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    flat = text | {key: value for key, value in nested.items() if key != "text_config"}
    flat |= {"rope_theta": theta, "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    family = get_family("qwen2_5_vl")
    assert family.config.from_hf(flat) == family.config.from_hf(nested)
    assert not family.check_config(flat).ignored
    with pytest.raises(UnsupportedConfig, match="use_mrope=True"):
        family.config.from_hf(flat | {"use_mrope": True})
    with pytest.raises(UnsupportedConfig, match="hidden_size=8"):
        get_family("qwen3_vl").config.from_hf({"model_type": "qwen3_vl", "hidden_size": 8})


def test_the_text_model_chooses_the_family() -> None:
    raw = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    family = get_family("mistral3")
    assert find_family(raw) is family
    small = family.config.from_hf(raw | {"text_config": {"model_type": "mistral", "rope_theta": 1e9}})
    assert (small.rope.theta, small.llama_4_scaling_beta, small.sliding_window) == (1e9, 0, 4096)
    growing = family.config.from_hf(raw | {"text_config": {"model_type": "ministral3"}})
    assert growing.rope == get_family("ministral3").config().rope
    assert growing.llama_4_scaling_beta == 0.1
    with pytest.raises(UnsupportedConfig, match="'mistral3' with a text model 'mystery'"):
        find_family(raw | {"text_config": {"model_type": "mystery"}})


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "kimi_k25"])
def test_defaults_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig

    whole = AutoConfig.for_model(name)
    hf = whole.get_text_config()
    config = get_family(name).config.from_hf({"model_type": name})
    other = {"layer_types", "rope", "sliding_window", "head_dim", "tie_word_embeddings", "num_nextn_predict_layers"}
    other |= {"qk_head_dim", "num_key_value_heads"}
    stated = {field.name for field in fields(config) if hasattr(hf, field.name)} - other
    assert {key: getattr(config, key) for key in stated} == {
        key: tuple(value) if isinstance(value := getattr(hf, key), list) else value for key in stated
    } | ({"mlp_only_layers": None} if name == "qwen3_vl_moe" else {})
    assert config.tie_word_embeddings == whole.tie_word_embeddings
    assert config.rope_dim == getattr(hf, "head_dim", config.rope_dim)


def test_defaults_of_ministral3_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    hf = AutoConfig.for_model("ministral3")
    config = get_family("ministral3").config.from_hf({"model_type": "ministral3"})
    assert config == get_family("ministral3").config.from_hf(json.loads(hf.to_json_string())) == type(config)()
    stated = {field.name for field in fields(config) if hasattr(hf, field.name)}
    assert {key: getattr(config, key) for key in stated} == {key: getattr(hf, key) for key in stated}


def test_a_tied_head_inside_counts_for_qwen2_5_vl() -> None:
    raw = {"model_type": "qwen2_5_vl", "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    assert find_family(raw).config.from_hf(raw).tie_word_embeddings
    raw["model_type"] = "qwen3_vl"
    assert not find_family(raw).config.from_hf(raw).tie_word_embeddings


def gemma3(inside: dict[str, Any] | None = None, **outside: Any) -> dict[str, Any]:
    return {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **(inside or {})}, **outside}


@pytest.mark.parametrize(
    ("raw", "tensors", "tied"),
    [
        (gemma3(), [], True),
        (gemma3(), ["language_model.model.norm.weight"], True),
        (gemma3(), ["language_model.lm_head.weight"], False),
        (gemma3(), ["lm_head.kernel"], False),
        (gemma3({"tie_word_embeddings": False}), ["norm.scale"], False),
        (gemma3({"tie_word_embeddings": False}, tie_word_embeddings=True), ["lm_head.kernel"], True),
        (gemma3(tie_word_embeddings=True), ["lm_head.weight"], True),
        (gemma3(tie_word_embeddings=False), [], False),
        ({"model_type": "llama4"}, [], False),
        ({"model_type": "llama4"}, ["norm.scale"], True),
    ],
)
def test_what_says_whether_the_head_is_tied(raw: dict[str, Any], tensors: list[str], tied: bool) -> None:
    assert find_family(raw).read_config(raw, tensors=tensors).tie_word_embeddings == tied


def omni(text: dict[str, Any], **thinker: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": text, **thinker},
        "talker_config": {"a": 1},
    }


def test_a_text_model_two_objects_deep() -> None:
    family, sizes = find_family(omni({})), {"head_dim": 64, "num_hidden_layers": 2}
    report = family.check_config(omni(sizes | {"mystery": 2}, position_id_per_seconds=25), ["mystery"])
    assert (report.config.sizes["H"], report.config.rope.theta) == (64, 1e6)
    assert [key.key for key in report.ignored] == ["mystery"]
    assert family.config.from_hf(omni(sizes)["thinker_config"]) == report.config
    for raw in (omni({}), omni({}, tie_word_embeddings=False)):
        tensors = ["thinker.model.norm.weight"]
        assert family.read_config(raw, tensors=tensors).tie_word_embeddings == (raw == omni({}))
        assert not family.read_config(raw, tensors=[*tensors, "thinker.lm_head.weight"]).tie_word_embeddings
    why = family.table.ignored(report.config)
    skipped = ("talker.model.norm.weight", "code2wav.x", "thinker.audio_tower.x", "thinker.visual.x")
    assert all(why(name) for name in skipped)
    assert not why("thinker.model.layers.0.mlp.gate.weight")


@pytest.mark.slow
def test_an_own_head_converts_without_the_key(hf: Any, tmp_path: Path) -> None:
    """The index says that the head is not tied, where the default is another."""
    folder = hf(OWN_HEAD)
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config["text_config"]):
        place.pop("tie_word_embeddings", None)
    write_checkpoint(tmp_path / "hf", config, read_tensors(folder))
    convert(tmp_path / "hf", tmp_path / "out")
    model = tpuconv.load(tmp_path / "out")
    assert model.lm_head is not None
    api.export(tmp_path / "out", tmp_path / "back", with_skipped=tmp_path / "hf")
    assert "language_model.lm_head.weight" in read_tensors(tmp_path / "back")


def test_where_an_encoding_is_described() -> None:
    from tpuconv.sources.config import encoding_of, without_encoding

    how = {"quant_method": "fp8"}
    for raw in (omni({"quantization_config": how}), omni({}, quantization_config=how)):
        assert encoding_of(raw) == how
        assert without_encoding(raw) == omni({})
    for raw in (gemma3(quantization_config=how), gemma3({"quantization_config": how})):
        assert encoding_of(raw) == how
        assert get_family("gemma3").config.from_hf(raw) == get_family("gemma3").config.from_hf(gemma3())
        assert without_encoding(raw) == gemma3()


@pytest.mark.parametrize(
    ("error", "raw", "message"),
    [
        (UnsupportedConfig, gemma3({"mystery_of_text": 1} | {"use_bidirectional_attention": True}), "use_bidir"),
        (UnsupportedConfig, gemma3(hidden_size=8), "hidden_size=8"),
        (UnsupportedConfig, gemma3(is_encoder_decoder=True), "is_encoder_decoder=True"),
        (ConfigError, gemma3() | {"text_config": 3}, "text_config=3 is not an object"),
    ],
)
def test_what_cannot_be_read_is_refused(error: type[TpuconvError], raw: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        find_family(raw).config.from_hf(raw)


def test_keys_of_every_config_may_stand_beside_the_text() -> None:
    """`to_dict` writes them, where `save_pretrained` leaves out what is as it always is."""
    raw = gemma3(is_encoder_decoder=False, chunk_size_feed_forward=0)
    assert get_family("gemma3").config.from_hf(raw) == get_family("gemma3").config.from_hf(gemma3())


def test_keys_that_nobody_reads_are_listed() -> None:
    raw = gemma3({"mystery_of_text": 1}, mystery=2, vision_mystery=3, image_token_index=4)
    assert {key.key for key in get_family("gemma3").check_config(raw).ignored} == {"mystery_of_text", "mystery"}
