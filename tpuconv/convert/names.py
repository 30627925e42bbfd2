"""Names of parameters: many as few patterns, `model.layers.{0...31}.mlp.up_proj.weight`; what encoded ones end in."""

import re
from collections.abc import Iterable, Iterator
from itertools import product

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


def expand(pattern: str) -> Iterator[str]:
    """The names of a pattern, with every combination of its indices."""
    texts = re.split(r"\{([\d.,]+)\}", pattern)
    for indices in product(*map(_numbers, texts[1::2])):
        yield texts[0] + "".join(f"{index}{text}" for index, text in zip(indices, texts[2::2], strict=True))


def _numbers(ranges: str) -> Iterator[int]:
    """`3...5,9` as 3, 4, 5, 9."""
    for part in ranges.split(","):
        first, _, last = part.partition("...")
        yield from range(int(first), int(last or first) + 1)


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
