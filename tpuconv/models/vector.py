"""One token's product with a matrix on a CPU, where reading the matrix is what takes the time.

XLA's own loops read bfloat16 at a third of the memory's bandwidth, or write out a copy in float32 (docs/log.md). So a
program for a CPU calls a kernel of ours (`vector_kernels`), and no other program has it.
"""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

TARGET = "tpuconv_vector_product"
PARTS = 10
"""Calls for one product, each with some of the rows. XLA:CPU shares with another thread what is ready beyond eight
calls; with these, half of them."""
LANES = 16
"""Words of 32 bits that a kernel multiplies at once."""
ROWS, DOTS = 8, 4
"""Rows that it reads at once: to add them up, or to multiply each with the same vector."""


def vector_product(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """The product of a vector and a matrix over an axis of the matrix, summed in float32."""
    y: jax.Array = vector_product_p.bind(x, matrix, axis=axis)  # type: ignore[no-untyped-call]
    return y


def plain(x: jax.Array, matrix: jax.Array, *, axis: int) -> jax.Array:
    """The same by XLA."""
    return jnp.tensordot(x, matrix, (0, axis))


def in_parts(x: jax.Array, matrix: jax.Array, *, axis: int) -> jax.Array:
    """The same by the kernel. Sums come in halves: those of even columns and of odd ones, where two lie in a word."""
    rows, columns = matrix.shape
    halves = 4 // matrix.dtype.itemsize
    unit = DOTS if axis else ROWS
    parts = min(PARTS, rows // unit)
    cuts = [*(rows // unit * part // parts * unit for part in range(parts)), rows]
    ys = []
    for first, last in pairwise(cuts):
        shape = (last - first,) if axis else (halves, columns // halves)
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, jnp.float32))  # type: ignore[no-untyped-call]
        ys.append(call(x, matrix, axis=np.int64(axis), first=np.int64(first), last=np.int64(last)))
    y: jax.Array = jnp.concatenate(ys) if axis else sum(ys[1:], ys[0]).T.reshape(columns)
    return y.astype(x.dtype)


def fits(matrix: Any, axis: int) -> bool:
    """Whether the kernel takes this matrix."""
    rows, columns = matrix.shape
    if matrix.dtype not in (jnp.float32, jnp.bfloat16) or columns % (LANES * 4 // matrix.dtype.itemsize):
        return False
    enough = rows >= DOTS if axis else rows > 0 and rows % ROWS == 0
    return bool(enough)


vector_product_p = Primitive("vector_product")
vector_product_p.def_impl(jax.jit(vector_product, static_argnames="axis"))  # type: ignore[no-untyped-call]


@vector_product_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _shape(x: Any, matrix: Any, *, axis: int) -> Any:
    return jax.core.ShapedArray((matrix.shape[1 - axis],), x.dtype)


def _lower(context: Any, *args: Any, axis: int) -> Any:
    # XLA cannot divide a call among devices: it would gather the whole matrix on each.
    devices = getattr(context.module_context.axis_context, "num_devices", 1)
    if devices > 1 or not fits(context.avals_in[1], axis):
        return mlir.lower_fun(plain, multiple_results=False)(context, *args, axis=axis)
    from tpuconv.models import vector_kernels  # registers the kernel  # noqa: F401

    return mlir.lower_fun(in_parts, multiple_results=False)(context, *args, axis=axis)


def _batch(args: Any, axes: Any, *, axis: int) -> Any:
    return jax.vmap(lambda x, matrix: plain(x, matrix, axis=axis), in_axes=axes)(*args), 0


def _derive(args: Any, tangents: Any, *, axis: int) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda x, matrix: plain(x, matrix, axis=axis), args, tangents)


mlir.register_lowering(vector_product_p, _lower, platform="cpu")
batching.primitive_batchers[vector_product_p] = _batch
ad.primitive_jvps[vector_product_p] = _derive
