"""Grouped matrix products for experts: rows, sorted by group, times the matrix of their group.

On TPU a Pallas kernel is used for few rows. It reads only the matrices of groups that have rows. XLA's own kernel does
so too, but before it XLA prefetches all matrices to VMEM. Before the Pallas kernel is used, its result is compared with
that of XLA's kernel on the device, once per process and shape.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from tpuconv.notation.sharding import LANES

FEW_ROWS = 512
"""The most rows for which the Pallas kernel is used. With more rows all matrices are needed, and XLA's kernel, which
has larger blocks, is faster."""
TILE_ROWS = 128
"""Rows of a block: the rows of the matrix unit, for which fewer take as long."""
SLAB = 1024
"""The length of the contracted axis in one product within the kernel. So many rows of a matrix are converted at
once."""
FAST_BYTES = 14 << 20
"""Bytes of VMEM that the kernel uses, of 16 MB: two blocks of each operand and of the result (one is used while the
other is transferred), the sum, and a converted slab."""
DEPTH = 128
"""The depth of the matrix unit."""
REGISTER = 8
"""Rows of float32 in a register. Groups that are multiples of it are split without moving values."""
SUBLANES = 32
"""Rows of int8 in a register. A height that is not a multiple of it is padded."""
XLA_KINDS = ("bfloat16", "float32", "int8")
"""The dtypes of matrices that XLA's kernel supports."""
FP4_TYPE = "float4_e2m1fn"
KINDS = (*XLA_KINDS, "float8_e4m3fn", "float8_e5m2", "int4", FP4_TYPE)
"""The dtypes of matrices that the Pallas kernel supports."""
CHECK_LIMIT = 2.0**-8
"""The largest difference of the two kernels' results, relative to the largest result. XLA's kernel rounds dequantized
values to bfloat16, and may multiply float32 as bfloat16, which gives about half of it. A wrong matrix, scale or slab
gives far more."""

Kernel = Callable[..., jax.Array]


def grouped_matmul(
    x: jax.Array, kernel: jax.Array, counts: jax.Array, *, groups: int, scale: jax.Array | None = None
) -> jax.Array:
    """Multiplies the rows of each group with the group's matrix.

    Args:
        x: rows [R, D], sorted by group.
        kernel: matrices [E, D, M].
        counts: number of rows of each group [E]. The results of rows after the last group are undefined.
        groups: number of groups that the rows were distributed over, those on other devices included.
        scale: for quantized matrices, scales [E, D/d, M/m] of blocks of d by m values.

    Returns:
        [R, M] in float32.
    """
    operands = (x, kernel, counts) if scale is None else (x, kernel, counts, scale)
    if (
        len(x) <= FEW_ROWS
        and kernel.dtype.name in KINDS
        and tile_width(x, kernel, scale) is not None
        and (jax.default_backend() != "tpu" or _is_correct(*map(_signature, (x, kernel, scale)), groups))
    ):
        on_tpu: Kernel = partial(few_rows, groups=groups)
    elif scale is not None:
        on_tpu = partial(by_xla, dtype=x.dtype)  # the matrix unit rounds to it anyway, and it has half the bytes
    else:
        return by_xla(*operands)
    return _on_platform(on_tpu, *operands)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _on_platform(on_tpu: Kernel, *operands: jax.Array) -> jax.Array:
    """Returns the result of a kernel for TPUs, or of XLA's on other devices."""
    y: jax.Array = jax.lax.platform_dependent(*operands, tpu=on_tpu, default=by_xla)
    return y


@_on_platform.defjvp
def _by_xla_with_tangents(_: Kernel, operands: Any, tangents: Any) -> Any:
    """Pallas has no derivative of the kernel for TPUs."""
    return jax.jvp(by_xla, operands, tangents)


Signature = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


def _signature(x: jax.Array | None) -> Signature | None:
    return None if x is None else (x.shape, x.dtype.name)


