"""Rows, group by group, times the matrix of each group: what experts do with their tokens.

On a TPU a kernel of our own takes few rows through them. It reads the matrices of groups that have rows, from where
they lie, and no others. XLA's own kernel reads no others either, but XLA brings all to fast memory ahead of it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
SUBLANES = 32
"""Of a register of int8: a height that is no multiple of it is padded."""
XLA_KINDS = ("bfloat16", "float32", "int8")
"""What XLA's kernel multiplies with."""
KINDS = (*XLA_KINDS, "float8_e4m3fn", "int4")
"""What ours does."""


def product(x: jax.Array, kernel: jax.Array, counts: jax.Array, *, groups: int) -> jax.Array:
    """`x` [R, D] times `kernel` [E, D, M]: [R, M] in float32. The first `counts[0]` rows are multiplied with the first
    matrix, the next `counts[1]` with the second, and so on; what becomes of rows after the last is undefined. They are
    dealt over `groups`, of which the other ones' matrices are elsewhere."""

    def by_xla(x: jax.Array, kernel: jax.Array, counts: jax.Array) -> jax.Array:
        kernel = kernel if kernel.dtype.name in XLA_KINDS else kernel.astype(x.dtype)
        return jax.lax.ragged_dot(x, kernel, counts, preferred_element_type=jnp.float32)

    if len(x) > FEW_ROWS or kernel.dtype.name not in KINDS or tile_width(x, kernel) is None:
        return by_xla(x, kernel, counts)
    ours = partial(few_rows, groups=groups)
    y: jax.Array = jax.lax.platform_dependent(x, kernel, counts, tpu=ours, default=by_xla)
    return y


def few_rows(x: jax.Array, kernel: jax.Array, counts: jax.Array, *, groups: int, interpret: bool = False) -> jax.Array:
    """The same by a Pallas kernel, in the way of megablox (arXiv:2211.15841): one step for each group and each tile of
    rows that it has rows in. A tile that groups share is visited by each of them, and keeps the rows of all."""
    (R, D), (E, _, M) = x.shape, kernel.shape
    height, width = min(R, TILE_ROWS), tile_width(x, kernel)
    assert width is not None
    ends = jnp.cumsum(counts)
    starts = ends - counts
    tiles = jnp.where(counts > 0, -(-ends // height) - starts // height, 0)
    most = -(-R // height) + E - 1
    group = jnp.repeat(jnp.arange(E), tiles, total_repeat_length=most)
    tile = starts[group] // height + jnp.arange(most) - (jnp.cumsum(tiles) - tiles)[group]

    def step(group: Any, tile: Any, starts: Any, ends: Any, x: Any, kernel: Any, y: Any) -> None:
        at = pl.program_id(1)
        rows = tile[at] * height + jax.lax.broadcasted_iota(jnp.int32, y.shape, 0)
        is_own = (rows >= starts[group[at]]) & (rows < ends[group[at]])
        slabs = [slice(d, min(d + SLAB, D)) for d in range(0, D, SLAB)]
        own = sum(
            jnp.dot(x[:, slab], kernel[0, slab].astype(x.dtype), preferred_element_type=jnp.float32) for slab in slabs
        )
        y[...] = jnp.where(is_own, own, y[...])

    visited = expected_groups(R, E, groups)
    cost = pl.CostEstimate(
        flops=round(2 * visited * height * D * M),
        bytes_accessed=round(visited * D * M * _bytes(kernel)),  # rows are in fast memory
        transcendentals=0,
    )
    call = pl.pallas_call(
        step,
        out_shape=jax.ShapeDtypeStruct((R, M), jnp.float32),  # type: ignore[no-untyped-call]
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(-(-M // width), jnp.sum(tiles)),
            in_specs=[
                pl.BlockSpec((height, D), lambda j, at, group, tile, *_: (tile[at], 0)),
                pl.BlockSpec((1, D, width), lambda j, at, group, tile, *_: (group[at], 0, j)),
            ],
            out_specs=pl.BlockSpec((height, width), lambda j, at, group, tile, *_: (tile[at], j)),
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="few_rows",
    )
    if not interpret:  # else the compiler may bring all matrices to fast memory ahead
        kernel = pltpu.with_memory_space_constraint(kernel, pltpu.HBM)
    y: jax.Array = call(*(a.astype(jnp.int32) for a in (group, tile, starts, ends)), x, kernel)
    return y


def expected_groups(rows: int, here: int, groups: int) -> float:
    """Of `here` groups those that have rows, where each row chooses evenly among all `groups`."""
    return here * (1 - (1 - 1 / groups) ** rows)


def tile_width(x: jax.Array, kernel: jax.Array) -> int | None:
    """Columns of a matrix that are in fast memory at a time; None where there are no such."""
    D, M = kernel.shape[1:]
    height, kind = min(len(x), TILE_ROWS), x.dtype.itemsize
    column = 2 * round(D * _bytes(kernel)) + 3 * 4 * height + (4 + kind) * min(D, SLAB)
    room = FAST_BYTES - 2 * height * D * kind
    widest = room // column
    if D % SUBLANES or widest < min(M, LANES):
        return None
    if widest >= M:
        return M
    tiles = -(-M // (widest // LANES * LANES))
    return -(-M // (tiles * LANES)) * LANES


def _bytes(x: jax.Array) -> float:
    """Of an element."""
    bits: int = jax.dtypes.itemsize_bits(x.dtype)
    return bits / 8
