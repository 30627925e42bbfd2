"""GPTQ (arXiv:2210.17323): weights are rounded one input after the other, and what rounding one costs the output is
made up for by those that are not rounded yet.

A kernel is a matrix [I, O] here: I inputs, which the product sums over, and O outputs. `adjusted` has fixed scales, the
scales of rounding to nearest, so that only the quantized values change; then the order of the inputs is free
("static groups"). `fitted` chooses the scales of each group when it comes to it, so that groups are complete. The
Hessian [I, I] of the squared error of the output is X^T X, of the inputs X [tokens, I].
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpuconv.encodings.compiled import compiled
from tpuconv.quantize.calibrate.triangular import factorize_in_place, invert_in_place, product
from tpuconv.quantize.encode import values_of_bytes

INPUTS_AT_ONCE = 128
"""Inputs that are rounded before the rest of the matrix is corrected, by one product of matrices."""
OUTPUTS_AT_ONCE = 64
"""Outputs whose scales are tried at once: their weights in a group are in the processor's first cache."""
MOST_DAMPING = 1.0
"""The damping after which a Hessian counts as singular."""


PROPAGATION_DAMPING = 0.1
"""Damping of the Hessian, relative to its mean diagonal, where the errors of earlier layers are made up for. Less of it
fits the correction to the samples (docs/log.md)."""


class SingularHessian(Exception):
    """The Hessian cannot be factorized."""


@dataclass(frozen=True)
class Grid:
    """The values of a type without scale, ascending, and the byte of each: float32 and uint8 [n]."""

    values: np.ndarray
    qbytes: np.ndarray

    @classmethod
    def of(cls, qtype: str) -> "Grid":
        """The grid of one of Qwix's types."""
        return cls(*values_of_bytes(qtype))

    @property
    def is_integer(self) -> bool:
        """True if the values are successive integers."""
        return bool((np.diff(self.values) == 1).all())


@dataclass(frozen=True)
class KernelScales:
    """The scales of a kernel [I, O], and its zero points, which are 0 for symmetric ranges: float32 [G, O]. Input i has
    the scale and zero point of row `row_of_I[i]`: a weight is (value - zero point) * scale."""

    scale: np.ndarray
    zero_point: np.ndarray
    row_of_I: np.ndarray

    def outputs(self, start: int, stop: int) -> "KernelScales":
        """Returns the scales of some outputs."""
        return KernelScales(self.scale[:, start:stop], self.zero_point[:, start:stop], self.row_of_I)

    def weights(self, values: np.ndarray) -> np.ndarray:
        """The weights [I, O] that values [I, O] stand for."""
        weights: np.ndarray = (values - self.zero_point[self.row_of_I]) * self.scale[self.row_of_I]
        return weights


@dataclass(frozen=True)
class Rounded:
    """A rounded kernel [I, O]: the number of each value in the grid, as uint8, and the scales."""

    chosen: np.ndarray
    scales: KernelScales

    def weights(self, grid: Grid) -> np.ndarray:
        """Returns the weights [I, O]."""
        return self.scales.weights(grid.values[self.chosen])

    def where(self, is_kept_O: np.ndarray, other: "Rounded") -> "Rounded":
        """Returns a kernel with these outputs of `self`, the others of `other`."""
        scale = np.where(is_kept_O, self.scales.scale, other.scales.scale)
        return Rounded(np.where(is_kept_O, self.chosen, other.chosen), replace(self.scales, scale=scale))


@dataclass(frozen=True)
class Factor:
    """The upper triangular U [I, I] with H^-1 = U^T U, of a damped Hessian whose inputs are in the order `order`."""

    upper: np.ndarray
    order: np.ndarray


def input_order(diagonal: np.ndarray, act_order: bool, row_of_I: np.ndarray | None = None) -> np.ndarray:
    """Returns the order [I] in which inputs are rounded.

    Args:
        diagonal: of the Hessian.
        act_order: whether inputs with a large diagonal come first.
        row_of_I: the group of each input, if groups stay together; with `act_order` the largest sum comes first.
    """
    rank = -diagonal if act_order else np.arange(len(diagonal))
    if row_of_I is None:
        return np.argsort(rank, kind="stable")
    sums = np.bincount(row_of_I, diagonal)
    of_group = -sums[row_of_I] if act_order else row_of_I
    return np.lexsort((rank, row_of_I, of_group))


