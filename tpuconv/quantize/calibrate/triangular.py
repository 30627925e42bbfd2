"""Products of large matrices, the Cholesky factor of a symmetric one and the inverse of a triangular one, by blocks.
The bits are the same with any number of threads (`threads`).

LAPACK's own are not enough: with several threads OpenBLAS's `potrf` crashes at 28,672 rows, the inputs of the MLP of a
Llama 70B (its issue 1413), with one they are slow, and SciPy holds Python's lock while they run.
"""

import numpy as np

from tpuconv.quantize.calibrate.threads import side_by_side, single_threads

ROWS_OF_BLOCK = 2048
"""Rows and columns of a block."""
ROWS_OF_LAPACK = 64
"""Rows and columns of the blocks within a block, which LAPACK factorizes and inverts."""
ROWS_OF_THREAD = 256
"""Rows of a product that are calculated at once."""
COLUMNS_OF_THREAD = 4096
"""Columns of a sum that are calculated at once."""


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two matrices [m, k] and [k, n]."""
    out = np.empty((len(a), b.shape[1]), np.result_type(a, b))

    def calculate(rows: slice) -> None:
        np.matmul(a[rows], b, out=out[rows])

    side_by_side(calculate, _parts(len(a), ROWS_OF_THREAD))
    return out


def _parts(length: int, most: int, first: int = 0) -> list[slice]:
    return [slice(start, min(start + most, length)) for start in range(first, length, most)]


def factorize_in_place(matrix: np.ndarray, block_rows: int = ROWS_OF_BLOCK) -> bool:
    """Replaces a symmetric matrix [n, n] by its Cholesky factor, lower triangular. Returns False if it is not positive
    definite; then it holds nothing of use.

    Args:
        matrix: in column-major order; only its lower triangle is read.
        block_rows: of the blocks.
    """
    from scipy.linalg import get_lapack_funcs

    (potrf,) = get_lapack_funcs(("potrf",), (matrix,))
    for start in range(0, len(matrix), block_rows):
        own, below = slice(start, start + block_rows), slice(start + block_rows, None)
        matrix[start:, own] -= product(matrix[start:, :start], matrix[own, :start].T)
        if block_rows > ROWS_OF_LAPACK:
            failed = not factorize_in_place(matrix[own, own], ROWS_OF_LAPACK)
        else:
            with single_threads():
                matrix[own, own], failed = potrf(matrix[own, own], lower=1, clean=1)
        if failed:
            return False
        _divide_in_place(matrix[below, own], matrix[own, own])
        matrix[:start, own] = 0
    return True


def _divide_in_place(x: np.ndarray, factor: np.ndarray) -> None:
    """Replaces x [m, n] by x F^-T of a lower triangular factor F [n, n]."""
    from scipy.linalg import get_blas_funcs

    (trsm,) = get_blas_funcs(("trsm",), (factor,))
    for own in _parts(len(factor), ROWS_OF_LAPACK):
        if own.start:
            x[:, own] -= product(x[:, : own.start], factor[own, : own.start].T)
        with single_threads():
            x[:, own] = trsm(1.0, factor[own, own], x[:, own], side=1, lower=1, trans_a=1)


def invert_in_place(matrix: np.ndarray, block_rows: int = ROWS_OF_BLOCK) -> bool:
    """Replaces a lower triangular matrix [n, n], in column-major order, by its inverse. Returns False if it has none.

    The columns of the last block come first: of [[A, 0], [B, C]] the inverse is [[A^-1, 0], [-C^-1 B A^-1, C^-1]].
    """
    from scipy.linalg import get_lapack_funcs

    (trtri,) = get_lapack_funcs(("trtri",), (matrix,))
    for start in reversed(range(0, len(matrix), block_rows)):
        own, after = slice(start, start + block_rows), start + block_rows
        if block_rows > ROWS_OF_LAPACK:
            failed = not invert_in_place(matrix[own, own], ROWS_OF_LAPACK)
        else:
            with single_threads():
                matrix[own, own], failed = trtri(matrix[own, own], lower=1)
        if failed:
            return False
        for row in reversed(range(after, len(matrix), block_rows)):  # each needs those before it as they were
            rows, known = slice(row, row + block_rows), slice(after, row + block_rows)
            matrix[rows, own] = product(matrix[rows, known], matrix[known, own])
        matrix[after:, own] = -product(matrix[after:, own], matrix[own, own])
    return True


def add_square(sums: np.ndarray, rows: np.ndarray) -> None:
    """Adds rows^T rows, of rows [n, I], to the upper triangle of sums [I, I], in float32, both in row-major order, and
    parts of it to the rest. Nothing of the size of the sums is held besides."""
    _add(sums, rows, rows, is_triangle=True)


def add_product(sums: np.ndarray, rows: np.ndarray, others: np.ndarray) -> None:
    """Adds rows^T others, of [n, I] both, to sums [I, I]. Nothing of the size of the sums is held besides."""
    _add(sums, rows, others, is_triangle=False)


def _add(sums: np.ndarray, rows: np.ndarray, others: np.ndarray, *, is_triangle: bool) -> None:
    width = len(sums)

    def add(part: tuple[slice, slice]) -> None:
        own, columns = part
        sums[own, columns] += rows[:, own].T @ others[:, columns]

    parts = [
        (own, columns)
        for own in _parts(width, ROWS_OF_THREAD)
        for columns in _parts(width, COLUMNS_OF_THREAD, own.start if is_triangle else 0)
    ]
    side_by_side(add, parts)


def mirror(sums: np.ndarray) -> None:
    """Copies the upper triangle of a square matrix to the lower one."""
    for start in range(0, len(sums), ROWS_OF_BLOCK):
        own = slice(start, start + ROWS_OF_BLOCK)
        sums[own, :start] = sums[:start, own].T
        block = sums[own, own]
        block[...] = np.triu(block) + np.triu(block, 1).T
