"""Progress reports of long work."""

from collections.abc import Callable
from dataclasses import dataclass

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
