"""Grouped matrix products: rows, sorted by group, times the matrix of their group, as experts need them.

On a TPU a Pallas kernel of our own multiplies few rows. It reads only the matrices of groups that have rows, from HBM.
XLA's own kernel reads no others either, but XLA fetches all of them to fast memory ahead of it. Before the kernel is
used on a TPU it is compared there with XLA's, once per process and shape.
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

from tpuconv.sharding import LANES

FEW_ROWS = 512
"""Up to as many the kernel is used. Of many rows each matrix has some, and XLA's kernel has larger tiles."""
TILE_ROWS = 128
"""Of the matrix unit: fewer rows take as long."""
SLAB = 1024
"""Columns of rows that are multiplied at a time: of a matrix as many rows are converted."""
FAST_BYTES = 14 << 20
"""Of fast memory, of which a kernel has 16 MB: two tiles of every operand and of the result, one that is multiplied and
one that comes or goes, the sum, and a converted slab."""
DEPTH = 128
"""Of the matrix unit."""
REGISTER = 8
"""Rows of float32 in a register: tiles of that height are split without moving a value."""
SUBLANES = 32
"""Of a register of int8: a height that is no multiple of it is padded."""
XLA_KINDS = ("bfloat16", "float32", "int8")
"""What XLA's kernel multiplies with."""
FP4_TYPE = "float4_e2m1fn"
KINDS = (*XLA_KINDS, "float8_e4m3fn", "float8_e5m2", "int4", FP4_TYPE)
"""What ours does."""
CHECK_LIMIT = 2.0**-8
"""Largest difference of our kernel from XLA's, by the largest result. XLA's rounds dequantized values to bfloat16 and
may multiply float32 as bfloat16, which makes about a half of it; a wrong matrix, scale or slab makes far more."""

Kernel = Callable[..., jax.Array]


def grouped_matmul(
    x: jax.Array, kernel: jax.Array, counts: jax.Array, *, groups: int, scale: jax.Array | None = None
) -> jax.Array:
    """Multiplies the rows of each group with the group's matrix.

    Args:
        x: rows [R, D], sorted by group.
        kernel: matrices [E, D, M].
        counts: rows of each group [E]. What becomes of rows after the last group's is undefined.
        groups: number of groups among which the rows were distributed, those on other devices included.
        scale: [E, D/d, M/m] of quantized matrices, one for each tile of d by m values.

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
        on_tpu = partial(by_xla, dtype=x.dtype)  # to which its matrix unit rounds anyway: half of the bytes
    else:
        return by_xla(*operands)
    y: jax.Array = jax.lax.platform_dependent(*operands, tpu=on_tpu, default=by_xla)
    return y


Signature = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


def _signature(x: jax.Array | None) -> Signature | None:
    return None if x is None else (x.shape, x.dtype.name)


@cache
def _is_correct(x: Signature, kernel: Signature, scale: Signature | None, groups: int) -> bool:
    """Whether our kernel computes what XLA's does on the first device here; if not, it warns. In a thread of its own,
    as this is called while a model is traced: there nothing is traced, and no mesh is set."""
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
    """Runs a kernel with random operands of these shapes on the first device here.

    Returns:
        None where it computes what `by_xla` does, up to rounding; else what is wrong, in words.
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
    except Exception as e:  # of the compiler or the device: of any kind
        return f"it fails with {type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}"
    apart = np.abs(y - wanted)
    if not apart.size or apart.max() <= CHECK_LIMIT * np.abs(wanted).max():
        return None
    row, column = np.unravel_index(np.argmax(np.nan_to_num(apart, nan=np.inf)), apart.shape)
    return f"it gives {y[row, column]:.6g} where jax.lax.ragged_dot gives {wanted[row, column]:.6g}"


@partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, like: Signature) -> jax.Array:
    """Values of a type, one matrix at a time: all in float32 would take more memory than the model has."""
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
    """The same by XLA's own kernel. Scales of columns are multiplied with the rows' products, so that the matrices are
    read as they are; those of tiles with the matrices, which are rounded to `dtype` then."""
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
    """Codes times the scales of their tiles: these are not repeated in memory."""
    (E, D, M), (_, deep, wide) = kernel.shape, scale.shape
    tiles = kernel.astype(scale.dtype).reshape(E, deep, D // deep, wide, M // wide)
    return (tiles * scale[:, :, None, :, None]).reshape(E, D, M)


def few_rows(
    x: jax.Array,
    kernel: jax.Array,
    counts: jax.Array,
    scale: jax.Array | None = None,
    *,
    groups: int,
    interpret: bool = False,
) -> jax.Array:
    """The same by a Pallas kernel, in the way of megablox (arXiv:2211.15841): one step for each group and each tile of
    rows that it has rows in. A tile that groups share is visited by each of them, and keeps the rows of all."""
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
    if not interpret:  # else the compiler may bring all matrices to fast memory ahead
        operands[1:] = [pltpu.with_memory_space_constraint(operand, pltpu.HBM) for operand in operands[1:]]
    y: jax.Array = call(*(a.astype(jnp.int32) for a in (group, tile, starts, ends)), *operands)
    return y


def _tile_matmul(x: Any, kernel: Any, scale: jax.Array | None) -> jax.Array:
    """Within the kernel: rows [height, D] times a matrix [D, width], slab by slab, with the scales [D/d, width] of its
    tiles. Those that are as deep as the matrix unit are multiplied with a slab's product, others with its codes."""
    D, width = kernel.shape
    deep = D if scale is None else D // len(scale)
    y = jnp.zeros((len(x), width), jnp.float32)
    for slab in _slabs(D, deep):
        codes = _from_fp4(kernel[slab]) if kernel.dtype == FP4_TYPE else kernel[slab]
        own = None if scale is None else scale[slab.start // deep : -(-slab.stop // deep)]
        if own is not None and deep < DEPTH:
            tiles = codes.astype(jnp.float32).reshape(len(own), deep, width) * own[:, None]
            codes, own = tiles.reshape(-1, width), None
        of_slab = jnp.dot(x[:, slab], codes.astype(x.dtype), preferred_element_type=jnp.float32)
        y += of_slab if own is None else of_slab * own
    return y


def _slabs(D: int, deep: int) -> list[slice]:
    """Rows of a matrix that are multiplied at a time: some of one tile, or whole tiles."""
    step = deep if deep >= DEPTH else SLAB // deep * deep
    ends = [(start, min(start + step, D)) for start in range(0, D, step)]
    return [slice(d, min(d + SLAB, end)) for start, end in ends for d in range(start, end, SLAB)]


def _from_fp4(codes: jax.Array) -> jax.Array:
    """Within the kernel: the values of FP4 numbers (OCP Microscaling Formats v1.0), a bit of sign, two of exponent, one
    of mantissa. Few TPUs have the type."""
    code = pltpu.bitcast(codes, jnp.int4).astype(jnp.int32)
    size = code & 7
    halves = jnp.where(size < 2, size, (2 + (size & 1)) << ((jnp.maximum(size, 2) >> 1) - 1))
    return jnp.where(code < 0, -halves, halves).astype(jnp.float32) * 0.5


def _of_columns(scale: jax.Array, first: Any, width: int, M: int) -> jax.Array:
    """Within the kernel: of scales of all columns' tiles [D/d, M/m] those of each of `width` columns. A product with
    ones, since lanes cannot be repeated."""
    if scale.shape[1] == width:
        return scale
    of_tile = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[1], width), 0)
    column = first + jax.lax.broadcasted_iota(jnp.int32, of_tile.shape, 1)
    tile = jax.lax.div(column, jnp.int32(M // scale.shape[1]))
    return jnp.dot(scale, (tile == of_tile).astype(scale.dtype), precision=jax.lax.Precision.HIGHEST)


def expected_groups(rows: int, here: int, groups: int) -> float:
    """Of `here` groups those that have rows, where each row chooses evenly among all `groups`."""
    return here * (1 - (1 - 1 / groups) ** rows)


def tile_width(x: jax.Array, kernel: jax.Array, scale: jax.Array | None = None) -> int | None:
    """Columns of a matrix that are in fast memory at a time; None where there are no such."""
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
    """Of an element."""
    bits: int = jax.dtypes.itemsize_bits(x.dtype)
    return bits / 8
