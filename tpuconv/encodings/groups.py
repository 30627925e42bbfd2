"""Which weights a description treats alike: by names, and by patterns that are checked before they are matched."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from tpuconv.encodings.scheme import Scheme
from tpuconv.jsonfile import Optional

NAMES = Optional(([str], None))
"""The schema of a list of names; see `tpuconv.jsonfile.check`."""
FLAG = Optional((bool, None))
TEXT = Optional((str, None))
UNQUANTIZED = "convert an unquantized release"
"""The hint for weights whose encoding is not implemented."""


@dataclass(frozen=True)
class SchemeGroup:
    """Weights that a description treats alike.

    Attributes:
        schemes: the ways in which they may be stored. Names and dtypes of tensors decide; by the description alone it
            is the first.
        takes: whether the matrix of a module, which is neither an embedding nor a router, belongs to the group.
        patterns: those that `takes` matches with a module and its parents, as `tpuconv.patterns` wants them. They must
            be checked before `takes` is called.
        looked_up: whether embeddings and routers belong to the group too. Of all its matrices only those belong whose
            rows are whole blocks.
    """

    schemes: tuple[Scheme, ...]
    takes: Callable[[str], bool]
    patterns: tuple[tuple[str, str], ...] = ()
    looked_up: bool = False


NAME = re.compile(r"[\w./-]*")
"""A plain name, which needs no check."""


def pattern_to_check(where: str, text: str, pattern: str) -> tuple[tuple[str, str], ...]:
    """Returns the pattern of `text`, to be checked; none if the text is only a name. `where` is its key in
    config.json."""
    return () if NAME.fullmatch(text) else ((f"config.json, {where}", pattern),)


compiled_pattern = cache(re.compile)
"""`re` itself caches 512 patterns; some releases have more."""


def unless_named(schemes: tuple[Scheme, ...], names: Sequence[str], key: str) -> SchemeGroup:
    """Returns all weights except the modules that are named, as transformers chooses: a name is a pattern for the
    beginning of a module's name, up to a dot, or the end of it. `key` is the key of the names."""
    patterns = {name: rf"(?:{name})(?:\.|$)" for name in names}

    def takes(module: str) -> bool:
        return not module.endswith(tuple(names)) and not any(
            compiled_pattern(pattern).match(module) for pattern in patterns.values()
        )

    checked = (pattern_to_check(key, name, pattern) for name, pattern in patterns.items())
    return SchemeGroup(schemes, takes, tuple(chain.from_iterable(checked)))


def within(module: str) -> list[str]:
    """Returns a module and its parents. For experts, only the parent may be named."""
    return [module, *(module[:i] for i, letter in enumerate(module) if letter == ".")]


def is_within(names: Collection[str], module: str) -> bool:
    """Returns True if a module or one of its parents is named."""
    return any(name in names for name in within(module))
