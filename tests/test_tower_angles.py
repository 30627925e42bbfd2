"""Rotary angles of patches against transformers' own modules: scores of random queries and keys."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.pixtral import modeling_pixtral as pixtral
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

from tpuconv.models.common.layers import apply_rope, apply_rope_to_neighbours, deinterleave
from tpuconv.models.towers.angles import (
    alternating,
    apply_rope_by_halves,
    columns_then_rows,
    cos_sin,
    from_one,
    interleaved,
    rows_then_columns,
)
from tpuconv.models.towers.places import raster

N, H, THETA = 3, 16, 100.0
RATES = {"rope_type": "axial", "rope_theta": THETA}
CONFIG = SimpleNamespace(
    rope_parameters=RATES, hidden_size=N * H, num_attention_heads=N, head_dim=H, image_size=6, patch_size=1
)
AT = raster(6, 6)[[0, 1, 6, 11, 17, 30, 35]]
Q, K = np.random.default_rng(0).standard_normal((2, len(AT), N, H)).astype(np.float32)


def qwen(q, k, at):
    cos, sin = qwen3.Qwen3VLVisionRotaryEmbedding(CONFIG)(q, at)
    return qwen3.apply_rotary_pos_emb_vision(q, k, cos, sin)


def moonvit(q, k, at):
    """transformers moves the neighbours (2i, 2i + 1) of a release to (i, i + H/2) when it reads it."""
    cos, sin = kimi.Kimi_K25VisionRotaryEmbedding(CONFIG)(q, at)
    q, k = (torch.tensor(np.asarray(deinterleave(jnp.asarray(x.float().numpy())))).to(x.dtype) for x in (q, k))
    return kimi.apply_rotary_pos_emb_vision(q, k, cos, sin)


def pixtral_(q, k, at):
    cos, sin = pixtral.PixtralVisionRotaryEmbedding(CONFIG)(q, at)
    return pixtral.apply_rotary_pos_emb(q, k, cos, sin)


def gemma(q, k, at):
    columns_first = at.flip(-1)[None]
    cos, sin = gemma4.Gemma4VisionRotaryEmbedding(CONFIG)(q, columns_first)
    return [gemma4.apply_multidimensional_rope(x[None], cos, sin, columns_first)[0] for x in (q, k)]


def llama(q, k, at):
    freqs = llama4.Llama4VisionRotaryEmbedding(CONFIG).freqs_ci
    index = torch.where(at[:, 0] < 0, 36, at[:, 0] * 6 + at[:, 1])
    return [x[0] for x in llama4.vision_apply_rotary_emb(q[None], k[None], freqs[index])]


CASES = {
    "qwen": (rows_then_columns, apply_rope, qwen, None),
    "moonvit": (interleaved, apply_rope_to_neighbours, moonvit, None),
    "pixtral": (alternating, apply_rope, pixtral_, "rounded"),
    "gemma 4": (columns_then_rows, apply_rope_by_halves, gemma, "rounded"),
    "llama 4": (from_one, apply_rope_to_neighbours, llama, None),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_reference(case, dtype):
    angles, apply, reference, rounded = CASES[case]
    at = np.concatenate([AT, [[-1, -1]]])[1:] if case == "llama 4" else AT
    want = reference(*(torch.tensor(x).to(getattr(torch, dtype)) for x in (Q, K)), torch.tensor(at))
    turns = cos_sin(angles(at, H, THETA), dtype if rounded else jnp.float32)
    have = jax.jit(lambda *xs: [apply(x, turns) for x in xs])(*(jnp.asarray(x, dtype) for x in (Q, K)))
    assert {x.dtype for x in have} == {jnp.dtype(dtype)}
    q, k = (np.asarray(x, np.float32) for x in have)
    want_q, want_k = (x.float().numpy() for x in want)
    np.testing.assert_allclose(
        np.einsum("pnh,snh->nps", q, k), np.einsum("pnh,snh->nps", want_q, want_k), atol=2e-5, rtol=1e-5
    )


def test_a_class_token_does_not_turn():
    turns = cos_sin(from_one(np.array([[-1, -1]]), H, THETA))
    np.testing.assert_array_equal(apply_rope(jnp.asarray(Q[:1]), turns), Q[:1])
