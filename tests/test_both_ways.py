"""Decoders whose tokens see those behind them: embedding models and rerankers with `is_causal` false, and NVIDIA's."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.conversions import convert
from helpers.encoded import same_bits
from helpers.families import FIRST, Case, hf_model, save
from helpers.logits import forward
from tpuconv import api
from tpuconv.errors import ConfigError, UsageError
from tpuconv.models.common.heads import HIDDEN, SCORES

IDS = [5, 17, 99, 3, 42, 8, 77, 12, 30]
OF_QWEN = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
WINDOWS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": OF_QWEN,
    "qwen3": OF_QWEN,
    "ministral3": {"sliding_window": 3},
}
"""Keys that give some layers a window, by the family."""


def seeing_behind(family: str, window: Mapping[str, Any] | None = None) -> Case:
    case = FIRST[family]
    return replace(case, id=f"{family}-both-ways", config=dict(case.config) | {"is_causal": False} | (window or {}))


@pytest.mark.parametrize("returns", [HIDDEN, SCORES])
@pytest.mark.parametrize(
    "case",
    [
        *map(seeing_behind, WINDOWS),
        *(seeing_behind(family, window) for family, window in WINDOWS.items() if window),
    ],
    ids=[*WINDOWS, *(f"{family}-window" for family, window in WINDOWS.items() if window)],
)
def test_outputs_are_those_of_transformers(case: Case, returns: str, tmp_path: Path) -> None:
    import torch

    convert(save(case, tmp_path / "hf", returns=returns), tmp_path / "out")
    model = tpuconv.load(tmp_path / "out")
    with torch.no_grad():
        found = hf_model(case, returns=returns)(torch.tensor([IDS]))
    want = (found.last_hidden_state if returns == HIDDEN else found.logits).numpy()
    assert np.abs(np.asarray(forward(model, jnp.array([IDS]))) - want).max() <= 2e-5 * np.abs(want).max()
    if returns == HIDDEN:
        padded, mask = jnp.array([[1, 1, *IDS, 2]]), np.array([[False] * 2 + [True] * len(IDS) + [False]])
        inside = np.asarray(forward(model, padded, mask))[:, 2:-1]
        assert np.abs(inside - want).max() <= 2e-5 * np.abs(want).max()
        further = np.asarray(forward(model, jnp.array([[*IDS, 2]])))[:, : len(IDS)]
        assert np.abs(further - want).max() > 1e-3 * np.abs(want).max()
        with pytest.raises(UsageError, match="it has no cache"):
            model.init_cache(1, 8)


def nvidia(folder: Path, returns: str, **keys: Any) -> Path:
    """A tiny one of NVIDIA's models."""
    save(FIRST["llama"], folder / "plain", returns=returns)
    config = json.loads((folder / "plain" / "config.json").read_text())
    end = "Model" if returns == HIDDEN else "ForSequenceClassification"
    config |= {"model_type": "llama_bidirec", "architectures": [f"LlamaBidirectional{end}"], **keys}
    return write_checkpoint(folder / "hf", config, read_tensors(folder / "plain"))


def test_an_embedding_model_of_nvidia(tmp_path: Path) -> None:
    source = nvidia(tmp_path, HIDDEN, pooling="avg", temperature=0.02)
    api.convert(source, tmp_path / "out")
    assert api.compare(tmp_path / "out", source=source).passed
    api.export(tmp_path / "out", tmp_path / "back")
    back, tensors = read_tensors(tmp_path / "back"), read_tensors(source)
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("pooling", ["avg", "cls", "last"])
def test_a_reranker_of_nvidia(pooling: str, tmp_path: Path) -> None:
    source = nvidia(tmp_path, SCORES, pooling=pooling, temperature=0.5)
    api.convert(source, tmp_path / "out")
    model = tpuconv.load(tmp_path / "out")
    alone = np.asarray(forward(model, jnp.array([IDS])))
    padded, mask = jnp.array([[1, 1, *IDS, 2]]), np.array([[False] * 2 + [True] * len(IDS) + [False]])
    assert np.abs(np.asarray(forward(model, padded, mask)) - alone).max() <= 2e-5 * np.abs(alone).max()
    assert api.compare(tmp_path / "out", source=source).passed


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"temperature": 0}, {"temperature": True}])
def test_another_pooling_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        api.plan(nvidia(tmp_path, SCORES, **wrong))
