"""How often each attack of the campaign was tried: printed at the end of a run (see conftest.py)."""

from collections import Counter

COUNTS: Counter[tuple[str, str]] = Counter()


def count(what: str, of: str, n: int = 1) -> None:
    """Adds to the trials of a kind of attack on a command or an input."""
    COUNTS[what, of] += n
