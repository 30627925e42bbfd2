"""Refuses to run jax in a fork of a process in which it runs already: the threads of its backends are not in the fork,
which would wait for them without end."""

import os
import sys
from threading import Event

from tpuconv.errors import UsageError

_forked_from_jax = Event()


def check_no_fork() -> None:
    """Raises UsageError if this process was forked from one whose jax has started its backends."""
    if _forked_from_jax.is_set():
        raise UsageError(
            "this process was forked from one in which jax runs, and jax would wait without end here",
            hint='start processes by `multiprocessing.get_context("spawn")`, or before the first use of jax',
        )


def note_forks() -> None:
    """Lets each fork of this process note whether jax had started its backends."""
    os.register_at_fork(after_in_child=_note_fork)


def _note_fork() -> None:
    if "jax" in sys.modules:
        from tpuconv.private import backends_are_initialized

        if backends_are_initialized():
            _forked_from_jax.set()
