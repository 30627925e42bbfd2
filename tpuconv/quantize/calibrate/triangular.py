"""Large symmetric matrices: sums of products, the Cholesky factor and the inverse of a triangular matrix, by blocks.

LAPACK's own are not enough: with several threads OpenBLAS's `potrf` crashes at 28,672 rows, the inputs of the MLP of a
Llama 70B (its issue 1413). What is called here on blocks are products of matrices and LAPACK's on small ones.
"""

import numpy as np

ROWS_OF_BLOCK = 2048
"""Rows and columns of a block."""


def factorize_in_place(matrix: np.ndarray) -> bool:
    """Replaces a symmetric matrix [n, n] by its Cholesky factor, lower triangular. Returns False if it is not positive
    definite; then it holds nothing of use.

    Args:
        matrix: in column-major order; only its lower triangle is read.
    """
    from scipy.linalg import get_blas_funcs, get_lapack_funcs

    (potrf,), (trsm,) = get_lapack_funcs(("potrf",), (matrix,)), get_blas_funcs(("trsm",), (matrix,))
    for start in range(0, len(matrix), ROWS_OF_BLOCK):
        own, below = slice(start, start + ROWS_OF_BLOCK), slice(start + ROWS_OF_BLOCK, None)
        matrix[start:, own] -= matrix[start:, :start] @ matrix[own, :start].T
        factor, failed = potrf(matrix[own, own], lower=1, clean=1)
        if failed:
            return False
        matrix[own, own] = factor
        matrix[below, own] = trsm(1.0, factor, matrix[below, own], side=1, lower=1, trans_a=1)
        matrix[:start, own] = 0
    return True


def invert_in_place(matrix: np.ndarray) -> bool:
    """Replaces a lower triangular matrix [n, n], in column-major order, by its inverse. Returns False if it has none.

    The columns of the last block come first: of [[A, 0], [B, C]] the inverse is [[A^-1, 0], [-C^-1 B A^-1, C^-1]].
    """
    from scipy.linalg import get_lapack_funcs

    (trtri,) = get_lapack_funcs(("trtri",), (matrix,))
    for start in reversed(range(0, len(matrix), ROWS_OF_BLOCK)):
        own, after = slice(start, start + ROWS_OF_BLOCK), start + ROWS_OF_BLOCK
        inverse, failed = trtri(matrix[own, own], lower=1)
        if failed:
            return False
        matrix[own, own] = inverse
        for row in reversed(range(after, len(matrix), ROWS_OF_BLOCK)):  # each needs those before it as they were
            rows, known = slice(row, row + ROWS_OF_BLOCK), slice(after, row + ROWS_OF_BLOCK)
            matrix[rows, own] = matrix[rows, known] @ matrix[known, own]
        matrix[after:, own] = -matrix[after:, own] @ inverse
    return True


def add_square(sums: np.ndarray, rows: np.ndarray) -> None:
    """Adds rows^T rows, of rows [n, I], to the upper triangle of sums [I, I], in float32, both in row-major order.
    Nothing of the size of the sums is held besides."""
    from scipy.linalg.blas import ssyrk

    ssyrk(1.0, rows.T, beta=1.0, c=sums.T, lower=1, overwrite_c=1)


def mirror(sums: np.ndarray) -> None:
    """Copies the upper triangle of a square matrix to the lower one."""
    for start in range(0, len(sums), ROWS_OF_BLOCK):
        own = slice(start, start + ROWS_OF_BLOCK)
        sums[own, :start] = sums[:start, own].T
        block = sums[own, own]
        block[...] = np.triu(block) + np.triu(block, 1).T
