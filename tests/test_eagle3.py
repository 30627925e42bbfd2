"""EAGLE-3 drafts: conversion, values, quantization and export."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.drafts import assert_exported_as_released
from helpers.eagle3 import CASES, WITH_EMBEDDING, count_of_states, drafted, keys_of, save_draft
from helpers.logits import forward
from tpuconv import api
from tpuconv.errors import ConfigError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.named import example_config, families_named
from tpuconv.models.registry import find_family

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_draft(name, tmp_path_factory.mktemp(name) / "draft") for name in CASES}


@pytest.fixture(scope="module")
def checkpoints(sources: dict[str, Path]) -> dict[str, Path]:
    for source in sources.values():
        api.convert(str(source), str(source.parent / "out"))
    return {name: source.parent / "out" for name, source in sources.items()}


def inputs(name: str, source: Path) -> dict[str, Any]:
    """Random hidden states of a target, the tokens after each and their embeddings, of two sequences."""
    keys, rng, tensors = keys_of(CASES[name]), np.random.default_rng(1), read_tensors(source)
    width = count_of_states(CASES[name]) * (keys.get("target_hidden_size") or keys["hidden_size"])
    ids_BT = rng.integers(0, keys["vocab_size"], (2, 11))
    embedding = tensors.get("embed_tokens.weight", rng.normal(size=(keys["vocab_size"], keys["hidden_size"])))
    return {
        "ids_BT": ids_BT,
        "states_BTX": rng.normal(size=(2, 11, width)).astype("f4"),
        "embedded_BTD": embedding[ids_BT].astype("f4"),
        "pos_BT": np.broadcast_to(np.arange(3, 14), (2, 11)),
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_formulas(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    given, model = inputs(name, sources[name]), tpuconv.load(checkpoints[name])
    want, states = drafted(
        CASES[name], read_tensors(sources[name]), given["states_BTX"], given["embedded_BTD"], given["pos_BT"]
    )
    have: Any = forward(
        model,
        jnp.asarray(given["ids_BT"]),
        jnp.asarray(given["states_BTX"]),
        embedded_BTD=None if name in WITH_EMBEDDING else jnp.asarray(given["embedded_BTD"]),
        pos_BT=jnp.asarray(given["pos_BT"]),
    )
    assert have.logits_BTV.shape == want.shape
    np.testing.assert_allclose(have.logits_BTV, want, rtol=0, atol=TOLERANCE * np.abs(want).max())
    np.testing.assert_allclose(have.x_BTD, states, rtol=0, atol=TOLERANCE * np.abs(states).max())


@pytest.mark.parametrize("name", CASES)
def test_export_gives_the_tensors_back(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    out = checkpoints[name].parent / "back"
    assert_exported_as_released(checkpoints[name], sources[name], out)
    assert json.loads((out / "config.json").read_text()) == json.loads((sources[name] / "config.json").read_text())


def test_layers_of_the_target_are_counted_as_servers_count_them() -> None:
    """SGLang names the layers that return the states, vLLM the layers that read them; both take 2, n / 2 and n - 3."""

    def layers(config: dict[str, Any]) -> tuple[int, ...]:
        read: Any = find_family(config).read_config(config)
        return read.states_of(36)  # type: ignore[no-any-return]

    plain = {key: value for key, value in CASES["sglang"].items() if key != "eagle_config"}
    assert layers(plain) == (2, 18, 33)
    assert layers({**plain, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}) == (2, 18, 33)
    assert layers({**plain, "eagle_aux_hidden_state_layer_ids": [2, 18, 36]}) == (2, 18, 36)
    with pytest.raises(UsageError, match=r"the target has 36"):
        layers({**plain, "eagle_aux_hidden_state_layer_ids": [2, 18, 37]})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_hidden_layers": 2}, UnsupportedConfig),
        ({"tie_word_embeddings": True}, UnsupportedConfig),
        ({"norm_output": True}, UnsupportedConfig),
        ({"draft_vocab_size": 200}, ConfigError),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedConfig),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, ConfigError),
        ({"eagle_config": [1]}, ConfigError),
        ({"speculators_model_type": "medusa"}, UnsupportedConfig),
        ({"a_new_key": 1}, UnsupportedConfig),
    ],
)
def test_other_drafts_are_refused(changes: dict[str, Any], error: type[TpuconvError], tmp_path: Path) -> None:
    source = save_draft("sglang", tmp_path / "draft")
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(error):
        api.plan(str(source))


def test_a_draft_is_no_language_model(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="drafts, not logits"):
        api.benchmark(str(checkpoints["sglang"]))
    with pytest.raises(UsageError, match="drafts, not logits"):
        api.compare(str(checkpoints["sglang"]))


@pytest.mark.parametrize("name", ["sglang", "speculators"])
def test_quantized_drafts_are_near(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    out = checkpoints[name].parent / "int8"
    api.quantize(str(checkpoints[name]), str(out), config="int8_weight_only")
    given = inputs(name, sources[name])
    logits = [
        np.asarray(
            forward(
                tpuconv.load(folder),
                jnp.asarray(given["ids_BT"]),
                jnp.asarray(given["states_BTX"]),
                embedded_BTD=jnp.asarray(given["embedded_BTD"]),
            ).logits_BTV
        )
        for folder in (checkpoints[name], out)
    ]
    difference = np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()
    assert 0 < difference < 0.05


def test_formats_hold_the_same_draft(sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    """From SGLang's format to the format of speculators and back; the tensors are the same under other names."""
    out, source = checkpoints["sglang"].parent, sources["sglang"]
    api.export(str(checkpoints["sglang"]), str(out / "speculators"), form="speculators", draft_for="some/target")
    config = json.loads((out / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["transformer_layer_config"]["rope_theta"] == 500.0
    want, have = read_tensors(source), read_tensors(out / "speculators")
    assert {name.replace("midlayer.", "layers.0.") for name in want} == have.keys()
    assert all(x.tobytes() == have[name.replace("midlayer.", "layers.0.")].tobytes() for name, x in want.items())
    given = inputs("sglang", source)
    logits = [
        forward(
            tpuconv.load(folder),
            jnp.asarray(given["ids_BT"]),
            jnp.asarray(given["states_BTX"]),
            embedded_BTD=jnp.asarray(given["embedded_BTD"]),
        ).logits_BTV
        for folder in (source, out / "speculators")
    ]
    np.testing.assert_array_equal(*map(np.asarray, logits))

    api.convert(str(out / "speculators"), str(out / "again"))
    api.export(str(out / "again"), str(out / "sglang"), form="sglang")
    assert {name: x.tobytes() for name, x in read_tensors(out / "sglang").items()} == {
        name: x.tobytes() for name, x in want.items()
    }
    back = json.loads((out / "sglang" / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    assert {key: back[key] for key in before} == before
    assert back["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]  # where vLLM reads them


def test_vllm_is_told_how_many_states_a_draft_reads(checkpoints: dict[str, Path]) -> None:
    out = checkpoints["speculators"].parent
    form = {"form": "speculators", "draft_for": "some/target"}
    api.export(str(checkpoints["speculators"]), str(out / "four-states"), **form)
    config = json.loads((out / "four-states" / "config.json").read_text())
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert api.plan(str(out / "four-states")).to_json()["ignored_config"] == []


def test_formats_refuse_what_they_cannot_hold(checkpoints: dict[str, Path], converted: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match="norm_before_residual"):
        api.export(str(checkpoints["speculators"]), str(tmp_path / "out"), form="sglang")
    with pytest.raises(UsageError, match="names the target"):
        api.export(str(checkpoints["sglang"]), str(tmp_path / "out"), form="speculators")
    with pytest.raises(UsageError, match="is for `form="):
        api.export(str(checkpoints["sglang"]), str(tmp_path / "out"), draft_for="some/target")
    with pytest.raises(UsageError, match="is for EAGLE-3, DFlash and DSpark drafts"):
        api.export(str(converted / "tiny-qwen3-orbax"), str(tmp_path / "out"), form="sglang")


def test_quantized_drafts_are_exported_for_servers(checkpoints: dict[str, Path]) -> None:
    out = checkpoints["sglang"].parent
    api.quantize(str(checkpoints["sglang"]), str(out / "small"), config="int8_weight_only")
    api.export(str(out / "small"), str(out / "served"), form="speculators", draft_for="some/target")
    tensors = read_tensors(out / "served")
    assert tensors["layers.0.self_attn.q_proj.weight_packed"].dtype == np.int32
    assert tensors["layers.0.self_attn.q_proj.weight_scale"].shape == (30, 1)
    assert tensors["fc.weight"].dtype == np.float32
    config = json.loads((out / "served" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "--speculative-config" in (out / "served" / "README.md").read_text()


@pytest.mark.parametrize("name", ["eagle3", "LlamaForCausalLMEagle3", "Eagle3Speculator"])
def test_names_of_drafts_are_known(name: str) -> None:
    assert [family.name for family in families_named(name)[0]] == ["eagle3"]
    example = example_config(families_named(name)[0][0])
    assert find_family(example).name == "eagle3"
    assert "is_midlayer" not in example
    assert example["hidden_size"] == 4096


def test_a_draft_has_no_stacked_layers(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match="one layer"):
        api.convert(str(sources["sglang"]), str(tmp_path / "out"), scan_layers=True)