def factorize(hessian: np.ndarray, damping: float, order: np.ndarray) -> Factor:
    """Factorizes the inverse of a Hessian [I, I], which is not changed, in its dtype.

    With J, the matrix that reverses the order, and the Cholesky factor L of J H J: H = R R^T with the upper triangular
    R = J L J, so that U = R^-1 = J L^-1 J. One matrix of the size of H is held besides it.

    Args:
        hessian: positive semidefinite; inputs that are always 0 get a diagonal of 1.
        damping: what is added to the diagonal, relative to its mean. Ten times as much, and so on to `MOST_DAMPING`,
            if it does not suffice.
        order: of the inputs.

    Raises:
        SingularHessian: it has no inverse, or is not finite.
    """
    diagonal = np.diag(hessian)
    if not np.isfinite(diagonal).all() or not diagonal.any():
        raise SingularHessian
    mean = float(diagonal.mean(dtype=np.float64))
    backwards = order[::-1]
    while damping <= MOST_DAMPING:
        matrix = np.asfortranarray(hessian[np.ix_(backwards, backwards)])
        at = np.arange(len(matrix))
        matrix[at, at] = np.where(diagonal[backwards] == 0, 1, diagonal[backwards]) + damping * mean
        if factorize_in_place(matrix) and invert_in_place(matrix) and np.isfinite(matrix).all():
            return Factor(matrix[::-1, ::-1], order)
        damping *= 10
    raise SingularHessian


def propagation(hessian: np.ndarray, change: np.ndarray, part: float) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that makes of a kernel W [I, O] one that makes up for errors of earlier layers (QEP,
    arXiv:2504.09629): W + part (H + d I)^-1 C W.

    Args:
        hessian: H = X^T X, of the inputs X [tokens, I] in the quantized model.
        change: C = X^T (Y - X), of the inputs Y in the model that is not quantized.
        part: of the errors, from 0 to 1.

    Raises:
        SingularHessian: H + d I has no inverse.
    """
    upper = factorize(hessian, PROPAGATION_DAMPING, np.arange(len(hessian))).upper

    def corrected(kernel: np.ndarray) -> np.ndarray:
        shift = product(upper.T, product(upper, product(change, kernel)))
        return np.asarray(kernel + np.float32(part) * shift)

    return corrected


def adjusted(kernel: np.ndarray, factor: Factor, scales: KernelScales, grid: Grid) -> np.ndarray:
    """Rounds a kernel by GPTQ.

    Args:
        kernel: [I, O], in the dtype of the factor.
        factor: of the Hessian of its inputs.
        scales: its scales.
        grid: the values of its type.

    Returns:
        The number of each value in the grid [I, O], as uint8.
    """
    from scipy.linalg import get_blas_funcs

    weights = np.ascontiguousarray(kernel[factor.order])
    (gemm,) = get_blas_funcs(("gemm",), (weights,))
    rows = scales.row_of_I[factor.order]
    middles = (grid.values[1:] + grid.values[:-1]) / 2
    chosen = np.empty(weights.shape, np.uint8)
    for start in range(0, len(weights), INPUTS_AT_ONCE):
        block = slice(start, start + INPUTS_AT_ONCE)
        upper = np.ascontiguousarray(factor.upper[block, block])
        of_rows = scales.scale[rows[block]], scales.zero_point[rows[block]]
        errors = np.empty_like(weights[block])
        _round_block(weights[block], upper, *of_rows, grid.values, middles, chosen[block], errors)
        rest = slice(start + INPUTS_AT_ONCE, None)
        if len(weights[rest]):  # weights -= upper^T errors, in place; in BLAS's order of axes, transposed
            gemm(-1.0, errors.T, factor.upper[block, rest], 1.0, weights[rest].T, overwrite_c=1)
    out = np.empty_like(chosen)
    out[factor.order] = chosen
    return out


@compiled  # type: ignore[untyped-decorator]
def _round_block(
    weights: np.ndarray,
    upper: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    values: np.ndarray,
    middles: np.ndarray,
    chosen: np.ndarray,
    errors: np.ndarray,
) -> None:
    """Rounds the inputs of one block [B, O] one after the other; all arrays but `upper` [B, B] and the grid have its
    shape. `weights` are corrected; `chosen` and `errors`, each input's error by its diagonal, are filled."""
    inputs, outputs = weights.shape
    for i in range(inputs):
        for o in range(outputs):
            s, z = scale[i, o], zero_point[i, o]
            number = np.searchsorted(middles, weights[i, o] / s + z) if s != 0 else np.searchsorted(middles, z)
            chosen[i, o] = number
            errors[i, o] = (weights[i, o] - (values[number] - z) * s) / upper[i, i]
        for k in range(i + 1, inputs):
            u = upper[i, k]
            for o in range(outputs):
                weights[k, o] -= u * errors[i, o]


