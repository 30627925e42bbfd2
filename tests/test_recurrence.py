"""Layers with states: Mamba-1, Mamba-2 and Kimi delta attention by their definitions, and states of long sequences
against transformers."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import tpuconv
from helpers.families import FIRST, Case, hf_model
from tpuconv.models.common.kda import KDA_CHUNK, kimi_delta_rule
from tpuconv.models.common.mamba1 import selective_scan
from tpuconv.models.common.mamba2 import state_space
from tpuconv.models.common.recurrence import CHUNK, UNROLLED

B, n, r, k, w = 2, 2, 3, 5, 4


def space_inputs(tokens: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    c, b = rng.normal(size=(2, B, tokens, n, k))
    x, g = rng.normal(size=(B, tokens, n, r, w)), -rng.exponential(0.3, (B, tokens, n, r))
    return tuple(np.float32(array) for array in (c, b, x, g, rng.normal(size=(B, n, r, k, w))))


def space_by_definition(c: Any, b: Any, x: Any, g: Any, s: Any) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, in float64."""
    c, b, x, g, s = (np.float64(array) for array in (c, b, x, g, s))
    out = []
    for t in range(c.shape[1]):
        s = s * np.exp(g[:, t])[..., None, None] + np.einsum("Bnk,Bnrw->Bnrkw", b[:, t], x[:, t])
        out.append(np.einsum("Bnk,Bnrkw->Bnrw", c[:, t], s))
    return np.stack(out, 1), s


def kda_inputs(tokens: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, key = rng.normal(size=(2, B, tokens, n, k))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    v, g = rng.normal(size=(B, tokens, n, w)), -rng.exponential(0.3, (B, tokens, n, k))
    b, s = rng.uniform(0, 1, (B, tokens, n)), rng.normal(size=(B, n, k, w))
    return tuple(np.float32(array) for array in (q, key, v, g, b, s))


def kda_by_definition(q: Any, key: Any, v: Any, g: Any, b: Any, s: Any) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, in float64."""
    q, key, v, g, b, s = (np.float64(array) for array in (q, key, v, g, b, s))
    out = []
    for t in range(q.shape[1]):
        s = s * np.exp(g[:, t])[..., None]
        change = b[:, t, :, None] * (v[:, t] - np.einsum("Bnk,Bnkw->Bnw", key[:, t], s))
        s = s + np.einsum("Bnk,Bnw->Bnkw", key[:, t], change)
        out.append(np.einsum("Bnk,Bnkw->Bnw", q[:, t], s))
    return np.stack(out, 1), s


def scan_inputs(tokens: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    c, b = rng.normal(size=(2, B, tokens, k))
    x, dt = rng.normal(size=(B, tokens, w)), rng.exponential(0.3, (B, tokens, w))
    return tuple(np.float32(each) for each in (c, b, x, dt, rng.normal(size=(k, w)), rng.normal(size=(B, k, w))))


def scan_by_definition(c: Any, b: Any, x: Any, dt: Any, a_log: Any, s: Any) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, in float64."""
    c, b, x, dt, a_log, s = (np.float64(array) for array in (c, b, x, dt, a_log, s))
    out = []
    for t in range(c.shape[1]):
        s = s * np.exp(-np.exp(a_log) * dt[:, t, None]) + np.einsum("Bk,Bw->Bkw", b[:, t], x[:, t] * dt[:, t])
        out.append(np.einsum("Bk,Bkw->Bw", c[:, t], s))
    return np.stack(out, 1), s


RULES = {
    "mamba1": (scan_inputs, scan_by_definition, selective_scan, UNROLLED, 4),
    "mamba2": (space_inputs, space_by_definition, state_space, CHUNK, 3),
    "kda": (kda_inputs, kda_by_definition, kimi_delta_rule, KDA_CHUNK, 3),
}
SLOW = [pytest.param(*at, marks=pytest.mark.slow) for at in ((0, 2), (1, -1), (1, 0), (2, 3))]


@pytest.mark.parametrize(("chunks", "more"), [(0, 1), (1, 1), *SLOW])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition(name: str, chunks: int, more: int) -> None:
    make, definition, rule, size, _ = RULES[name]
    given = make(chunks * size + more)
    for mine, exact in zip(jax.jit(rule)(*given), definition(*given), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e2, 1e4])