@cache
def _is_correct(x: Signature, kernel: Signature, scale: Signature | None, groups: int) -> bool:
    """Returns True if the result of the Pallas kernel equals XLA's kernel on the first device; warns if not. Runs in
    another thread, since the caller may be tracing a model or have set a mesh, which apply to its own thread only."""
    with ThreadPoolExecutor(1) as thread:
        problem = thread.submit(difference, x, kernel, scale, groups, few_rows).result()
    if problem is not None:
        scaled = "" if scale is None else f", scales {list(scale[0])} in {scale[1]}"
        warnings.warn(
            f"the TPU kernel for experts is not used for rows {list(x[0])} in {x[1]} and matrices {list(kernel[0])} in "
            f"{kernel[1]}{scaled}: {problem}. jax.lax.ragged_dot is used instead, which is slower",
            stacklevel=2,
        )
    return problem is None


def difference(x: Signature, kernel: Signature, scale: Signature | None, groups: int, ours: Kernel) -> str | None:
    """Compares a kernel with `by_xla` for random operands of these shapes on the first device.

    Returns:
        None if the results are equal up to rounding (`CHECK_LIMIT`), else a description of the difference or error.
    """
    (R, _), (E, _, _) = x[0], kernel[0]
    rng = np.random.default_rng(0)
    counts = rng.multinomial(R, [1 / max(groups, E)] * E + [1 - E / max(groups, E)])[:E]
    count = int(counts.sum())
    try:
        with jax.default_device(jax.local_devices()[0]):
            keys = jax.random.split(jax.random.key(0), 3)
            operands = [_random(keys[0], x), _random(keys[1], kernel), jnp.asarray(counts, jnp.int32)]
            if scale is not None:
                operands.append(jax.random.uniform(keys[2], scale[0], jnp.float32, 0.5, 2).astype(scale[1]))
            y = np.asarray(jax.jit(partial(ours, groups=groups))(*operands))[:count]
            wanted = np.asarray(jax.jit(partial(by_xla, dtype=x[1]))(*operands))[:count]
    except Exception as e:  # compiler and device raise exceptions of any type
        return f"it fails with {type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}"
    error = np.abs(y - wanted)
    if not error.size or error.max() <= CHECK_LIMIT * np.abs(wanted).max():
        return None
    row, column = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    return f"it gives {y[row, column]:.6g} where jax.lax.ragged_dot gives {wanted[row, column]:.6g}"


@partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, like: Signature) -> jax.Array:
    """Random values. Converted one matrix at a time, since all in float32 would need more memory than the model."""
    shape, dtype = like
    size = {"int8": 40.0, "int4": 3.0}.get(dtype, 1.0)
    keys = jax.random.split(key, shape[0])
    values: jax.Array = jax.lax.map(lambda key: (size * jax.random.normal(key, shape[1:])).astype(dtype), keys)
    return values


