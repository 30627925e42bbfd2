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
TILE_BYTES = 8 << 20
"""Of a matrix in fast memory: one tile that is multiplied, one that comes, and one in the type of the rows."""
KINDS = ("bfloat16", "float32", "int8")
"""What the kernel multiplies with."""


def product(x: jax.Array, kernel: jax.Array, counts: jax.Array, *, groups: int) -> jax.Array:
    """`x` [R, D] times `kernel` [E, D, M]: [R, M] in float32. The first `counts[0]` rows are multiplied with the first
    matrix, the next `counts[1]` with the second, and so on; what becomes of rows after the last is undefined. They are
    dealt over `groups`, of which the other ones' matrices are elsewhere."""
    by_xla = partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32)
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
        own = jnp.dot(x[...], kernel[0].astype(x.dtype), preferred_element_type=jnp.float32)
        y[...] = jnp.where(is_own, own, y[...])

    visited = expected_groups(R, E, groups)
    cost = pl.CostEstimate(
        flops=round(2 * visited * height * D * M),
        bytes_accessed=round(visited * D * M * kernel.dtype.itemsize) + x.nbytes + 4 * R * M,
        transcendentals=0,
    )
    call = pl.pallas_call(
        step,
        out_shape=jax.ShapeDtypeStruct((R, M), jnp.float32),  # type: ignore[no-untyped-call]
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(M // width, jnp.sum(tiles)),
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
    _, D, M = kernel.shape
    column = D * (2 * kernel.dtype.itemsize + (x.dtype.itemsize if x.dtype != kernel.dtype else 0))
    widths = (M // n for n in range(1, M // LANES + 1) if M % n == 0)
    return next((n for n in widths if n % LANES == 0 and n * column <= TILE_BYTES and D % LANES == 0), None)
