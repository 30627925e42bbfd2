"""The statistics of two models' logits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.commands import EXAMPLE
from helpers.conversions import convert
from helpers.families import FIRST
from tpuconv import api
from tpuconv.errors import ResourceError
from tpuconv.models import logits
from tpuconv.verify import preparation
from tpuconv.verify.logits import DTYPE_GATES, are_tied, compare_logits, model_logits, rounding_gates, tokenize
from tpuconv.verify.reference import reference

TOKENS, VOCABULARY = 200, 50
IDS = [[0] * TOKENS]


def random_logits() -> np.ndarray:
    """Of bfloat16, each token with a most likely one between 16 and 32, where bfloat16 has a number every 1/8."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-80, 80, (TOKENS, VOCABULARY)).astype(np.float32) / 8
    logits[np.arange(TOKENS), rng.integers(0, VOCABULARY, TOKENS)] = 20
    return logits


def swapped(logits: np.ndarray, tokens: int, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """The logits with a second token `gap` below the first, for some tokens; and with the two exchanged."""
    a, b = logits.copy(), logits.copy()
    rows, first = np.arange(tokens), logits[:tokens].argmax(-1)
    second = (first + 1) % VOCABULARY
    a[rows, second], b[rows, second], b[rows, first] = 20 - gap, 20, 20 - gap
    return a, b


@pytest.mark.parametrize(("gap", "passes"), [(0.125, True), (0.25, True), (0.375, False)])
def test_a_tie_is_no_disagreement_and_what_is_none_is_one(gap, passes):
    hf, ours = swapped(random_logits(), 5, gap)
    result = compare_logits(IDS, [hf], [ours], "bfloat16", {"top1": 0.99})
    assert result.top1 == 0.975
    assert result.decided == (195 if passes else 200)
    assert result.top1_decided == (1 if passes else 0.975)
    assert result.passed is passes
    assert not compare_logits(IDS, [hf], [ours], "float32", {"top1": 0.99}).passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("gap", "decided"), [(0.04, 1), (0.3, 88)])
def test_hesitating_between_two_tokens_does_not_flip_a_prompt(gap: float, decided: int, dtype: str) -> None:
    """Of a prompt of 87 tokens with the same two in front; and of a token that is decided."""
    hf, ours = np.full((88, VOCABULARY), -9, np.float32), np.full((88, VOCABULARY), -9, np.float32)
    hf[:87, 3], hf[:87, 4], hf[87, 5] = 2, 2 - gap, 2
    ours[:87, 4], ours[:87, 3], ours[87, 5] = 2, 2 - gap, 2
    found = compare_logits([[0] * 88], [hf], [ours], dtype, {"top1": 0.99})
    assert found.top1 == pytest.approx(1 / 88)
    assert found.decided == decided
    assert found.passed is (decided == 1)


def test_what_ties_depends_on_the_reference_and_never_hides_a_wrong_model():
    hf = random_logits()
    assert not are_tied(hf, "bfloat16").any()
    assert are_tied(np.zeros((3, 5), np.float32), "bfloat16").all()
    wrong = np.roll(hf, 1, axis=-1)
    assert compare_logits(IDS, [hf], [wrong], "bfloat16", DTYPE_GATES["bfloat16"]).top1_decided == 0
    broken = np.full_like(hf, np.nan)
    assert not are_tied(broken, "bfloat16").any()
    assert "mean_kl is nan" in compare_logits(IDS, [hf], [broken], "bfloat16", DTYPE_GATES["bfloat16"]).failures()[0]


def test_in_16_bits_the_gate_is_what_roundings_do_to_the_model():
    assert rounding_gates("bfloat16", 1e-5) == {"mean_kl": DTYPE_GATES["bfloat16"]["mean_kl"]}
    assert rounding_gates("bfloat16", 0.01) == {"mean_kl": 0.02}
    assert rounding_gates("bfloat16", None) == {"top1": 0.99}
    assert rounding_gates("float32", None) == DTYPE_GATES["float32"]


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    convert(EXAMPLE, tmp_path / "out")
    monkeypatch.setattr(preparation, "available_memory", lambda: (1000, 10**9))
    with pytest.raises(ResourceError, match=r"takes .* in float32, and 1 kB of memory are available") as e:
        api.compare(tmp_path / "out")
    assert e.value.hint == 'use `layerwise=True`, which holds one layer, or give `dtype="bfloat16"`'


