"""Products of large matrices, the Cholesky factor of a symmetric one and the inverse of a triangular one, by blocks.
The bits are the same with any number of threads.

LAPACK's own are not enough: with several threads OpenBLAS's `potrf` crashes at 28,672 rows, the inputs of the MLP of a
Llama 70B (its issue 1413), and `potrf`, `trtri` and products of matrices add up in another order than with one thread.
What is called here on blocks are products that do not, and LAPACK's on blocks that OpenBLAS gives to one thread.
"""

import numpy as np

ROWS_OF_BLOCK = 2048
"""Rows and columns of a block."""
ROWS_OF_LAPACK = 64
"""Rows and columns of the blocks within a block, which LAPACK factorizes and inverts."""
SUMMED_AT_ONCE = 256
"""OpenBLAS halves the last part of a product's summed axis. One thread rounds the half up to a number of registers,
several do not: it is the same if the axis is a multiple of this, or smaller than a part."""


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two matrices [m, k] and [k, n]."""
    split = a.shape[1] - a.shape[1] % SUMMED_AT_ONCE
    if split in (0, a.shape[1]):
        return np.asarray(a @ b)
    out: np.ndarray = a[:, :split] @ b[:split]
    out += a[:, split:] @ b[split:]
    return out


def factorize_in_place(matrix: np.ndarray, block_rows: int = ROWS_OF_BLOCK) -> bool:
    """Replaces a symmetric matrix [n, n] by its Cholesky factor, lower triangular. Returns False if it is not positive
    definite; then it holds nothing of use.

    Args:
        matrix: in column-major order; only its lower triangle is read.
        block_rows: of the blocks.
    """
    from scipy.linalg import get_blas_funcs, get_lapack_funcs

    (potrf,), (trsm,) = get_lapack_funcs(("potrf",), (matrix,)), get_blas_funcs(("trsm",), (matrix,))
    for start in range(0, len(matrix), block_rows):
        own, below = slice(start, start + block_rows), slice(start + block_rows, None)
        matrix[start:, own] -= product(matrix[start:, :start], matrix[own, :start].T)
        if block_rows > ROWS_OF_LAPACK:
            failed = not factorize_in_place(matrix[own, own], ROWS_OF_LAPACK)
        else:
            matrix[own, own], failed = potrf(matrix[own, own], lower=1, clean=1)
        if failed:
            return False
        matrix[below, own] = trsm(1.0, matrix[own, own], matrix[below, own], side=1, lower=1, trans_a=1)
        matrix[:start, own] = 0
    return True


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
            matrix[own, own], failed = trtri(matrix[own, own], lower=1)
        if failed:
            return False
        for row in reversed(range(after, len(matrix), block_rows)):  # each needs those before it as they were
            rows, known = slice(row, row + block_rows), slice(after, row + block_rows)
            matrix[rows, own] = product(matrix[rows, known], matrix[known, own])
        matrix[after:, own] = -product(matrix[after:, own], matrix[own, own])
    return True


def add_square(sums: np.ndarray, rows: np.ndarray) -> None:
    """Adds rows^T rows, of rows [n, I], to the upper triangle of sums [I, I], in float32, both in row-major order.
    Nothing of the size of the sums is held besides."""
    from scipy.linalg.blas import ssyrk

    ssyrk(1.0, rows.T, beta=1.0, c=sums.T, lower=1, overwrite_c=1)


def add_product(sums: np.ndarray, rows: np.ndarray, others: np.ndarray) -> None:
    """Adds rows^T others, of [n, I] both, to sums [I, I]. One block of rows of the sums is held besides."""
    for start in range(0, len(sums), ROWS_OF_BLOCK):
        own = slice(start, start + ROWS_OF_BLOCK)
        sums[own] += product(rows[:, own].T, others)


def mirror(sums: np.ndarray) -> None:
    """Copies the upper triangle of a square matrix to the lower one."""
    for start in range(0, len(sums), ROWS_OF_BLOCK):
        own = slice(start, start + ROWS_OF_BLOCK)
        sums[own, :start] = sums[:start, own].T
        block = sums[own, own]
        block[...] = np.triu(block) + np.triu(block, 1).T