@pytest.mark.parametrize("name", sorted(RULES.keys() - {"mamba1"}))  # which has no sums of rates
def test_fast_decay_does_not_overflow_a_chunk(name: str, factor: float) -> None:
    make, definition, rule, size, rates = RULES[name]
    given = [x * factor if i == rates else x for i, x in enumerate(make(2 * size))]
    for mine, exact in zip(rule(*given), definition(*given), strict=True):
        np.testing.assert_allclose(mine, exact, atol=1e-3)


LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
DENSE = {"shared_intermediate_size": 28, "num_local_experts": 0, "num_experts_per_tok": 0}
LONG = {
    "qwen3_next": {**LINEAR, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": LINEAR,
    "granitemoehybrid": {**LINEAR, **DENSE},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": []},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "linear_attention"]},
    "falcon_h1": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["linear_attention"] * 2},
    "kimi_linear": {**LINEAR, "mlp_layer_types": ["dense"] * 2},
    "minimax": {**LINEAR, "num_local_experts": 1, "num_experts_per_tok": 1},
}
"""Changes of a family's first case that leave no experts, which a rounding may choose otherwise, and no attention over
all tokens where a model may do without."""


NONE = {"layer_types", "attn_layer_indices", "layers_block_type"}
"""Keys by which these changes leave no attention."""


def as_ours(state: np.ndarray, like: Any) -> np.ndarray:
    """A state of transformers with the axes of ours."""
    if like.ndim == 4:
        return state
    batch, groups, heads, keys, values = like.shape
    if state.shape[2:] == (keys, values):
        return state.reshape(like.shape)
    return state.reshape(batch, groups, heads, values, keys).swapaxes(-1, -2)


def cache_of(reference: Any) -> Any:
    """An empty cache of transformers for a model."""
    from transformers import DynamicCache
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache() if reference.config.model_type == "minimax" else DynamicCache(config=reference.config)


@pytest.mark.slow
@pytest.mark.parametrize("family", LONG)
def test_a_state_after_10000_tokens_is_that_of_transformers(family: str, orbax: Callable[..., Any]) -> None:
    first = FIRST[family]
    case = Case(f"{family}-long", family, first.model_type, {**first.config, **LONG[family]})
    tokens, piece = 10_000, 500
    ids = np.random.default_rng(0).integers(3, 101, (1, tokens))
    reference, model = hf_model(case), tpuconv.load(orbax(case))
    theirs, ours = cache_of(reference), model.init_cache(1, tokens)
    # Without attention transformers' cache does not know its length.
    masks = {"attention_mask": {"full_attention": None, "linear_attention": None}} if LONG[family].keys() & NONE else {}
    argument = "cache" if "cache" in inspect.signature(reference.forward).parameters else "past_key_values"
    run = nnx.jit(lambda model, ids, cache: model(ids, cache=cache, first=-1))
    for at in range(0, tokens, piece):
        _, ours = run(model, jnp.asarray(ids[:, at : at + piece]), ours)
        with torch.no_grad():
            positions = torch.arange(at, at + piece)[None]
            piece_ids = torch.tensor(ids[:, at : at + piece])
            reference(piece_ids, position_ids=positions, use_cache=True, **{argument: theirs}, **masks)
    compared = 0
    for layer, entry in enumerate(ours.layers):
        state = entry[1] if isinstance(entry, tuple) else entry
        if state is None:
            continue
        mine = np.asarray(jax.tree.leaves(state)[0])
        of_minimax = family == "minimax"
        state = theirs.get_linear_cache(layer) if of_minimax else theirs.get_recurrent_state(layer, state_idx=0)
        want = as_ours(state.numpy(), mine)
        assert np.abs(mine - want).max() <= 1e-4 * np.abs(want).max()
        compared += 1
    assert compared == 2
