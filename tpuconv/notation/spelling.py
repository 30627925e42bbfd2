"""Spellings: a name on disk, in an adapter or in a list of modules leads to the name that a family's table has.

Releases and trainers put segments before names or into them (`model.language_model.`, `_orig_mod.`, `base_layer`), and
some rename modules. All is decided for templates: `model.layers.#.mlp.up_proj` stands for the modules of all layers, so
that the 140,000 names of a large model are some dozens of templates.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tpuconv.notation.segments import FRONTS, undressed, without_front
from tpuconv.notation.table import INDEX, MappingTable

INDEX_NUMBER = re.compile(r"(?<![^._])\d+(?![^.])")
"""A number between dots, or after an underscore, as in `shard_3`."""
_REPLACED = re.compile(f"{INDEX.pattern}|{INDEX_NUMBER.pattern}")
_HASHED = str.maketrans("123456789", "0" * 9)


def template(name: str) -> str:
    """Returns `model.layers.#.mlp` of `model.layers.7.mlp`, and of `model.layers.{L}.mlp`."""
    return INDEX_NUMBER.sub("#", INDEX.sub("#", name) if "{" in name else name)


def copies_in_layers(copies: Mapping[str, str]) -> dict[str, str]:
    """Returns the copies of what layers have, such as matrices that they share, by their names, of all copies that a
    table knows."""
    return {copy: original for copy, original in copies.items() if "#" in template(original)}


def numbers(name: str) -> list[str]:
    """Returns the numbers that `template` replaces in a name without indices."""
    return INDEX_NUMBER.findall(name)


def filled(pattern: str, values: Sequence[str]) -> str:
    """Returns a template with values in place of its `#`, in their order."""
    parts = pattern.split("#")
    return parts[0] + "".join(value + part for value, part in zip(values, parts[1:], strict=True))


def with_indices_of(name: str, pattern: str) -> str:
    """Returns a template with the indices of a table's name: `{L}`."""
    return filled(pattern, [found[0] for found in _REPLACED.finditer(name)])


