"""Names of files and parameters: collapsing of indexed names into patterns such as `layers.{0...31}.mlp.up.kernel`, and
the suffixes of quantized parameters."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import product
from math import prod

MANIFEST = "tpuconv.json"
"""File name of the manifest; see `tpuconv.storage.sealed`."""
AUTO_NAME = "auto-"
"""How the name of a quantization begins whose rules were chosen for a number of bits."""
LAYOUTS = "layouts.json"
"""File name of `tpuconv.checkpoint.device_layouts`."""

SIGNATURE = "model.sig"
"""File name of a signature; see `tpuconv.verify.signature`."""
ADDED_FILES = (".cache/huggingface", ".gitattributes", SIGNATURE)
"""Files and folders that the Hub, its client and a signature add to an output: no fault of one."""

OWN_TARGET = "tpuconv"
"""The target whose tree is ours."""

REPAIR = "update or uninstall the package that registers it"
"""The hint of errors about entry points of other packages."""

QVALUE, SCALE, ZERO_POINT = ".array.qvalue", ".array.scale", ".array.zero_point"
"""The suffixes that Qwix appends to a parameter's name for its quantized values, scales and zero points."""

LEAF = ".value"
"""The suffix that Flax NNX appends to the name of a variable. A program's trees have it or not, by how they were
saved."""

INPUT_SCALE = ".einsum0_lhs_scale.array"
"""The suffix that Qwix appends to a module's name for the static scale of the input of its product."""

CACHE_SCALES = (".k_scale", ".v_scale")
"""The suffixes after an attention's name for the static scales of its cached keys and values."""


def is_beside(name: str) -> bool:
    """Returns whether a file of an output is one of `ADDED_FILES`, or in one."""
    return any(name == each or name.startswith(f"{each}/") for each in ADDED_FILES)


_NUMBER = re.compile(r"(?:(?<![^.])|(?<=layers_))\d+(?![^.])")  # MaxText has the layers `layers_0`, `layers_1`


def collapse(names: Iterable[str], kind: Callable[[str], Hashable] = lambda name: None) -> dict[str, list[str]]:
    """Returns the names of each pattern, patterns in the order of their first name. Names that differ only in indices
    (numbers between dots) share a pattern, if they are of one `kind`."""
    groups: dict[str, dict[Hashable, list[str]]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("{}", name), {}).setdefault(kind(name), []).append(name)
    found: dict[str, list[str]] = {}
    for template, kinds in groups.items():
        for members in kinds.values():
            # Of two indices, several kinds may have the same numbers of each: `{0,1}.{0,1}`.
            pattern = _fill(template, members)
            found |= {name: [name] for name in members} if pattern in found else {pattern: members}
    return found


def layer_module(name: str) -> str:
    """Returns the module of a parameter: up to the word that follows the first index, as in `layers.3.mlp`, or all but
    the last word of a name without an index."""
    words = name.split(".")
    index = next((i for i, word in enumerate(words) if _NUMBER.fullmatch(word) or word.startswith("layers_")), None)
    end = len(words) - 1 if index is None else min(index + 2, len(words) - 1)
    return ".".join(words[:end]) or name


def expand(pattern: str, limit: int | None = None) -> Iterator[str]:
    """Yields the names of a pattern: every combination of its indices.

    Raises:
        ValueError: the pattern is malformed, or has more than `limit` names. Raised before the first name.
    """
    texts = re.split(r"\{([\d.,]+)\}", pattern)
    ranges = [_ranges_of(text) for text in texts[1::2]]
    count = prod(sum(last - first + 1 for first, last in index_ranges) for index_ranges in ranges)
    if limit is not None and count > limit:
        raise ValueError(f"{pattern[:200]!r} has {count:.3g} names" if count < 1e300 else "too many names")
    numbers = [[n for first, last in index_ranges for n in range(first, last + 1)] for index_ranges in ranges]
    for indices in product(*numbers):
        yield texts[0] + "".join(f"{index}{text}" for index, text in zip(indices, texts[2::2], strict=True))


def _ranges_of(text: str) -> list[tuple[int, int]]:
    """Parses `3...5,9` into [(3, 5), (9, 9)]."""
    parts = (part.partition("...") for part in text.split(","))
    ranges = [(int(first), int(last or first)) for first, _, last in parts]
    if any(first > last for first, last in ranges):
        raise ValueError(f"{text[:80]!r} is not a range")
    return ranges


def _fill(template: str, names: list[str]) -> str:
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    for values in map(sorted, map(set, columns)):
        template = template.replace("{}", str(values[0]) if len(values) == 1 else f"{{{_ranges(values)}}}", 1)
    return template


def _ranges(values: list[int]) -> str:
    """Formats [3, 4, 5, 9] as `3...5,9`."""
    spans: list[list[int]] = []
    for value in values:
        if spans and spans[-1][1] == value - 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ",".join(str(a) if a == b else f"{a}...{b}" if b > a + 1 else f"{a},{b}" for a, b in spans)
