"""Cholesky factors and inverses by blocks, compared with NumPy's."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuconv.quantize.calibrate import triangular

WIDEST = 28_672
"""Inputs of the MLP of a Llama 70B, where LAPACK's own factorization crashes."""


@given(
    *(st.integers(1, 40), st.sampled_from([1, 3, 8, 64]), st.sampled_from([1, 2, 5, 64]), st.sampled_from(["f", "d"])),
    st.integers(0, 99),
)
def test_by_blocks_as_at_once(n, block, of_lapack, dtype, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2 * n, n))
    hessian = (x.T @ x + np.eye(n)).astype(dtype)
    want = np.linalg.cholesky(hessian.astype(np.float64))
    matrix = np.asfortranarray(np.tril(hessian) + np.triu(np.full((n, n), 7), 1).astype(dtype))  # the rest is not read
    largest = 1e-5 if dtype == "f" else 1e-12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangular, "ROWS_OF_LAPACK", of_lapack)
        assert triangular.factorize_in_place(matrix, block)
        assert np.abs(matrix - want).max() <= largest * np.abs(want).max()
        assert triangular.invert_in_place(matrix, block)
    inverse = np.linalg.inv(want)
    assert np.abs(matrix - inverse).max() <= largest * np.linalg.cond(want) * np.abs(inverse).max()
    assert not np.triu(matrix, 1).any()


@given(st.integers(1, 40), st.integers(1, 20), st.sampled_from([3, 8, 64]), st.integers(0, 99))
def test_sums_of_products(n, count, block, seed):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(count, n)).astype(np.float32) for _ in range(3)]
    sums = np.zeros((n, n), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triangular, "ROWS_OF_BLOCK", block)
        for rows in parts:
            triangular.add_square(sums, rows)
        triangular.mirror(sums)
    want = sum(rows.T.astype(np.float64) @ rows for rows in parts)
    assert np.abs(sums - want).max() <= 1e-5 * np.abs(want).max()
    assert np.array_equal(sums, sums.T)


@pytest.mark.parametrize("place", [0, 5, 19])
@pytest.mark.parametrize("of_lapack", [3, 64])
def test_what_has_no_factor_or_inverse(place, of_lapack, monkeypatch):
    monkeypatch.setattr(triangular, "ROWS_OF_LAPACK", of_lapack)
    matrix = np.asfortranarray(np.eye(20))
    matrix[place, place] = -1
    assert not triangular.factorize_in_place(matrix.copy("F"), 8)
    matrix[place, place] = 0
    assert not triangular.invert_in_place(matrix.copy("F"), 8)


CALCULATED = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["OPENBLAS_NUM_THREADS"])])
import numpy as np
from tpuconv.quantize.calibrate import triangular

rng = np.random.default_rng(0)
found = hashlib.sha256()
for n in map(int, sys.argv[1:]):
    rows, wide = rng.normal(size=(2 * n, n)).astype(np.float32), rng.normal(size=(n, 300)).astype(np.float32)
    sums = np.zeros((n, n), np.float32)
    triangular.add_square(sums, rows)
    triangular.mirror(sums)
    matrix = np.asfortranarray(sums + np.eye(n, dtype=np.float32))
    found.update(triangular.product(sums, wide))
    assert triangular.factorize_in_place(matrix) and triangular.invert_in_place(matrix)
    found.update(np.ascontiguousarray(matrix))
    triangular.add_product(sums, rows, rows[::-1])
    found.update(sums)
print(found.hexdigest())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
@pytest.mark.parametrize("sizes", ["777 1000", pytest.param("96 300 2500 4100", marks=pytest.mark.slow)])
def test_the_bits_are_those_of_one_thread(sizes):
    found = {
        subprocess.check_output(
            [sys.executable, "-c", CALCULATED, *sizes.split()], env=os.environ | {"OPENBLAS_NUM_THREADS": threads}
        )
        for threads in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.slow
def test_a_wide_matrix():
    """Half a minute, and 3.3 GB."""
    matrix = np.full((WIDEST, WIDEST), 0.5, np.float32, order="F")
    matrix[np.arange(WIDEST), np.arange(WIDEST)] = 2
    assert triangular.factorize_in_place(matrix)
    last = matrix[-1].astype(np.float64)
    assert last @ last == pytest.approx(2, rel=1e-4)
    assert last @ matrix[0] == pytest.approx(0.5, rel=1e-4)