def by_xla(
    x: jax.Array,
    kernel: jax.Array,
    counts: jax.Array,
    scale: jax.Array | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Returns the same as `grouped_matmul`, by `jax.lax.ragged_dot`. Scales of columns are multiplied with the
    products. With scales of smaller blocks the matrices are dequantized first, and rounded to `dtype`."""
    if scale is not None and scale.shape[1] > 1:
        kernel, scale = _dequantized(kernel, scale).astype(dtype or scale.dtype), None
    elif kernel.dtype.name not in XLA_KINDS:
        kernel = kernel.astype(x.dtype)
    y = jax.lax.ragged_dot(x, kernel, counts, preferred_element_type=jnp.float32)
    if scale is None:
        return y
    by_column = jnp.repeat(scale[:, 0], kernel.shape[2] // scale.shape[2], axis=1)
    return y * jnp.repeat(by_column, counts, axis=0, total_repeat_length=len(y))


def _dequantized(kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """Quantized values [E, D, M] times the scales of their blocks, which are not repeated in memory."""
    (E, D, M), (_, rows, columns) = kernel.shape, scale.shape
    blocks = kernel.astype(scale.dtype).reshape(E, rows, D // rows, columns, M // columns)
    return (blocks * scale[:, :, None, :, None]).reshape(E, D, M)


def few_rows(
    x: jax.Array,
    kernel: jax.Array,
    counts: jax.Array,
    scale: jax.Array | None = None,
    *,
    groups: int,
    interpret: bool = False,
) -> jax.Array:
    """Returns the same as `grouped_matmul`, by a Pallas kernel, as in MegaBlocks (arXiv:2211.15841): one step for each
    pair of a group and a block of rows with rows of the group. A block with rows of several groups is visited by each
    of them, which writes its own rows only. `interpret` runs the kernel without a TPU."""
    (R, D), (E, _, M) = x.shape, kernel.shape
    height, width = min(R, TILE_ROWS), tile_width(x, kernel, scale)
    assert width is not None
    ends = jnp.cumsum(counts)
    starts = ends - counts
    tiles = jnp.where(counts > 0, -(-ends // height) - starts // height, 0)
    most = -(-R // height) + E - 1
    group = jnp.repeat(jnp.arange(E), tiles, total_repeat_length=most)
    tile = starts[group] // height + jnp.arange(most) - (jnp.cumsum(tiles) - tiles)[group]

    def step(group: Any, tile: Any, starts: Any, ends: Any, x: Any, kernel: Any, *scale_and_y: Any) -> None:
        *scales, y = scale_and_y
        j, at = pl.program_id(0), pl.program_id(1)
        rows = tile[at] * height + jax.lax.broadcasted_iota(jnp.int32, y.shape, 0)
        is_own = (rows >= starts[group[at]]) & (rows < ends[group[at]])
        scale = _of_columns(scales[0][0].astype(jnp.float32), j * width, width, M) if scales else None
        y[...] = jnp.where(is_own, _tile_matmul(x, kernel.at[0], scale), y[...])

    operands = [x, kernel]
    blocks = [
        pl.BlockSpec((height, D), lambda j, at, group, tile, *_: (tile[at], 0)),
        pl.BlockSpec((1, D, width), lambda j, at, group, *_: (group[at], 0, j)),
    ]
    if scale is not None:
        operands.append(scale)
        whole = scale.shape[2] != M
        of_tiles = (1, scale.shape[1], scale.shape[2] if whole else width)
        blocks.append(pl.BlockSpec(of_tiles, lambda j, at, group, *_: (group[at], 0, 0 if whole else j)))
    visited = expected_groups(R, E, groups)
    cost = pl.CostEstimate(
        flops=round(2 * visited * height * D * M),
        bytes_accessed=round(
            visited * sum(a.size // E * _bytes_per_element(a) for a in operands[1:])
        ),  # rows are in fast memory
        transcendentals=0,
    )
    call = pl.pallas_call(
        step,
        out_shape=jax.ShapeDtypeStruct((R, M), jnp.float32),  # type: ignore[no-untyped-call]
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(-(-M // width), jnp.sum(tiles)),
            in_specs=blocks,
            out_specs=pl.BlockSpec((height, width), lambda j, at, group, tile, *_: (tile[at], j)),
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="few_rows",
    )
    if not interpret:  # without the constraint the compiler may prefetch all matrices to VMEM
        operands[1:] = [pltpu.with_memory_space_constraint(operand, pltpu.HBM) for operand in operands[1:]]
    y: jax.Array = call(*(a.astype(jnp.int32) for a in (group, tile, starts, ends)), *operands)
    return y


def _tile_matmul(x: Any, kernel: Any, scale: jax.Array | None) -> jax.Array:
    """Within the kernel: rows [height, D] times a matrix [D, width] with scales [D/d, width], slab by slab. The scales
    of blocks with d >= `DEPTH` are multiplied with a slab's product, others with the quantized values."""
    D, width = kernel.shape
    deep = D if scale is None else D // len(scale)
    y = jnp.zeros((len(x), width), jnp.float32)
    for slab in _slabs(D, deep):
        values = _from_fp4(kernel[slab]) if kernel.dtype == FP4_TYPE else kernel[slab]
        slab_scale = None if scale is None else scale[slab.start // deep : -(-slab.stop // deep)]
        if slab_scale is not None and deep < DEPTH:
            blocks = values.astype(jnp.float32).reshape(len(slab_scale), deep, width) * slab_scale[:, None]
            values, slab_scale = blocks.reshape(-1, width), None
        product = jnp.dot(x[:, slab], values.astype(x.dtype), preferred_element_type=jnp.float32)
        y += product if slab_scale is None else product * slab_scale
    return y


def _slabs(D: int, deep: int) -> list[slice]:
    """Returns the rows of a matrix for each product: a part of one block, or complete blocks of depth `deep`."""
    step = deep if deep >= DEPTH else SLAB // deep * deep
    ends = [(start, min(start + step, D)) for start in range(0, D, step)]
    return [slice(d, min(d + SLAB, end)) for start, end in ends for d in range(start, end, SLAB)]


def _from_fp4(quantized: jax.Array) -> jax.Array:
    """Within the kernel: the float32 values of FP4 (OCP Microscaling Formats v1.0: 1 bit of sign, 2 of exponent, 1 of
    mantissa). Few TPUs convert this type themselves."""
    code = pltpu.bitcast(quantized, jnp.int4).astype(jnp.int32)
    size = code & 7
    halves = jnp.where(size < 2, size, (2 + (size & 1)) << ((jnp.maximum(size, 2) >> 1) - 1))
    return jnp.where(code < 0, -halves, halves).astype(jnp.float32) * 0.5


def _of_columns(scale: jax.Array, first: Any, width: int, M: int) -> jax.Array:
    """Within the kernel: the scales [D/d, width] of the columns from `first` on, from the scales of blocks [D/d, M/m].
    By a product with a matrix of zeros and ones, since lanes cannot be repeated."""
    if scale.shape[1] == width:
        return scale
    of_tile = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[1], width), 0)
    column = first + jax.lax.broadcasted_iota(jnp.int32, of_tile.shape, 1)
    tile = jax.lax.div(column, jnp.int32(M // scale.shape[1]))
    return jnp.dot(scale, (tile == of_tile).astype(scale.dtype), precision=jax.lax.Precision.HIGHEST)


def expected_groups(rows: int, here: int, groups: int) -> float:
    """Returns the expected number of groups with rows, of `here` groups, if each row chooses one of all `groups`
    uniformly."""
    return here * (1 - (1 - 1 / groups) ** rows)


def tile_width(x: jax.Array, kernel: jax.Array, scale: jax.Array | None = None) -> int | None:
    """Returns the number of columns of a matrix that are in VMEM at a time; None if the Pallas kernel does not support
    these shapes."""
    D, M = kernel.shape[1:]
    height, kind = min(len(x), TILE_ROWS), x.dtype.itemsize
    tiles = 0 if scale is None else scale.shape[1]
    column = 2 * round(D * _bytes_per_element(kernel)) + 3 * 4 * (height + tiles) + (8 + kind) * min(D, SLAB)
    room = FAST_BYTES - 2 * height * D * kind
    widest = room // column
    if D % SUBLANES or (tiles and D // tiles % REGISTER) or widest < min(M, LANES):
        return None
    if widest >= M:
        return M
    tiles = -(-M // (widest // LANES * LANES))
    return -(-M // (tiles * LANES)) * LANES


def _bytes_per_element(x: jax.Array) -> float:
    """Returns the bytes of an element, which may be a fraction."""
    bits: int = jax.dtypes.itemsize_bits(x.dtype)
    return bits / 8
