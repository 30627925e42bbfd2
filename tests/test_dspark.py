"""DSpark drafts: conversion, the tokens that they choose, export, and drafts that change no token."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.conversions import convert
from helpers.dflash import block_states, facts
from helpers.drafts import assert_exported_as_released, save_target
from helpers.dspark import CASES, chosen_tokens, heads_of, save_dspark
from helpers.families import BY_ID, PROMPTS
from tpuconv import api
from tpuconv.errors import ConfigError, MappingError, TpuconvError, UnsupportedConfig
from tpuconv.models.drafts import DraftSpeculator
from tpuconv.models.generate import Generator
from tpuconv.models.named import families_named
from tpuconv.models.registry import find_family

NEW = 12


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dspark")
    return {name: save_dspark(name, folder / name) for name in CASES}


@pytest.fixture(scope="module")
def checkpoints(sources: dict[str, Path]) -> dict[str, Path]:
    outs = {name: source.parent / f"{name}-out" for name, source in sources.items()}
    for name, source in sources.items():
        api.convert(str(source), str(outs[name]))
    return outs


@pytest.fixture(scope="module")
def target(shared: Any) -> Path:
    """A release whose layers add little, so that the next token depends on the last one mostly."""
    return shared("llama-plain-target-hf", lambda folder: save_target(BY_ID["llama-plain"], folder))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("target") / "out"
    convert(target, out)
    return tpuconv.load(out)


def tokens(generate: Generator, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    return np.stack(list(generate(prompts, NEW)), axis=1)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_formulas(
    name: str, sources: dict[str, Path], checkpoints: dict[str, Path], target: Path, model: Any
) -> None:
    """Behind a prompt, of hidden states of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    config, tensors, prompt = CASES[name], read_tensors(sources[name]), [5, 17, 3, 88, 41, 9, 62]
    speculator = DraftSpeculator(model, tpuconv.load(checkpoints[name]))
    have, _ = speculator.read(np.array([prompt], np.int32), np.ones((1, len(prompt)), bool), NEW, jax.random.key(0))
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        out = theirs(torch.tensor([prompt]), output_hidden_states=True)
    keys = heads_of(config)
    layers = keys.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in keys["target_layer_ids"]]
    states = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1).numpy()
    last = int(out.logits[0, -1].argmax())
    ids = [last, *[keys["mask_token_id"]] * (keys["block_size"] - 1)]
    embedding = read_tensors(target)["model.embed_tokens.weight"]
    block = block_states(config, tensors, states, embedding[ids][None])[0]
    head = tensors.get("lm_head.weight", read_tensors(target).get("lm_head.weight", embedding))
    want = chosen_tokens(config, tensors, block, block @ head.T, last)
    assert len(want) == speculator.ahead
    assert np.asarray(have)[0].tolist() == [last, *want]


@pytest.mark.parametrize("name", ["deepspec", "gated", "recurrent"])
def test_the_token_before_counts(name: str, sources: dict[str, Path]) -> None:
    """Without the matrix of pairs of tokens other tokens are drafted."""
    tensors, rng = read_tensors(sources[name]), np.random.default_rng(5)
    keys = heads_of(CASES[name])
    block = rng.normal(size=(keys["block_size"], keys["hidden_size"])).astype("f4")
    logits = rng.normal(size=(keys["block_size"], keys.get("draft_vocab_size") or keys["vocab_size"])).astype("f4")
    without = {"markov_head.markov_w2.weight": tensors["markov_head.markov_w2.weight"] * 0}
    found = [chosen_tokens(CASES[name], tensors | each, block, logits, 9) for each in ({}, without)]
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepspec", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "deepspec")]
)
def test_chosen_tokens_change_no_text(name: str, checkpoints: dict[str, Path], model: Any) -> None:
    free = tokens(Generator(model))
    speculator = DraftSpeculator(model, tpuconv.load(checkpoints[name]))
    np.testing.assert_array_equal(tokens(speculator), free)
    np.testing.assert_array_equal(tokens(speculator, PROMPTS[:1])[0], free[0])
    assert speculator.drafts.checked > 0


@pytest.mark.parametrize("name", CASES)
def test_export_writes_the_release_again(name: str, sources: dict[str, Path], checkpoints: dict[str, Path]) -> None:
    out = checkpoints[name].parent / f"{name}-back"
    assert_exported_as_released(checkpoints[name], sources[name], out)
    assert facts(out) == facts(sources[name])


def test_formats_hold_the_same_draft(sources: dict[str, Path], checkpoints: dict[str, Path], model: Any) -> None:
    """From DeepSpec's format to the format of speculators and back."""
    out = checkpoints["deepspec"].parent / "forms"
    api.export(str(checkpoints["deepspec"]), str(out / "speculators"), form="speculators", draft_for="some/target")
    config = facts(out / "speculators")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["aux_hidden_state_layer_ids"] == [0, 1]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    api.convert(str(out / "speculators"), str(out / "again"))
    api.export(str(out / "again"), str(out / "sglang"), form="sglang")
    assert facts(out / "sglang")["target_layer_ids"] == [-1, 0]
    want = tokens(DraftSpeculator(model, tpuconv.load(checkpoints["deepspec"])))
    for form in ("speculators", "sglang"):
        have, source = read_tensors(out / form), read_tensors(sources["deepspec"])
        assert {key: x.tobytes() for key, x in have.items()} == {key: x.tobytes() for key, x in source.items()}
        speculator = DraftSpeculator(model, tpuconv.load(out / form))
        np.testing.assert_array_equal(tokens(speculator), want)
    with pytest.raises(UnsupportedConfig, match="part of the vocabulary"):
        api.export(str(checkpoints["gated"]), str(out / "partial"), form="sglang")


def test_a_quantized_draft_has_plain_heads(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    api.quantize(str(checkpoints["deepspec"]), str(tmp_path / "int8"), config="int8_weight_only")
    api.export(str(tmp_path / "int8"), str(tmp_path / "served"))
    tensors = read_tensors(tmp_path / "served")
    assert tensors["layers.0.self_attn.q_proj.weight_packed"].dtype == np.int32
    assert tensors["markov_head.markov_w2.weight"].dtype == np.float32
    assert '"method": "dspark"' in (tmp_path / "served" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"markov_head_type": "attention"}, UnsupportedConfig),
        ({"markov_rank": -1}, ConfigError),
        ({"mask_token_id": None}, ConfigError),
        ({"speculators_model_type": "dspark", "target_layer_ids": None}, ConfigError),
        ({"architectures": ["DFlashDraftModel"]}, UnsupportedConfig),  # which has no such heads
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, TpuconvError),
    ],
)
def test_other_drafts_are_refused(changes: dict[str, Any], error: type[TpuconvError]) -> None:
    config = {**CASES["deepspec"], **changes}
    with pytest.raises(error):
        find_family(config).check_config(config)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    source = save_dspark("sglang", tmp_path / "hf", dspark_config={"markov_rank": 0, "markov_head_type": "vanilla"})
    config = (source / "config.json").read_text().replace('"markov_rank": 0', '"markov_rank": 6')
    (source / "config.json").write_text(config)
    with pytest.raises(MappingError, match="markov_head"):
        api.convert(str(source), str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["dspark", "DSparkDraftModel", "Qwen3DSparkModel"])
def test_names_of_dspark_are_known(name: str) -> None:
    assert [family.name for family in families_named(name)[0]] == ["dspark"]