@pytest.mark.slow
def test_a_right_model_passes_on_random_tokens_in_bfloat16(tmp_path):
    """Where it is less sure than on text: nearly every fiftieth token is another, and nearly every such one a tie."""
    ids = tokenize(tmp_path, [], 256)
    assert sum(map(len, ids)) == 1024
    convert(EXAMPLE, tmp_path / "out")
    hf, ours = (
        reference(EXAMPLE, logits.whole_texts(ids), "bfloat16").logits,
        model_logits(tmp_path / "out", ids, "bfloat16"),
    )
    result = compare_logits(ids, hf, ours, "bfloat16", DTYPE_GATES["bfloat16"])
    assert not result.failures()
    assert result.decided > 0.9 * result.tokens


def test_logits_that_say_nothing_hold_no_gate():
    """Neither NaN on both sides, nor logits that are all alike."""
    hf, gates = random_logits(), {"top1": 0.5}
    nothing = np.full_like(hf, np.nan)
    assert compare_logits(IDS, [nothing], [nothing], "float32", gates).passed is False
    flat = compare_logits(IDS, [np.zeros_like(hf)], [hf], "float32", {"relative_difference": 0.1, **gates})
    assert (flat.decided, flat.passed) == (0, False)


def test_the_mean_difference_is_that_of_all_logits():
    """Not a mean of means: prompts have unlike lengths."""
    rng = np.random.default_rng(0)
    ids = [[0] * 3, [0] * 40]
    hf, ours = ([rng.normal(size=(len(each), 7)).astype(np.float32) for each in ids] for _ in range(2))
    found = compare_logits(ids, hf, ours, "float32", {})
    differences = np.concatenate([np.abs(a - b).ravel() for a, b in zip(hf, ours, strict=True)])
    assert found.mean_abs_difference == pytest.approx(differences.mean(), rel=1e-6)


@pytest.mark.parametrize("cache_dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_log_probabilities_of_tokens_are_those_of_the_logits(cache_dtype, orbax, monkeypatch):
    """With slabs that do not divide the tokens, and more texts than run at once."""
    model = tpuconv.load(orbax(FIRST["llama"]))
    monkeypatch.setattr(logits, "LOGITS_AT_ONCE", 7 * model.config.vocab_size)
    monkeypatch.setattr(logits, "TEXTS_AT_ONCE", 3)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in (5, 2, 9, 30, 4, 21, 3)]
    done = []
    found = logits.TokenScorer(model, "float32", cache_dtype)(texts, lambda n, of: done.append((n, of)))
    assert done == [(3, 7), (6, 7), (7, 7)]
    every = logits.forward_each(model, logits.whole_texts(texts), "float32", cache_dtype)()
    for ids, (logp_T, is_best_T), expected_TV in zip(texts, found, every, strict=True):
        expected_TV = logits.log_softmax(expected_TV[:-1])
        np.testing.assert_allclose(logp_T, expected_TV[np.arange(len(ids) - 1), ids[1:]], atol=2e-5)
        np.testing.assert_array_equal(is_best_T, expected_TV.argmax(-1) == ids[1:])


def test_a_long_text_has_few_rows_and_never_all_its_logits(orbax):
    """Of 4,000 tokens and 150,000 words they would take 2.5 GB a text."""
    assert [logits.texts_at_once(logits.padded_width(tokens)) for tokens in (10, 500, 2000, 4000)] == [8, 4, 1, 1]
    assert [logits.padded_rows(texts) for texts in (1, 2, 3, 8)] == [1, 2, 4, 8]
    model = tpuconv.load(orbax(FIRST["llama"]))

    def memory(words: int) -> int:
        model.config = replace(model.config, vocab_size=words)
        model.lm_head.kernel = nnx.Param(jnp.zeros((model.config.hidden_size, words), jnp.float32))
        scorer = logits.TokenScorer(model, "float32")
        ids, mask = jax.ShapeDtypeStruct((1, 2048), jnp.int32), jax.ShapeDtypeStruct((1, 2047), bool)
        return scorer._score.lower(scorer._state, ids, mask).compile().memory_analysis().temp_size_in_bytes

    assert memory(150_000) - memory(100) < 4 * 4 * logits.LOGITS_AT_ONCE


def test_without_gates_nothing_is_passed():
    hf = random_logits()
    result = compare_logits(IDS, [hf], [hf], "bfloat16", {})
    assert result.passed is None
    assert result.to_json()["passed"] is None
    assert result.failures() == []
    assert compare_logits(IDS, [hf], [hf], "bfloat16", {"top1": 1.0}).passed is True
