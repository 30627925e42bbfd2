"""An id for each error of the package, and what is known about it: `explanations.json`, which `docs/make_errors.py`
makes from the source code.

An error has the id of the message that it was made with. That is found by the text: of the messages of its class, of
the parents of the class, and of any class, each with gaps for names and numbers, it is the one with the most text
beside the gaps.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpuconv import errors
from tpuconv.errors import TpuconvError

EXPLANATIONS_FILE = Path(__file__).with_name("explanations.json")
ANY = "any class"
"""In place of the class of messages whose class the caller chooses."""
GAP = re.compile(r"\{[^{}]*\}")
"""Something in a message that differs from error to error: `{path}`."""


@dataclass(frozen=True)
class Explanation:
    """One message of the package.

    Attributes:
        id: `TC` and four digits. It stays when the message is reworded, and is not used again when it goes.
        error: the class of the error, or `ANY`.
        exit_code: the exit code of the command; None for any class, which says it.
        meaning: the error's meaning, for all of its class.
        message: the message with gaps, `{path}`.
        hints: the next steps, as the error has them, with gaps.
        places: the functions that raise it, each with the first sentence of its docstring.
    """

    id: str
    error: str
    exit_code: int | None
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
        return f"docs/errors/{page_of(self.error)}#{self.id.lower()}"

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
    named = {entry["error"] for entry in known["errors"].values()} - {ANY}
    facts = {name: ((kind := getattr(errors, name)).exit_code, " ".join(kind.__doc__.split())) for name in named}
    facts[ANY] = (None, "The class says what was read: a source, a config, an output.")
    return {
        id: Explanation(
            id, entry["error"], *facts[entry["error"]], entry["message"], tuple(entry["hints"]), tuple(entry["places"])
        )
        for id, entry in known["errors"].items()
    }


def page_of(error: str) -> str:
    """Returns the name of the page with the errors of a class."""
    return f"{error.replace(' ', '-')}.md"


def explanation_of(error: TpuconvError) -> Explanation | None:
    """Returns the explanation of an error; None for one that a library or a plugin words."""
    return nearest(error.message, {each.__name__ for each in type(error).__mro__})


def nearest(message: str, classes: Collection[str] = ()) -> Explanation | None:
    """Returns the explanation of a message, of some classes of errors; by default of all. None if no message fits."""
    known = [each for each in explanations().values() if not classes or each.error == ANY or each.error in classes]
    return max((each for each in known if each.fits(message)), key=lambda each: each.precision, default=None)