def by_template(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names of each template, both in the order of the names."""
    names = list(names)
    # All in one text: a pattern on each of 140,000 names takes ten times as long.
    alike_names = "\n".join(names).translate(_HASHED).split("\n")
    if len(alike_names) != len(names):  # a hostile name with a line break, or none at all
        alike_names = [name.translate(_HASHED) for name in names]
    shapes: defaultdict[str, list[str]] = defaultdict(list)
    for shape, name in zip(alike_names, names, strict=True):
        shapes[shape].append(name)
    out: dict[str, list[str]] = {}
    for alike in shapes.values():
        one = template(alike[0])
        if one.translate(_HASHED).count("0"):  # digits that are no number: `w1` and `w2` look alike
            for name in alike:
                out.setdefault(template(name), []).append(name)
        else:
            out.setdefault(one, []).extend(alike)
    return out


def module_of(name: str) -> str:
    """Returns the name of the module of a tensor."""
    return name.rpartition(".")[0]


def fronts_of(names: Collection[str]) -> set[str]:
    """Returns the segments before the layers of a family: `gpt_neox` of `gpt_neox.layers.#`."""
    found = [name.split(".#.")[0].split(".")[:-1] for name in names if ".#." in name and not name.startswith("mtp.")]
    return set(found[0]) if found and all(each == found[0] for each in found) else set()


class Speller:
    """Leads templates to those of a table.

    A template leads to the one whose module explains most of it; what follows the module (`.weight`,
    `.weight_scale_inv`, `.lora_A.weight`, nothing) stays. So tensors, adapters and lists of modules share it.

    Args:
        known: the templates of the table, in all forms.
        fronts: leading segments that only wrap.
        aliases: other templates, and the known ones that they stand for.
    """

    def __init__(
        self, known: Collection[str], fronts: Collection[str] = FRONTS, aliases: Mapping[str, str] | None = None
    ):
        self.fronts = frozenset(fronts)
        self._exact: dict[str, str] = {}
        self._bare: dict[str, set[str]] = defaultdict(set)
        self._found: dict[str, str | None] = {}
        for given, home in (*((name, name) for name in known), *(aliases or {}).items()):
            for name, own in ((given, home), (module_of(given), module_of(home))):
                if name and own and name not in self._exact:  # a name of the table wins over an alias
                    self._exact[name] = own
                    self._bare[without_front(name, self.fronts)].add(own)

    def canonical(self, given: str) -> str | None:
        """Returns the table's template for a template; None if no module of the table begins it, or several do."""
        if given not in self._found:
            found = [self._explained(name) for name in dict.fromkeys((given, undressed(given)))]
            best = min((each for each in found if each), key=lambda each: each[0], default=None)
            self._found[given] = best[1] if best else None
        return self._found[given]

    def spelled(self, name: str) -> str | None:
        """Returns the table's name for a name with numbers; None as `canonical`."""
        found = None if "#" in name else self.canonical(template(name))  # a hostile name may look like a template
        return None if found is None else filled(found, numbers(name))

    def _explained(self, name: str) -> tuple[int, str] | None:
        """The table's template, after how many of the last segments are not explained."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            head, rest = ".".join(parts[:count]), ".".join(["", *parts[count:]])
            if head in self._exact:
                return len(parts) - count, self._exact[head] + rest
            homes = self._bare.get(without_front(head, self.fronts), ())
            if homes:
                return (len(parts) - count, next(iter(homes)) + rest) if len(homes) == 1 else None
        return None


def rules_of(spelled: Mapping[str, str]) -> dict[str, str]:
    """Returns the fewest beginnings of templates, and what stands in their place on disk, that `respelled` makes these
    pairs of."""
    votes = Counter(_heads(ours, theirs) for ours, theirs in spelled.items() if ours != theirs)
    rules: dict[str, str] = {}
    for (head, other), agreeing in votes.most_common():
        below = sum(not head or ours == head or ours.startswith(f"{head}.") for ours in spelled)
        if 2 * agreeing > below:
            rules.setdefault(head, other)
    for ours, theirs in sorted(spelled.items(), key=lambda pair: pair[0].count(".")):
        if respelled(ours, rules) != theirs:
            # Where none holds, names below this one get rules of their own.
            head, other = next((pair for pair in _beginnings(ours, theirs) if _holds(*pair, spelled)), (ours, theirs))
            rules[head] = other
    return rules


def _beginnings(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    """Yields two names without ends that they share: the shortest first, the complete names last."""
    mine, other = ours.split("."), theirs.split(".")
    shared = next((n for n, (a, b) in enumerate(zip(mine[::-1], other[::-1], strict=False)) if a != b), len(mine))
    for count in range(min(shared, len(mine) - 1, len(other) - 1), -1, -1):
        yield ".".join(mine[: len(mine) - count]), ".".join(other[: len(other) - count])


def _holds(head: str, other: str, spelled: Mapping[str, str]) -> bool:
    """Returns True if all names that begin so are the others with the other beginning."""
    return all(
        theirs == other + ours.removeprefix(head)
        for ours, theirs in spelled.items()
        if ours == head or ours.startswith(f"{head}.")
    )


def _heads(ours: str, theirs: str) -> tuple[str, str]:
    """Two names without the segments at their ends that they share."""
    mine, other = ours.split("."), theirs.split(".")
    while mine and other and mine[-1] == other[-1]:
        mine.pop()
        other.pop()
    return ".".join(mine), ".".join(other)


def respelled(name: str, rules: Mapping[str, str]) -> str:
    """Returns what a template is on disk: the longest beginning that has a rule is replaced."""
    parts = name.split(".") if rules else ()
    for count in range(len(parts), -1, -1):
        if (head := ".".join(parts[:count])) in rules:
            return ".".join(filter(None, (rules[head], *parts[count:])))
    return name


def aliases(table: MappingTable, rename: Callable[[str], str]) -> dict[str, str]:
    """Returns templates of the names of a table, and those of what `rename` makes of them."""
    names = [name for row in table for name in row.hf_names]
    return {template(name): template(new) for name in names if (new := rename(name)) != name}
