"""Attention of towers: by segments, and block by block as at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuconv.models.towers import attention
from tpuconv.models.towers.attention import attend

B, P, N, H = 2, 37, 3, 5
SEGMENTS = np.array([[0] * 11 + [1] * 20 + [-1] * 6, [4] * 30 + [7] * 7])


def qkv(dtype=jnp.float32):
    return [jnp.asarray(x, dtype) for x in np.random.default_rng(0).standard_normal((3, B, P, N, H))]


def by_hand(q, k, v, segment_BP, scale=H**-0.5, is_key_BP=None, place_BP=None, reach=None, bias_BNS=None):
    """In float64, patch by patch."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y = np.zeros(q.shape)
    for b, p, n in np.ndindex(B, P, N):
        seen = segment_BP[b] == segment_BP[b, p]
        seen = seen if is_key_BP is None else seen & is_key_BP[b]
        seen = seen if reach is None else seen & (np.abs(place_BP[b] - place_BP[b, p]) <= reach)
        bias = 0 if bias_BNS is None else bias_BNS[b, n, seen]
        weights = np.exp(k[b, seen, n] @ q[b, p, n] * scale + bias)
        y[b, p, n] = weights @ v[b, seen, n] / weights.sum()
    return y


KEYS = np.arange(P)[None] % 10 > np.array([[2], [0]])


NEAR = {"place_BP": np.stack([np.arange(P), np.random.default_rng(1).permutation(P)]), "reach": 4}
BIAS = {"bias_BNS": np.random.default_rng(2).standard_normal((B, N, P)).astype(np.float32)}
MORE = {"": {}, "scale": {"scale": 1.0}, "keys": {"is_key_BP": KEYS}, "near": NEAR, "bias": BIAS, "both": NEAR | BIAS}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
@pytest.mark.parametrize("rows", [P, 5, 1], ids=["at once", "blocks", "one by one"])
def test_patches_attend_to_their_segment(more, rows, monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * B * N * P * rows)
    have = jax.jit(lambda *x: attend(*x, **more))(*qkv(), SEGMENTS)
    np.testing.assert_allclose(have, by_hand(*qkv(), SEGMENTS, **more), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_and_their_gradients_are_those_of_all_at_once(dtype, monkeypatch):
    def loss(q, k, v):
        y = attend(q, k, v, jnp.asarray(SEGMENTS))
        assert y.dtype == dtype
        return jnp.sum(jnp.sin(y.astype(jnp.float32)) * np.arange(P)[:, None, None]), y

    def run():
        return jax.jit(jax.value_and_grad(lambda *x: loss(*x), (0, 1, 2), has_aux=True))(*qkv(dtype))

    (_, want), slopes = run()
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * B * N * P * 4)
    (_, have), of_blocks = run()
    exact = 1e-6 if dtype == jnp.float32 else 2.0**-7
    for one, other in [(have, want), *zip(of_blocks, slopes, strict=True)]:
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=exact, atol=exact * np.abs(other).max())


def test_patches_without_keys_are_finite():
    y = attend(*qkv(), SEGMENTS, is_key_BP=np.zeros((B, P), bool))
    assert np.isfinite(y).all()


def test_scores_of_large_images_are_bounded():
    """16,384 patches, 16 heads of 72: all scores are 17 GB. The compiler's own count, nothing is run."""
    shape = jax.ShapeDtypeStruct((1, 16384, 16, 72), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, 16384), jnp.int32)
    compiled = jax.jit(attend).lower(shape, shape, shape, segments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * attention.SCORE_BYTES
