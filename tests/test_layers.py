"""The shared leaves: one token's products, which have forms of their own on a CPU."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuconv.models.layers import Einsum, Embed, Keys
from tpuconv.models.vector import TARGET, vector_product

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


def lowered(layer: Einsum, x: jax.Array) -> dict[str, str]:
    step = jax.jit(lambda x: layer(x)).trace(x)
    return {platform: step.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu")}


def test_no_program_for_another_device_has_the_kernel_for_cpus() -> None:
    layer = Einsum("BTD,DNH->BTNH", SIZES, dtype=jnp.bfloat16, keys=Keys(jax.random.key(0)))
    texts = lowered(layer, jnp.ones((1, 1, SIZES["D"]), jnp.bfloat16))
    assert TARGET in texts["cpu"]
    assert "dot_general" not in texts["cpu"]
    assert TARGET not in texts["tpu"]
    assert "dot_general" in texts["tpu"]


def test_a_sum_over_two_axes_is_one_over_one_on_a_cpu() -> None:
    layer = Einsum("BTNH,NHD->BTD", {"N": 3, "H": 10, "D": 96}, dtype=jnp.float32, keys=Keys(jax.random.key(0)))
    texts = lowered(layer, jnp.ones((1, 1, 3, 10), jnp.float32))
    assert "contracting_dims = [3, 2] x [1, 0]" in texts["tpu"]
    assert "contracting_dims = [0] x [0]" in texts["cpu"]


def operands(shape: tuple[int, int], axis: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    x, matrix = (
        jax.random.normal(jax.random.key(i), own, dtype) for i, own in enumerate([shape[axis : axis + 1], shape])
    )
    return x, matrix


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((8, 64), 0),
        ((104, 32), 0),
        ((24, 8224), 0),
        ((4, 32), 1),
        ((43, 96), 1),
        ((1003, 64), 1),
        ((7, 5), 0),
        ((3, 32), 1),
    ],
)
def test_every_row_and_column_is_in_a_product(shape: tuple[int, int], axis: int, dtype: Any) -> None:
    x, matrix = operands(shape, axis, dtype)
    y = vector_product(x, matrix, axis)
    assert y.dtype == dtype
    assert_rounded_once(y, np.tensordot(np.asarray(x, np.float64), np.asarray(matrix, np.float64), (0, axis)))


def test_a_product_can_be_mapped_and_derived() -> None:
    x, matrix = operands((16, 64), 0, jnp.float32)
    xs = jnp.stack([x, 2 * x, -x])
    ys = jax.vmap(lambda x: vector_product(x, matrix, 0))(xs)
    np.testing.assert_allclose(ys, xs @ matrix, rtol=1e-5, atol=1e-5)
    slope = jax.grad(lambda x: vector_product(x, matrix, 0).sum())(x)
    np.testing.assert_allclose(slope, matrix.sum(axis=1), rtol=1e-5, atol=1e-5)


def test_numba_is_loaded_for_programs_of_cpus_alone() -> None:
    program = """
import sys
import jax
import jax.numpy as jnp
from tpuconv.models.vector import vector_product
step = jax.jit(lambda x, matrix: vector_product(x, matrix, 0)).trace(jnp.ones(8), jnp.ones((8, 16)))
assert "numba" not in sys.modules
step.lower(lowering_platforms=("cpu",))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_matrix_divided_among_devices_is_not_gathered_for_the_kernel() -> None:
    program = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tpuconv.models.vector import TARGET, vector_product
mesh = jax.make_mesh((2,), ("tensor",))
x, matrix = jnp.arange(8.0), jax.device_put(jnp.ones((8, 32)), NamedSharding(mesh, PartitionSpec(None, "tensor")))
step = jax.jit(lambda x, matrix: vector_product(x, matrix, 0)).lower(x, matrix)
assert TARGET not in step.as_text()
assert "all-gather" not in step.compile().as_text()
assert (step.compile()(x, matrix) == 28).all()
specs = {"in_specs": (PartitionSpec(), PartitionSpec(None, "tensor")), "out_specs": PartitionSpec("tensor")}
each = jax.shard_map(lambda x, matrix: vector_product(x, matrix, 0), mesh=mesh, **specs)
assert TARGET in jax.jit(each).lower(x, matrix).as_text()
assert (jax.jit(each)(x, matrix) == 28).all()
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
