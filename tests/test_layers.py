"""The layers that families share."""

from collections.abc import Callable
from math import erfc, exp, pi, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuconv.models.common.layers import Einsum, Embed, Keys, gelu, gelu_tanh

SIZES = {"D": 96, "N": 4, "H": 16, "F": 70, "V": 301}


def exact(equation: str, x: jax.Array, kernel: jax.Array) -> np.ndarray:
    return np.einsum(equation, np.asarray(x, np.float64), np.asarray(kernel, np.float64))


def assert_rounded_once(y: jax.Array, wanted: np.ndarray) -> None:
    assert y.shape == wanted.shape
    error = 2**-8 if y.dtype == jnp.bfloat16 else 1e-6
    assert np.abs(np.asarray(y, np.float64) - wanted).max() <= error * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("equation", ["BTD,DNH->BTNH", "BTNH,NHD->BTD", "BTD,DF->BTF"])
def test_products_are_rounded_once(equation: str, tokens: int, dtype: Any) -> None:
    layer = Einsum(equation, SIZES, bias=True, dtype=dtype, keys=Keys(jax.random.key(0)))
    letters = equation.partition(",")[0][2:]
    x = jax.random.normal(jax.random.key(1), (1, tokens, *(SIZES[letter] for letter in letters)), dtype)
    assert layer(x).dtype == dtype
    assert_rounded_once(jax.jit(lambda x: layer(x))(x), exact(equation, x, layer.kernel[...]))


@pytest.mark.parametrize("tokens", [1, 3])
def test_logits_by_the_embedding_are_rounded_once(tokens: int) -> None:
    embed = Embed(SIZES, dtype=jnp.bfloat16, keys=Keys(jax.random.key(0)))
    x_BTD = jax.random.normal(jax.random.key(1), (1, tokens, SIZES["D"]), jnp.bfloat16)
    assert_rounded_once(jax.jit(embed.attend)(x_BTD), exact("BTD,VD->BTV", x_BTD, embed.embedding[...]))


@pytest.mark.parametrize(
    ("ours", "exactly"),
    [
        (gelu, lambda x: x * erfc(-x / sqrt(2)) / 2),
        (gelu_tanh, lambda x: x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 * x**3)))),
    ],
    ids=["gelu", "gelu_tanh"],
)
def test_gelu_of_negative_inputs_loses_no_digits(
    ours: Callable[[jax.Array], jax.Array], exactly: Callable[[float], float]
) -> None:
    x = np.linspace(-5, 5, 1001, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(ours)(jnp.asarray(x)), [exactly(each) for each in x.tolist()], rtol=5e-6)