def fitted(
    kernel: np.ndarray, factor: Factor, scales: KernelScales, grid: Grid, factors: np.ndarray, dtype: np.dtype[Any]
) -> Rounded:
    """Rounds a kernel by GPTQ, and chooses the scales of each group among multiples of the scale of its largest value,
    by the errors that GPTQ makes with each, at the weights as earlier groups have corrected them.

    Args:
        kernel: [I, O], in the dtype of the factor.
        factor: of the Hessian of its inputs, in an order of complete groups of one size.
        scales: without zero points; only their groups are used.
        grid: the values of its type.
        factors: quotients of the scale and the largest absolute value that are tried.
        dtype: of stored scales.
    """
    from scipy.linalg import get_blas_funcs

    weights = np.ascontiguousarray(kernel[factor.order])
    (gemm,) = get_blas_funcs(("gemm",), (weights,))
    group = len(weights) // len(scales.scale)
    middles = (grid.values[1:] + grid.values[:-1]) / 2
    chosen, scale = np.empty(weights.shape, np.uint8), np.empty_like(scales.scale)
    for start in range(0, len(weights), group):
        block, rest = slice(start, start + group), slice(start + group, None)
        largest = np.abs(weights[block]).max(0)
        tried = (factors.astype(np.float32)[:, None] * largest).astype(dtype).astype(np.float32)
        tried[tried == 0] = 1
        errors, row = np.empty_like(weights[block]), scales.row_of_I[factor.order[start]]
        upper = np.ascontiguousarray(factor.upper[block, block])
        types = grid.is_integer, grid.values, middles
        _fit_group(weights[block], upper, tried, *types, chosen[block], errors, scale[row])
        if len(weights[rest]):  # as in `adjusted`
            gemm(-1.0, errors.T, factor.upper[block, rest], 1.0, weights[rest].T, overwrite_c=1)
    out = np.empty_like(chosen)
    out[factor.order] = chosen
    return Rounded(out, replace(scales, scale=scale))


@compiled  # type: ignore[untyped-decorator]
def _fit_group(
    weights: np.ndarray,
    upper: np.ndarray,
    tried: np.ndarray,
    integers: bool,
    values: np.ndarray,
    middles: np.ndarray,
    chosen: np.ndarray,
    errors: np.ndarray,
    scale: np.ndarray,
) -> None:
    """Rounds the inputs of one group [B, O] with each of the scales tried [K, O], and fills `chosen`, `errors` and
    `scale` [O] from the one with the smallest sum of squared errors. See `_round_block`."""
    inputs, outputs = weights.shape
    least, first, last = np.empty(OUTPUTS_AT_ONCE, np.float32), values[0], values[-1]
    total, lost = np.empty(OUTPUTS_AT_ONCE, np.float32), np.empty((inputs, OUTPUTS_AT_ONCE), np.float32)
    now, number = np.empty((inputs, OUTPUTS_AT_ONCE), np.float32), np.empty((inputs, OUTPUTS_AT_ONCE), np.float32)
    for start in range(0, outputs, OUTPUTS_AT_ONCE):
        count = min(OUTPUTS_AT_ONCE, outputs - start)
        least[:] = np.inf
        for k in range(len(tried)):
            scales = tried[k, start : start + count]
            total[:] = 0
            for i in range(inputs):
                for o in range(count):
                    now[i, o] = weights[i, start + o]
            for i in range(inputs):
                row, found, error, diagonal = now[i], number[i], lost[i], upper[i, i]
                if integers:
                    for o in range(count):
                        found[o] = max(min(np.rint(row[o] / scales[o]), last), first)
                        error[o] = (row[o] - found[o] * scales[o]) / diagonal
                        found[o] -= first
                        total[o] += error[o] * error[o]
                else:
                    for o in range(count):
                        at = np.searchsorted(middles, row[o] / scales[o])
                        found[o] = at
                        error[o] = (row[o] - values[at] * scales[o]) / diagonal
                        total[o] += error[o] * error[o]
                for j in range(i + 1, inputs):
                    u, later = upper[i, j], now[j]
                    for o in range(count):
                        later[o] -= u * error[o]
            for o in range(count):
                if total[o] < least[o]:
                    least[o], scale[start + o] = total[o], scales[o]
                    for i in range(inputs):
                        chosen[i, start + o] = np.uint8(number[i, o])
                        errors[i, start + o] = lost[i, o]


def output_errors(hessian: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The squared error of each output [O], summed over the tokens of the Hessian [I, I], of an error [I, O] of the
    weights: the diagonal of E^T H E."""
    errors: np.ndarray = np.einsum("io,io->o", error, product(hessian, error), dtype=np.float64)
    return errors.clip(0.0)  # a rounded Hessian of few tokens may make a small one negative
