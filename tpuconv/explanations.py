"""An id for each error of the package, and what is known about it: `explanations.json`, which `docs/make_errors.py`
makes from the source code.

An error has the id of the message that it was made with. That is found by the text: of the messages of its class, each
with gaps for names and numbers, it is the one with the most text beside the gaps.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpuconv import errors
from tpuconv.errors import TpuconvError

EXPLANATIONS_FILE = Path(__file__).with_name("explanations.json")
GAP = re.compile(r"\{[^{}]*\}")
"""Something in a message that differs from error to error: `{path}`."""


@dataclass(frozen=True)
class Explanation:
    """One message of the package.

    Attributes:
        id: `TC` and four digits. It stays when the message is reworded, and is not used again when it goes.
        error: the class of the error.
        exit_code: the exit code of the command.
        meaning: the error's meaning, for all of its class.
        message: the message with gaps, `{path}`.
        hints: the next steps, as the error has them, with gaps.
        places: the functions that raise it, each with the first sentence of its docstring.
    """

    id: str
    error: str
    exit_code: int
    meaning: str
    message: str
    hints: tuple[str, ...]
    places: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the explanation for JSON."""
        return asdict(self)

    @property
    def page(self) -> str:
        """The page of the documentation with this error, and its anchor."""
        return f"docs/errors/{self.error}.md#{self.id.lower()}"

    def fits(self, message: str) -> bool:
        """Returns whether a text is this message with something in the gaps."""
        first, *others = GAP.split(self.message)
        if not others:
            return message == first
        *middle, last = others
        if not (message.startswith(first) and message.endswith(last)):
            return False
        at, end = len(first), len(message) - len(last)
        for text in middle:
            if (at := message.find(text, at, end)) < 0:
                return False
            at += len(text)
        return at <= end

    @property
    def precision(self) -> tuple[int, int]:
        """Greater for the message that says more: the number of characters beside the gaps, then fewer gaps."""
        return len(GAP.sub("", self.message)), -len(GAP.findall(self.message))


@cache
def explanations() -> Mapping[str, Explanation]:
    """Returns all explanations by id."""
    known = json.loads(EXPLANATIONS_FILE.read_text(encoding="utf-8"))
    classes = {name: getattr(errors, name) for name in {entry["error"] for entry in known["errors"].values()}}
    return {
        id: Explanation(
            id,
            name := entry["error"],
            classes[name].exit_code,
            " ".join(classes[name].__doc__.split()),
            entry["message"],
            tuple(entry["hints"]),
            tuple(entry["places"]),
        )
        for id, entry in known["errors"].items()
    }


def explanation_of(error: TpuconvError) -> Explanation | None:
    """Returns the explanation of an error; None for one that a library or a plugin words."""
    return nearest(error.message, type(error).__name__)


def nearest(message: str, error: str | None = None) -> Explanation | None:
    """Returns the explanation of a message, of one class of errors or of any; None if no message fits."""
    fitting = [each for each in explanations().values() if error in (None, each.error) and each.fits(message)]
    return max(fitting, key=lambda each: each.precision, default=None)
