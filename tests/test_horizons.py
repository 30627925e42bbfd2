"""Prompts beyond windows: `verify --compare-hf` finds a fault that no shorter prompt shows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.commands import EXAMPLE
from helpers.conversions import convert
from helpers.families import BY_ID, LONGROPE, Case, save
from tpuconv import api, restore
from tpuconv.models.common import config as configs
from tpuconv.models.common import steps
from tpuconv.models.gpt_oss.family import Config as GptOss
from tpuconv.models.logits import Window, forward, forward_each, padded_widths
from tpuconv.models.registry import find_family
from tpuconv.verify.horizons import FARTHEST, Horizon, horizons_of, long_prompts
from tpuconv.verify.reference import head_from

WINDOW = 150
"""More tokens than the prompts of random ids have."""


def windowed(name: str, **config: Any) -> Case:
    """A tiny model whose context is larger than its window."""
    case = BY_ID[name]
    return replace(case, config={**case.config, "max_position_embeddings": 4 * WINDOW, **config})


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    convert(save(windowed("llama-mistral", sliding_window=WINDOW), tmp_path / "hf"), tmp_path / "out")
    return tmp_path / "out"


def windows_become(change: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps.is_visible
    monkeypatch.setattr(
        steps, "is_visible", lambda pos_BT, pos_BS, window, **how: right(pos_BT, pos_BS, change(window), **how)
    )


def off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_become(lambda window: window + 1, monkeypatch)


def too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_become(lambda window: window - 1, monkeypatch)


def ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    windows_become(lambda window: 10**6, monkeypatch)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "off by one": off_by_one,
    "too small": too_small,
    "ignored": ignored,
}


def test_a_window_is_compared_beyond_its_end(mistral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = api.compare(mistral)
    assert right.passed
    assert right.to_json()["horizons"] == [{"tokens": WINDOW, "compared": True, "reason": None}]
    assert (right.statistics.prompts, right.statistics.tokens) == (9, 8 * 128 + 128)
    off_by_one(monkeypatch)
    wrong = api.compare(mistral)
    assert wrong.passed is False
    assert wrong.statistics.worst_prompt == 9


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_wrong_window_fails_the_long_prompt_alone(
    fault: str, layerwise: bool, mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.compare(mistral, layerwise=layerwise).passed
    FAULTS[fault](monkeypatch)
    found = api.compare(mistral, layerwise=layerwise)
    assert found.passed is False
    assert bool(found.first_diverging) == layerwise
    monkeypatch.setattr(configs.DecoderConfig, "horizons", frozenset())
    assert api.compare(mistral, layerwise=layerwise).passed  # by the short ones


@pytest.mark.slow
def test_prompts_that_are_given_stay_alone_and_what_they_miss_is_said(tmp_path: Path) -> None:
    case = windowed("llama-mistral", sliding_window=WINDOW, vocab_size=257)
    folder = save(case, tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EXAMPLE / name).read_bytes())
    convert(folder, tmp_path / "out")
    short, long = (api.compare(tmp_path / "out", prompts=["ab", "x" * length]) for length in (WINDOW, WINDOW + 1))
    assert short.horizons == [Horizon(WINDOW, f"the longest prompt has {WINDOW} tokens")]
    assert (long.horizons, long.statistics.tokens) == ([Horizon(WINDOW)], 2 + WINDOW + 1)


def changed(module: str, name: str, by: int) -> Callable[[Any], None]:
    """Changes a number in the modules whose class is named so."""

    def of_model(model: Any) -> None:
        found = [part for _, part in nnx.iter_graph(model) if type(part).__name__.endswith(module)]
        found = [part for part in found if getattr(part, name) is not None]
        assert found
        for part in found:
            setattr(part, name, getattr(part, name) + by)

    return of_model


def without_growth(model: Any) -> None:
    for layer in model.layers:
        layer.attn.beta = 0


def other_factors(model: Any) -> None:
    rope = model.config.rope
    model.config = replace(model.config, rope=replace(rope, long_factor=rope.short_factor))


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": WINDOW}
LONG = LONGROPE | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": WINDOW}
OTHERS: dict[str, tuple[Case, Callable[[Any], None]]] = {
    "chunks": (
        windowed("llama4_text-plain", attention_chunk_size=WINDOW, floor_scale=1000),
        changed("Attention", "chunk", 1),
    ),
    "tokens of an indexer": (windowed("deepseek_v32-plain", index_topk=WINDOW), changed("Indexer", "count", -1)),
    "blocks of an indexer": (
        windowed("minimax_m3_vl_text-plain", index_block_size=50, index_topk_blocks=3),
        changed("Indexer", "count", 1),
    ),
    "growing queries": (
        windowed("mistral4-plain", rope_parameters=YARN | {"llama_4_scaling_beta": 0.1}),
        without_growth,
    ),
    "long factors": (
        windowed("phi3-short", rope_parameters=LONG, original_max_position_embeddings=WINDOW),
        other_factors,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_horizons_are_compared_too(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, change = OTHERS[kind]
    convert(save(case, tmp_path / "hf"), tmp_path / "out")
    found = api.compare(tmp_path / "out")
    assert (found.passed, found.horizons) == (True, [Horizon(WINDOW)])
    load = restore.load

    def wrong(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        change(model)
        return model

    monkeypatch.setattr(restore, "load", wrong)
    found = api.compare(tmp_path / "out")
    assert (found.passed, found.statistics.worst_prompt) == (False, 9)


@pytest.mark.parametrize(
    ("model_type", "config", "horizons"),
    [
        ("llama", {}, []),
        ("mistral", {"max_position_embeddings": 32768, "sliding_window": 4096}, [4096]),
        ("mistral", {"max_position_embeddings": 4096, "sliding_window": 4096}, []),
        ("mistral", {"max_position_embeddings": 32768, "sliding_window": None}, []),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": False}, []),
        ("gpt_oss", {}, [128]),
        ("llama4_text", {"max_position_embeddings": 262144}, [8192]),
        ("deepseek_v32", {}, [2048]),
        ("deepseek_v4", {}, [128, 2048]),
        ("deepseek_v41", {}, [128, 512, 1024, 16384]),
    ],
)
def test_the_horizons_of_released_sizes(model_type: str, config: dict[str, Any], horizons: list[int]) -> None:
    raw = {"model_type": model_type, **config}
    assert horizons_of(find_family(raw).config.from_hf(raw)) == horizons


def test_what_no_prompt_is_long_enough_for_is_named(tmp_path: Path) -> None:
    config = GptOss(sliding_window=WINDOW, vocab_size=101)
    prompts = [[1, 2, 3]]
    windows, found = long_prompts(config, prompts, tmp_path, None)
    assert found == [Horizon(WINDOW)]
    assert [(len(window.ids), window.first) for window in windows] == [(WINDOW + 64, WINDOW + 64 - 128)]
    assert set(windows[0].ids) <= set(range(101))
    assert long_prompts(config, [[1] * (WINDOW + 64)], tmp_path, None) == ([], [Horizon(WINDOW)])
    windows, found = long_prompts(config, prompts, tmp_path, 10**6)
    assert not windows
    assert found[0].why_not == "a prompt of 214 tokens needs 46.9 MB of memory more"
    far = long_prompts(GptOss(sliding_window=FARTHEST + 1), prompts, tmp_path, None)
    assert far == ([], [Horizon(FARTHEST + 1, "only `prompts=` has texts of more than 8,256 tokens")])


def test_a_text_is_not_padded_to_one_that_is_much_longer() -> None:
    assert padded_widths([40, 128, 32]) == [128, 128, 128]
    assert padded_widths([4160, 32, 128, 20, 1040]) == [4160, 128, 128, 20, 4160]


def test_logits_are_made_of_the_tokens_that_count_alone(orbax: Any, hf: Any) -> None:
    """Ours, and those of transformers, whose head gets no others."""
    import torch
    from transformers import AutoModelForCausalLM

    case = BY_ID["llama-mistral"]
    model, ids = tpuconv.load(orbax(case), "float32"), list(range(3, 63))
    (complete,) = forward(model, [ids], "float32")()
    ours = list(forward_each(model, [Window(ids[:5]), Window(ids, 41)], "float32")())
    assert [x.shape for x in ours] == [(5, 101), (19, 101)]
    np.testing.assert_allclose(ours[1], complete[41:], atol=1e-5)
    theirs = AutoModelForCausalLM.from_pretrained(hf(case))
    with torch.no_grad(), head_from(theirs, 41):
        found = theirs(torch.tensor([ids])).logits[0]
    assert found.shape == (19, 101)
    np.testing.assert_allclose(found.numpy(), complete[41:], atol=1e-4)
    with torch.no_grad():
        assert theirs(torch.tensor([ids])).logits.shape == (1, 60, 101)
