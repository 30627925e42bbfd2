"""`explain`: an error by its id or its message."""

import re

from tpuconv.arguments import given_as
from tpuconv.errors import UsageError
from tpuconv.explanations import Explanation, explanations, nearest

ID = re.compile(r"(?i)(?:\w*\[)?(?:TC)?(\d{1,4})\]?:?")
"""An id, also as a message begins with it: `UsageError[TC0123]:`."""
SHOWN_ERROR = re.compile(r"([A-Z]\w+)(?:\[(TC\d{4})\])?: (.*)", re.DOTALL)
"""An error as a command shows it: its class, its id and its message."""


def explain(error: str) -> Explanation:
    """Explains an error.

    Args:
        error: its id (`TC0123`), or its message.

    Raises:
        UsageError: there is no such error.
    """
    text = str(given_as("error", error, str)).strip()
    shown = SHOWN_ERROR.fullmatch(text)
    if number := ID.fullmatch((shown and shown[2]) or text):
        found = explanations().get(f"TC{int(number[1]):04}")
    else:
        found = (shown and nearest(shown[3], {shown[1]})) or nearest(text)
    if not found:
        raise UsageError(
            f"no error of tpuconv has the id or the message '{text}'",
            hint="give an id as messages show it, TC0123, or a complete message without the lines that follow it",
        )
    return found
