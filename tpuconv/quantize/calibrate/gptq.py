"""GPTQ (arXiv:2210.17323): weights are rounded one input after the other, and what rounding one costs the output is
made up for by those that are not rounded yet.

A kernel is a matrix [I, O] here: I inputs, which the product sums over, and O outputs. Its scales are fixed beforehand,
the scales of rounding to nearest, so that only the quantized values change; then the order of the inputs is free
("static groups"). The Hessian [I, I] of the squared error of the output is X^T X, of the inputs X [tokens, I].
"""

from dataclasses import dataclass

import numpy as np

from tpuconv.encodings.compiled import compiled
from tpuconv.quantize.calibrate.triangular import factorize_in_place, invert_in_place, product
from tpuconv.quantize.encode import values_of_bytes

INPUTS_AT_ONCE = 128
"""Inputs that are rounded before the rest of the matrix is corrected, by one product of matrices."""
MOST_DAMPING = 1.0
"""The damping after which a Hessian counts as singular."""


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
class Factor:
    """The upper triangular U [I, I] with H^-1 = U^T U, of a damped Hessian whose inputs are in the order `order`."""

    upper: np.ndarray
    order: np.ndarray


def factorize(hessian: np.ndarray, damping: float, act_order: bool) -> Factor:
    """Factorizes the inverse of a Hessian [I, I], which is not changed, in its dtype.

    With J, the matrix that reverses the order, and the Cholesky factor L of J H J: H = R R^T with the upper triangular
    R = J L J, so that U = R^-1 = J L^-1 J. One matrix of the size of H is held besides it.

    Args:
        hessian: positive semidefinite; inputs that are always 0 get a diagonal of 1.
        damping: what is added to the diagonal, relative to its mean. Ten times as much, and so on to `MOST_DAMPING`,
            if it does not suffice.
        act_order: whether inputs with a large diagonal come first.

    Raises:
        SingularHessian: it has no inverse, or is not finite.
    """
    diagonal = np.diag(hessian)
    if not np.isfinite(diagonal).all() or not diagonal.any():
        raise SingularHessian
    mean = float(diagonal.mean(dtype=np.float64))
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(diagonal))
    backwards = order[::-1]
    while damping <= MOST_DAMPING:
        matrix = np.asfortranarray(hessian[np.ix_(backwards, backwards)])
        at = np.arange(len(matrix))
        matrix[at, at] = np.where(diagonal[backwards] == 0, 1, diagonal[backwards]) + damping * mean
        if factorize_in_place(matrix) and invert_in_place(matrix) and np.isfinite(matrix).all():
            return Factor(matrix[::-1, ::-1], order)
        damping *= 10
    raise SingularHessian


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


def output_errors(hessian: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The squared error of each output [O], summed over the tokens of the Hessian [I, I], of an error [I, O] of the
    weights: the diagonal of E^T H E."""
    errors: np.ndarray = np.einsum("io,io->o", error, product(hessian, error), dtype=np.float64)
    return errors
