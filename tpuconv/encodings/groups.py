"""Which weights a description treats alike: by names, and by patterns that must be checked before they are matched."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from tpuconv.encodings.scheme import Scheme
from tpuconv.jsonfile import Optional

NAMES = Optional(([str], None))
"""A list of names in a description: what `jsonfile.check` takes for one."""


@dataclass(frozen=True)
class SchemeGroup:
    """Weights that a description treats alike. They are stored in one of the `schemes`, of which names and dtypes of
    tensors tell; by the description alone it is the first. `takes` says by its name whether a matrix, which is neither
    an embedding nor a router, is one of them."""

    schemes: tuple[Scheme, ...]
    takes: Callable[[str], bool]
    patterns: tuple[tuple[str, str], ...] = ()
    """Those of `takes`, as `tpuconv.patterns` wants them, by `match` on a module and those that it is in: to be checked
    before it is called."""


NAME = re.compile(r"[\w./-]*")
"""What is a name and no pattern: it is matched in no time."""


def pattern_to_check(where: str, text: str, pattern: str) -> tuple[tuple[str, str], ...]:
    """A pattern to be checked, of a text that may be a mere name."""
    return () if NAME.fullmatch(text) else ((f"config.json, {where}", pattern),)


compiled_pattern = cache(re.compile)
"""`re` itself remembers 512 patterns, fewer than some releases have."""


def within(module: str) -> list[str]:
    """A module and those that it is in: of experts the parent alone may be named."""
    return [module, *(module[:i] for i, letter in enumerate(module) if letter == ".")]


def is_within(names: Collection[str], module: str) -> bool:
    return any(name in names for name in within(module))
