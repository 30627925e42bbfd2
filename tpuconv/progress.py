"""Progress reports of long work."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpuconv.text import plain

TICK_SECONDS = 0.1
"""The time between two reports."""


@dataclass(frozen=True)
class Progress:
    """One report of a running operation.

    Attributes:
        stage: what is being done, such as "converting".
        done: bytes (or, of a search, steps) that are done.
        total: bytes in all; 0 if there is no count.
        message: a sentence for the user, or empty.
    """

    stage: str
    done: int = 0
    total: int = 0
    message: str = ""


Listener = Callable[[Progress], None]
"""The function that an operation calls with its progress, at most several times a second."""


def ignore(progress: Progress) -> None:
    """The listener that does nothing."""


class Bar:
    """A listener that draws a bar for each stage, in a notebook or on stderr. Functions take True for it."""

    def __init__(self) -> None:
        self._stage = ""
        self._is_complete = False  # the bar of this stage
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        from tqdm.auto import tqdm  # a widget in a notebook that has them

        if self._bar is not None and (progress.stage != self._stage or progress.message):
            self._bar.close()
            self._bar = None
        if progress.message:
            tqdm.write(plain(progress.message), file=sys.stderr)
        elif progress.total:
            is_complete = progress.done >= progress.total
            if self._is_complete and is_complete and progress.stage == self._stage:
                return  # reports go on while an output is published
            if self._bar is None:
                self._stage = progress.stage
                self._bar = tqdm(desc=plain(self._stage), total=progress.total, unit="B", unit_scale=True)
            self._bar.total = progress.total
            self._bar.update(progress.done - self._bar.n)
            self._is_complete = is_complete
            if is_complete:
                self._bar.close()
                self._bar = None
