"""Names of parameters: many as few patterns, `model.layers.{0...31}.mlp.up_proj.weight`; what encoded ones end in."""

import re
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

MANIFEST = "tpuconv.json"
"""Of an output of ours; see `sealed`."""

QVALUE, SCALE, ZERO_POINT = ".array.qvalue", ".array.scale", ".array.zero_point"
"""What Qwix adds to the name of a parameter for the arrays that hold it quantized."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def collapse(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by pattern, in the order of their first name. A number between dots is an index: names that differ only
    in indices share a pattern."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("{}", name), []).append(name)
    return {_fill(template, members): members for template, members in groups.items()}


def expand(pattern: str, limit: int | None = None) -> Iterator[str]:
    """The names of a pattern, with every combination of its indices.

    Raises:
        ValueError: the pattern is none, or stands for more than `limit` names; before one is listed.
    """
    texts = re.split(r"\{([\d.,]+)\}", pattern)
    ranges = [_ranges_of(text) for text in texts[1::2]]
    count = prod(sum(last - first + 1 for first, last in own) for own in ranges)
    if limit is not None and count > limit:
        raise ValueError(f"{pattern[:200]!r} stands for {count:.3g} names" if count < 1e300 else "names without end")
    numbers = [[n for first, last in own for n in range(first, last + 1)] for own in ranges]
    for indices in product(*numbers):
        yield texts[0] + "".join(f"{index}{text}" for index, text in zip(indices, texts[2::2], strict=True))


def _ranges_of(text: str) -> list[tuple[int, int]]:
    """`3...5,9` as (3, 5), (9, 9)."""
    parts = (part.partition("...") for part in text.split(","))
    ranges = [(int(first), int(last or first)) for first, _, last in parts]
    if any(first > last for first, last in ranges):
        raise ValueError(f"{text[:80]!r} is no range")
    return ranges


def _fill(template: str, names: list[str]) -> str:
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    for values in map(sorted, map(set, columns)):
        template = template.replace("{}", str(values[0]) if len(values) == 1 else f"{{{_ranges(values)}}}", 1)
    return template


def _ranges(values: list[int]) -> str:
    """3,4,5,9 as `3...5,9`."""
    spans: list[list[int]] = []
    for value in values:
        if spans and spans[-1][1] == value - 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ",".join(str(a) if a == b else f"{a}...{b}" if b > a + 1 else f"{a},{b}" for a, b in spans)
