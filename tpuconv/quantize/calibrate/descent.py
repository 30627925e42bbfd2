"""Better quantized values and scales than GPTQ's, by coordinate descent on the squared error of the outputs: each value
in turn takes its best with all others fixed (QuantEase, arXiv:2309.01885), and each scale the best for its values.

With the Hessian H and the error E = W - (Q - Z) S of the weights [I, O], the residual R = H E is the gradient, up to a
factor; the error of an output is the sum of E R. No step raises it.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from tpuconv.encodings.compiled import compiled
from tpuconv.quantize.calibrate.gptq import INPUTS_AT_ONCE, Grid, Rounded, output_errors
from tpuconv.quantize.calibrate.triangular import product


def descended(
    kernel: np.ndarray,
    hessian: np.ndarray,
    rounded: Rounded,
    grid: Grid,
    order: np.ndarray,
    rounds: int,
    dtype: np.dtype[Any] | None = None,
) -> tuple[Rounded, np.ndarray]:
    """Returns a kernel [I, O] after some rounds of descent from a rounded one, and the squared error of each output
    [O], which is never larger.

    Args:
        kernel: the weights.
        hessian: of the inputs [I, I].
        rounded: where to begin.
        grid: the values of its type.
        order: of the inputs; complete groups if scales change.
        rounds: how often each value and each scale may change.
        dtype: of stored scales, if scales change: without zero points, in groups of one size.
    """
    from scipy.linalg import get_blas_funcs

    (gemm,) = get_blas_funcs(("gemm",), (kernel, hessian))
    error = kernel - rounded.weights(grid)
    residual = np.ascontiguousarray(product(hessian, error))
    before = np.einsum("io,io->o", error, residual, dtype=np.float64)
    del error
    if not rounds:
        return rounded, before
    now = Rounded(rounded.chosen.copy(), replace(rounded.scales, scale=rounded.scales.scale.copy()))
    group = len(kernel) // len(now.scales.scale)
    step = INPUTS_AT_ONCE if dtype is None else group * max(1, INPUTS_AT_ONCE // group)
    for _ in range(rounds):
        is_changed = False
        for start in range(0, len(order), step):
            inputs = order[start : start + step]
            change = _descend_block(residual[inputs], hessian[np.ix_(inputs, inputs)], now, inputs, grid, group, dtype)
            if change.any():
                is_changed = True
                rows = np.ascontiguousarray(hessian[inputs])  # residual -= rows^T change, as in `adjusted`
                gemm(-1.0, change.T, rows, 1.0, residual.T, overwrite_c=1)
        if not is_changed:
            break
    after = output_errors(hessian, now.weights(grid) - kernel)
    is_better = after < before
    return now.where(is_better, rounded), np.where(is_better, after, before)


def _descend_block(
    residual: np.ndarray,
    hessian: np.ndarray,
    now: Rounded,
    inputs: np.ndarray,
    grid: Grid,
    group: int,
    dtype: np.dtype[Any] | None,
) -> np.ndarray:
    """Changes the scales, with a `dtype`, and the values of `now` at some inputs B, in place. Returns the change of the
    weights [B, O].

    Args:
        residual: of these inputs [B, O]; it is lost.
        hessian: of these inputs [B, B].
        now: the kernel.
        inputs: their numbers [B].
        grid: the values of its type.
        group: the inputs of a group.
        dtype: see `descended`.
    """
    middles = (grid.values[1:] + grid.values[:-1]) / 2
    chosen, change, rows = now.chosen[inputs], np.zeros_like(residual), now.scales.row_of_I[inputs]
    step = len(inputs) if dtype is None else group
    for start in range(0, len(inputs), step):
        part, rest = slice(start, start + step), slice(start + step, None)
        if dtype is not None:
            scale = now.scales.scale[rows[start]]
            values = grid.values[chosen[part]]
            moved = hessian[:, part] @ values
            shift = _shift(scale, values, residual[part], moved[part], dtype)
            scale += shift
            change[part] = values * shift
            residual[part] -= moved[part] * shift
            residual[rest] -= moved[rest] * shift
        turned = np.zeros_like(residual[part])
        _descend(
            residual[part],
            np.ascontiguousarray(hessian[part, part]),
            now.scales.scale[rows[part]],
            grid.is_integer,
            grid.values,
            middles,
            chosen[part],
            turned,
        )
        change[part] += turned
        residual[rest] -= hessian[rest, part] @ turned
    now.chosen[inputs] = chosen
    return change


def _shift(
    scale: np.ndarray, values: np.ndarray, residual: np.ndarray, moved: np.ndarray, dtype: np.dtype[Any]
) -> np.ndarray:
    """Returns how the scales [O] of one group change for the least error of the outputs, 0 where the nearest scale that
    `dtype` holds has no smaller error. `values` are the group's [B, O] without scales, `moved` the Hessian times
    these."""
    slope = np.einsum("io,io->o", values, residual)
    curvature = np.einsum("io,io->o", values, moved)
    with np.errstate(all="ignore"):
        best = (scale + slope / curvature).astype(dtype).astype(np.float32)
        shift = best - scale
        is_better = np.isfinite(best) & (best != 0) & (shift * (shift * curvature - 2 * slope) < 0)
    return np.where(is_better, shift, np.float32(0))


@compiled  # type: ignore[untyped-decorator]
def _descend(
    residual: np.ndarray,
    hessian: np.ndarray,
    scale: np.ndarray,
    integers: bool,
    values: np.ndarray,
    middles: np.ndarray,
    chosen: np.ndarray,
    change: np.ndarray,
) -> None:
    """Moves each value of a block [B, O] in turn to the nearest to its best, and fills the `change` of the weights. The
    residual of later inputs follows."""
    inputs, outputs = residual.shape
    first, last = values[0], values[-1]
    for i in range(inputs):
        diagonal = hessian[i, i]
        if diagonal <= 0:
            continue
        is_changed = False
        for o in range(outputs):
            s, old = scale[i, o], chosen[i, o]
            if s == 0:
                continue
            best = values[old] + residual[i, o] / (diagonal * s)
            if integers:
                number = np.uint8(max(min(np.rint(best), last), first) - first)
            else:
                number = np.uint8(np.searchsorted(middles, best))
            if number != old:
                chosen[i, o] = number
                change[i, o] = (values[number] - values[old]) * s
                is_changed = True
        if is_changed:
            for k in range(i + 1, inputs):
                h = hessian[k, i]
                for o in range(outputs):
                    residual[k, o] -= h * change[i, o]
