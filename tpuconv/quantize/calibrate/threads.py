"""Threads that calculate side by side, each with products of its own.

OpenBLAS divides a product among its threads, and on some processors a sum depends on where its row is in a thread's
part. Here a product has one thread, what is divided are blocks of a fixed size, and so the bits are the same with any
number of threads.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, local
from typing import Any, TypeVar

Input = TypeVar("Input")
Returned = TypeVar("Returned")

MOST_WORKERS = 16
"""The largest number of threads, each of which holds what it calculates."""

_inside = local()
"""Its `is_worker` is set in the threads that are made here."""


class _Limit:
    """The number of contexts in which products have one thread, and what the number of threads was before."""

    def __init__(self) -> None:
        self.lock, self.users = Lock(), 0
        self.before: Any = None


_limit = _Limit()


@cache
def _libraries() -> Any:
    import scipy.linalg  # noqa: F401  it has a BLAS of its own, which must be loaded to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def single_threads() -> Iterator[None]:
    """Within the context NumPy's and SciPy's products have one thread, in the whole process."""
    with _limit.lock:
        if _limit.users == 0:
            _limit.before = _libraries().limit(limits=1)
        _limit.users += 1
    try:
        yield
    finally:
        with _limit.lock:
            _limit.users -= 1
            if _limit.users == 0:
                _limit.before.restore_original_limits()


def side_by_side(run: Callable[[Input], Returned], items: Sequence[Input]) -> list[Returned]:
    """Returns what a function returns for each item, calculated by several threads in which products have one. Within
    such a thread the items follow each other."""
    workers = min(len(items), len(os.sched_getaffinity(0)), MOST_WORKERS)
    with single_threads():
        if workers < 2 or getattr(_inside, "is_worker", False):
            return [run(item) for item in items]
        with ThreadPoolExecutor(workers, initializer=_begin) as pool:
            return list(pool.map(run, items))


def _begin() -> None:
    _inside.is_worker = True
