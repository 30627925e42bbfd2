"""Int8 caches: their error and size compared with caches in the model's dtype, in every way to call a model."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.families import CASES, OWN_CACHE, PROMPTS, Case, one_fast_of_each
from tpuconv.models.common.cache import quantize_vectors
from tpuconv.models.generate import left_padded

pytestmark = pytest.mark.usefixtures("quick_compiler")

TOP1, MEDIAN_KL, MEAN_KL = 0.92, 1e-3, 0.03
"""What an int8 cache must keep of the tiny models, of 26 tokens. Measured: at most two others, whose best two logits
are nearly alike; a median of 9e-5 to 7e-4 nats. The mean is as small but for DeepSeek V3 and Kimi K2, 0.008 and 0.013:
there one token goes to another expert, which is another function, and is 0.17 and 0.30 nats off."""

MORE = 4


@nnx.jit
def _extend(model: Any, ids_BT: jax.Array, mask_BT: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    logits_BTV, cache = model(ids_BT, mask_BT, cache=cache)
    return logits_BTV, cache


def logits(model: Any, ids_BT: np.ndarray, mask_BT: np.ndarray, dtype: str | None, at_once: int) -> np.ndarray:
    """Of all tokens: the first `at_once` in one call, the others one by one."""
    B, T = ids_BT.shape
    out, cache = _extend(model, ids_BT[:, :at_once], mask_BT[:, :at_once], model.init_cache(B, T, dtype))
    all_BTV = [out]
    for t in range(at_once, T):
        out, cache = _extend(model, ids_BT[:, t : t + 1], mask_BT[:, t : t + 1], cache)
        all_BTV.append(out)
    return np.concatenate(all_BTV, axis=1)


@pytest.mark.parametrize("case", one_fast_of_each(OWN_CACHE))
def test_logits_with_an_int8_cache(case: Case, orbax: Any) -> None:
    model = tpuconv.load(orbax(case))
    ids_BT, mask_BT = left_padded([prompt + PROMPTS[0][:MORE] for prompt in PROMPTS])
    prompt = ids_BT.shape[1] - MORE
    want, got = (logits(model, ids_BT, mask_BT, dtype, prompt) for dtype in (None, "int8"))
    p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (want, got))
    kl = (np.exp(p) * (p - q)).sum(-1)[mask_BT]
    top1 = (want.argmax(-1) == got.argmax(-1))[mask_BT].mean()
    print(f"{case.id}: top-1 {top1:.4f}, median KL {np.median(kl):.2e}, mean KL {kl.mean():.2e}")
    assert top1 >= TOP1
    assert kl.mean() <= MEAN_KL
    assert 1e-9 < np.median(kl) <= MEDIAN_KL  # 0 would be a cache that is not quantize_vectors
    # A token's keys are quantize_vectors by themselves: however they came in, and whatever stands before them.
    np.testing.assert_allclose(logits(model, ids_BT, mask_BT, "int8", 1)[mask_BT], got[mask_BT], atol=1e-3)
    alone = np.array([ids_BT[1][mask_BT[1]]])
    at_once = logits(model, alone, np.ones(alone.shape, bool), "int8", alone.shape[1])
    np.testing.assert_allclose(at_once[0], got[1][mask_BT[1]], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_bytes_of_an_int8_cache(family: str, orbax: Any) -> None:
    model = tpuconv.load(orbax(next(case for case in CASES if case.family == family)), "bfloat16")
    wide, narrow = (jax.tree.leaves(model.init_cache(2, 5, dtype).layers[0]) for dtype in (None, "int8"))
    vectors = [x.size // x.shape[-1] for x in wide]
    assert sum(x.nbytes for x in narrow) == sum(x.nbytes for x in wide) // 2 + 4 * sum(vectors)
    assert {str(x.dtype) for x in narrow} == {"int8", "float32"}


def test_a_vector_is_rounded_by_its_largest_element() -> None:
    x = np.array([[[3.0, -1.5, 0.01]], [[0.0, 0.0, 0.0]]], np.float32)
    codes, scale = map(np.asarray, quantize_vectors(x))
    np.testing.assert_array_equal(codes, [[[127, -64, 0]], [[0, 0, 0]]])
    np.testing.assert_allclose(scale, [[3 / 127], [0]], rtol=1e-6)
