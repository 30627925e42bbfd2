"""Loops that numba compiles: what numpy cannot do in one pass. They run without the interpreter's lock, so that threads
run side by side.

Importing numba takes half a second: modules with such loops are imported when they are first needed. The compiled code
is cached on the disk.
"""

from contextlib import suppress

import numba

from tpuconv import private

# With the first kernel numba imports all that it can compile, and looks for scipy's BLAS: 0.4 s. No kernel here
# multiplies matrices, and where another one does, numba looks again.
with suppress(ImportError, AttributeError):
    _linalg = private.numba_linalg
    _ensure_blas, _linalg.ensure_blas = _linalg.ensure_blas, lambda: None
    try:
        _ = private.numba_arraymath
    finally:
        _linalg.ensure_blas = _ensure_blas

compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
"""Compiles a loop."""

compiled_sum = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})
"""Compiles a loop whose sums may be added up in any order; quotients stay as IEEE has them."""

compiled_fused = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
"""Compiles a loop in which a product and a sum are one operation with one rounding (FMA)."""
