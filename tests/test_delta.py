"""Linear attention: the gated delta rule by its definition, and states that padding does not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tpuconv.models.common.delta import gated_delta_rule
from tpuconv.models.common.layers import Keys
from tpuconv.models.common.recurrence import CHUNK, Convolution
from tpuconv.models.registry import get_family

SIZES = {"n": 2, "r": 3, "k": 5, "w": 4, "taps": 4}


def inputs(tokens: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    n, r, k, w = (SIZES[letter] for letter in "nrkw")
    q, key = rng.normal(size=(2, 2, tokens, n, k))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    v, g = rng.normal(size=(2, tokens, n, r, w)), -rng.exponential(0.3, (2, tokens, n, r))
    b, s = rng.uniform(0, 1, (2, tokens, n, r)), rng.normal(size=(2, n, r, k, w))
    return tuple(np.float32(x) for x in (q, key, v, g, b, s))


def by_definition(q, key, v, g, b, s):
    """One token at a time, in float64."""
    q, key, v, g, b, s = (np.float64(x) for x in (q, key, v, g, b, s))
    out = []
    for t in range(q.shape[1]):
        s = s * np.exp(g[:, t])[..., None, None]
        change = b[:, t, ..., None] * (v[:, t] - np.einsum("Bnk,Bnrkw->Bnrw", key[:, t], s))
        s = s + np.einsum("Bnk,Bnrw->Bnrkw", key[:, t], change)
        out.append(np.einsum("Bnk,Bnrkw->Bnrw", q[:, t], s))
    return np.stack(out, 1), s


SLOW = [pytest.param(tokens, marks=pytest.mark.slow) for tokens in (2, CHUNK - 1, CHUNK, 2 * CHUNK + 3)]


@pytest.mark.parametrize("tokens", [1, CHUNK + 1, *SLOW])
def test_the_delta_rule_is_its_definition(tokens: int) -> None:
    given = inputs(tokens)
    ours = jax.jit(gated_delta_rule)(*given)
    for mine, exact in zip(ours, by_definition(*given), strict=True):
        np.testing.assert_allclose(mine, exact, atol=2e-5 * np.abs(exact).max())


@pytest.mark.slow
def test_fast_decay_does_not_overflow() -> None:
    q, key, v, g, b, s = inputs(CHUNK)
    for factor in (1e2, 1e4):
        ours = gated_delta_rule(q, key, v, g * factor, b, s)
        for mine, exact in zip(ours, by_definition(q, key, v, g * factor, b, s), strict=True):
            np.testing.assert_allclose(mine, exact, atol=1e-3)


def test_a_convolution_goes_on_where_it_ended() -> None:
    module = Convolution("nk", SIZES, dtype=jnp.float32, keys=Keys(jax.random.key(0)))
    x = np.random.default_rng(0).normal(size=(2, 9, SIZES["n"], SIZES["k"])).astype(np.float32)
    none = jnp.zeros((2, SIZES["taps"] - 1, SIZES["n"], SIZES["k"]))
    whole, last = module(x, none, jnp.array([9, 9]))
    first, middle = module(x[:, :5], none, jnp.array([5, 5]))
    second, end = module(x[:, 5:], middle, jnp.array([4, 4]))
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(end, last)
    _, short = module(x, none, jnp.array([2, 0]))  # tokens after the length do not count
    np.testing.assert_array_equal(short[0], np.concatenate([none[0, :1], x[0, :2]]))
    np.testing.assert_array_equal(short[1], none[1])


@pytest.mark.slow
def test_padding_anywhere_changes_no_state() -> None:
    """Logits and states of each row are those of its tokens alone, in one call and in several."""
    family = get_family("qwen3_5_text")
    raw = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    raw |= {"num_attention_heads": 2, "num_key_value_heads": 1, "full_attention_interval": 2, "model_type": family.name}
    linear = {"linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2}
    config = family.config.from_hf(raw | linear | {"linear_num_value_heads": 4})
    model = family.model_class(config, dtype=jnp.float32)
    run = nnx.jit(lambda model, ids, mask, cache: model(ids, mask, cache=cache))
    rng = np.random.default_rng(1)
    ids, mask = rng.integers(0, 20, (3, 12)), rng.random((3, 12)) < 0.6
    mask[2] = False
    logits, cache = run(model, ids, mask, model.init_cache(3, 12))
    parts, split = model.init_cache(3, 12), []
    for at in (slice(0, 5), slice(5, 6), slice(6, 12)):
        some, parts = run(model, ids[:, at], mask[:, at], parts)
        split.append(np.asarray(some))
    for row in range(3):
        np.testing.assert_allclose(np.concatenate(split, 1)[row][mask[row]], logits[row][mask[row]], atol=2e-6)
        state = [np.asarray(x[row]) for x in jax.tree.leaves(cache.layers[0])]
        if mask[row].any():
            own = ids[row, mask[row]][None]
            want, alone = run(model, own, np.ones(own.shape, bool), model.init_cache(1, own.shape[1]))
            np.testing.assert_allclose(logits[row][mask[row]], want[0], atol=2e-6)
            expected = [np.asarray(x[0]) for x in jax.tree.leaves(alone.layers[0])]
        else:
            expected = [np.zeros_like(x) for x in state]
        for a, b, c in zip(state, expected, jax.tree.leaves(parts.layers[0]), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
            np.testing.assert_allclose(c[row], b, atol=2e-6)


def test_a_state_does_not_grow_and_is_never_int8() -> None:
    family = get_family("qwen3_5_text")
    raw = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    raw |= {"num_attention_heads": 2, "num_key_value_heads": 1, "full_attention_interval": 2}
    model = family.model_class(family.config.from_hf({**raw, "model_type": family.name}), dtype=jnp.bfloat16)
    state, kv = (jax.tree.leaves(layer) for layer in model.init_cache(2, 7, jnp.int8).layers)
    assert {x.dtype for x in state} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in kv} == {jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)}
    shapes = [[x.shape for x in jax.tree.leaves(model.init_cache(2, length).layers[0])] for length in (7, 70)]
    assert shapes[0] == shapes[1]
