"""A start for a family that does not exist yet: the nearest one, what it explains of a checkpoint's headers and
config.json, and a draft of its `family.py`."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import NO_EFFECT, SUPPORTED_VALUES
from tpuconv.models.common.heads import CAUSAL_ENDS
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.declare import DecoderFamily
from tpuconv.models.registry import Family, all_families, find_family
from tpuconv.names import collapse
from tpuconv.notation.layout import Shape
from tpuconv.notation.sizes import WithSizes, sets_of_layers
from tpuconv.notation.table import INDEX, Map
from tpuconv.sources.source import Source
from tpuconv.text import OneLine

MISSING = 4
"""How much worse it is if the checkpoint lacks what a family has than if the family lacks what the checkpoint has: what
is left may be added to a family, what is missing must be taken out. A value that the family refuses counts as much."""

MOST_CANDIDATES = 5
MOST_LISTED = 1000
"""Entries of a list that the draft writes as a default: as many as there may be layers."""


@dataclass(frozen=True)
class TensorPattern:
    """Tensors whose names differ in numbers only: the pattern, how many there are, dtype and shape of the first."""

    pattern: str
    count: int
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Candidate:
    """A family, and how well it fits a checkpoint.

    Attributes:
        name: of the family.
        explained, left, missing: patterns of tensors that its table has with their shape; that it does not have, or
            with another shape; and that it has and the checkpoint does not.
        refused, unread, absent: keys of config.json with values that it refuses; that it does not read; and that it
            reads and config.json does not have.
        reads_sizes_only: whether it cannot read the other keys that it knows, such as rotary positions of another form.
    """

    name: str
    explained: tuple[str, ...]
    left: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[str, ...]
    unread: tuple[str, ...]
    absent: tuple[str, ...]
    reads_sizes_only: bool

    @property
    def score(self) -> int:
        """The family with the largest is the nearest; of equal ones the first of the registry, which begins with plain
        families."""
        faults = len(self.missing) + len(self.refused) + self.reads_sizes_only
        return len(self.explained) - len(self.left) - MISSING * faults


@dataclass(frozen=True, repr=False)
class FamilyProposal(OneLine):
    """The description of a checkpoint that no family reads.

    Attributes:
        source, model_type, architectures: the facts of the checkpoint.
        candidates: the nearest families, the nearest first.
        explained, left: tensors that the nearest family explains, and the other tensors.
        unread: keys of config.json that the nearest family refuses or does not read, with their values.
        absent: keys that it reads and config.json does not have, with the family's defaults.
        draft: the text of a `family.py`.
        read_by: the family that reads the checkpoint's model_type, if there is one all the same.
    """

    source: str
    model_type: str
    architectures: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    explained: tuple[TensorPattern, ...]
    left: tuple[TensorPattern, ...]
    unread: Mapping[str, Any]
    absent: Mapping[str, Any]
    draft: str
    read_by: str | None

    @property
    def nearest(self) -> Candidate:
        """The nearest family."""
        return self.candidates[0]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        patterns = {
            key: [vars(each) | {"shape": list(each.shape)} for each in getattr(self, key)]
            for key in ("explained", "left")
        }
        return {
            "source": self.source,
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            "nearest": self.nearest.name,
            **patterns,
            "missing": list(self.nearest.missing),
            "unread": {key: short(value) for key, value in self.unread.items()},
            "absent": {key: short(value) for key, value in self.absent.items()},
            "candidates": [
                {"name": each.name, **{key: len(getattr(each, key)) for key in ("explained", "left", "missing")}}
                for each in self.candidates
            ],
            "draft": self.draft,
            "read_by": self.read_by,
        }


def propose_family(source: Source) -> FamilyProposal:
    """Returns the nearest family of a checkpoint, and a draft for a family of its own. A multimodal model is compared
    with multimodal ones, a text model with text models.

    Raises:
        UsageError: no family has a config that can be read from this config.json.
        UnsupportedConfig: an encoding that is not implemented.
    """
    tensors, _ = decode_names(source.tensors, source.encoding, any_scales=True)
    patterns: dict[str, list[str]] = {}
    for name in tensors:
        patterns.setdefault(_pattern(name), []).append(name)
    shapes = {pattern: {tensors[name].shape for name in names} for pattern, names in patterns.items()}
    is_wrapper = isinstance(source.config.get("text_config"), Mapping)
    found = [
        _Fit(family, *read, source.config, tensors, shapes)
        for family in all_families()
        if issubclass(family.config, WrapperConfig) == is_wrapper
        and (read := _lenient_config(family, source.config)) is not None
    ]
    if not found:
        raise UsageError(
            f"no family is near {source.name}: none can read its config.json",
            hint="docs/families.md shows how a family is written",
        )
    found.sort(key=lambda fit: fit.candidate.score, reverse=True)
    nearest = found[0]

    def described(chosen: tuple[str, ...]) -> tuple[TensorPattern, ...]:
        names = [name for pattern in chosen for name in patterns[pattern]]
        return tuple(
            TensorPattern(pattern, len(group), tensors[group[0]].values.dtype, tensors[group[0]].shape)
            for pattern, group in collapse(names).items()
        )

    architectures = source.config.get("architectures") or []
    read_by = None
    with suppress(TpuconvError):
        read_by = find_family(source.config).name
    return FamilyProposal(
        source=source.name,
        model_type=str(source.config.get("model_type")),
        architectures=tuple(map(str, architectures)),
        candidates=tuple(fit.candidate for fit in found[:MOST_CANDIDATES]),
        explained=described(nearest.candidate.explained),
        left=described(nearest.candidate.left),
        unread=nearest.unread,
        absent=nearest.defaults,
        draft="\n".join(_draft(nearest, source.config, {pattern: shapes[pattern] for pattern in nearest.left})) + "\n",
        read_by=read_by,
    )


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)


def _text_of(family: Family, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return family.config.text_of(raw) if issubclass(family.config, WrapperConfig) else raw


def _lenient_config(family: Family, raw: Mapping[str, Any]) -> tuple[DecoderConfig, bool] | None:
    """Returns the family's reading of what it knows of a config.json; of the sizes alone, and then True, if it cannot
    read that. None if it cannot read these either."""
    text = _text_of(family, raw)
    known = {key for key, _ in _keys_of(family)} | set(ROPE_KEYS)
    sizes = {family.config._key(field.name) for field in fields(DecoderConfig)}
    for keys in (known, sizes):
        some = {key: value for key, value in text.items() if key in keys and not _is_refused(family, key, value)}
        some["model_type"] = family.config.model_type
        try:
            inside = {"text_config": some} if issubclass(family.config, WrapperConfig) else some
            return family.config.from_hf(inside), keys is sizes
        except TpuconvError:
            continue
    return None


def _keys_of(family: Family) -> Iterator[tuple[str, Any]]:
    """Yields the keys of config.json that a family reads, with their defaults."""
    for field in fields(family.config):
        if field.name not in family.config.derived:
            yield family.config._key(field.name), field.default


def _is_refused(family: Family, key: str, value: Any) -> bool:
    allowed = {**SUPPORTED_VALUES, **family.config.only}.get(key)
    return allowed is not None and value not in allowed


class _Fit:
    """A family beside a checkpoint."""

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        reads_sizes_only: bool,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, set[Shape]],
    ):
        self.family, self.config, self.raw = family, config, _text_of(family, raw)
        self.table = family.table_for(tensors, config)
        one = {letter: layers[:1] for letter, layers in sets_of_layers(config).items()}
        bound = self.table.bind(WithSizes(config, config.sizes, {**config.layer_sets, **one}))
        wanted = {_pattern(name): shape for binding in bound for name, shape in binding.src_shapes().items()}
        # Of some encoded matrices only the number of values is known.
        explained = [p for p, shape in wanted.items() if {shape, (prod(shape),)} & shapes.get(p, set())]
        why_ignored = self.table.ignored(config)
        copies = {_pattern(name) for name in self.table.copies_of(config)}
        self.left = [
            pattern
            for pattern in shapes
            if pattern not in explained and pattern not in copies and not why_ignored(pattern.replace("{}", "0"))
        ]
        keys = dict(_keys_of(family))
        known = (*keys, *ROPE_KEYS, *SUPPORTED_VALUES, *family.config.only)
        told = {key for key, value in self.raw.items() if value is not None and key not in NO_EFFECT}
        refused = sorted(key for key in told if _is_refused(family, key, self.raw[key]))
        unread = sorted(told - set(known))
        self.unread = {key: self.raw[key] for key in (*refused, *unread)}
        self.defaults = {key: default for key, default in keys.items() if key not in self.raw}
        self.candidate = Candidate(
            family.name,
            tuple(explained),
            tuple(self.left),
            tuple(pattern for pattern in wanted if pattern not in explained),
            tuple(refused),
            tuple(unread),
            tuple(sorted(self.defaults)),
            reads_sizes_only,
        )

    @property
    def unfit_rows(self) -> list[Map]:
        """The rows that the config has and the checkpoint lacks, or has in another shape."""
        missing = set(self.candidate.missing)
        return [row for row in self.table if any(INDEX.sub("{}", name) in missing for name in row.hf_names)]


def _first(values: int | Any) -> tuple[int, ...]:
    return tuple(range(values) if isinstance(values, int) else values)[:1]


def _draft(fit: _Fit, raw: Mapping[str, Any], left: Mapping[str, set[Shape]]) -> Iterator[str]:
    """Yields the lines of a `family.py`."""
    near, kind = fit.family.name, re.sub(r"[^\w.-]", "_", str(raw.get("model_type")))
    name = re.sub(r"\W", "_", kind)
    unfit = {row.jax_names[0] for row in fit.unfit_rows}
    yield f'"""{kind}: config and mapping table. A draft, made of {near}: each guess is to be checked."""'
    yield ""
    rows = [_row_of(pattern, sizes, fit.config.sizes) for pattern, sizes in left.items()]
    if fit.candidate.refused:
        yield "from collections.abc import Mapping"
    yield f"from typing import {'Any, ' if fit.candidate.refused else ''}ClassVar"
    yield ""
    has_rows = any(row.startswith("Map") for row in rows)
    yield f"from tpuconv.notation.table import {'Map, ' if has_rows else ''}MappingTable"
    yield "from tpuconv.models.common.defaults import family_config"
    yield "from tpuconv.models.registry import Family, get_family"
    yield ""
    yield f"NEAR = get_family({_literal(near)})"
    if isinstance(fit.family, DecoderFamily):
        yield f'"""It is made of {", ".join(map(str, fit.family.parts))}: a family of such parts is a few lines."""'
    yield ""
    yield ""
    yield "@family_config"
    yield "class Config(NEAR.config):  # type: ignore[name-defined, misc]"
    yield '    """The keys of config.json."""'
    yield ""
    yield f"    model_type: ClassVar[str] = {_literal(kind)}"
    if fit.candidate.refused:
        allowed = ", ".join(f"{_literal(key)}: ({fit.unread[key]!r},)" for key in fit.candidate.refused)
        yield f"    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {{**NEAR.config.only, {allowed}}}"
    yield ""
    for key in fit.candidate.unread:
        value = fit.unread[key]
        if key.isidentifier() and (typed := _typed(value)):
            yield f"    {key}: {typed}  # does it change the mathematics?"
        else:
            yield f"    # {short(key)}: {short(value)}"
    yield ""
    yield ""
    if unfit:
        yield "ABSENT = ("
        yield from (f"    {_literal(each)}," for each in sorted(unfit))
        yield ")"
        yield f'"""Parameters of {near} that this family does not have."""'
        yield ""
    yield "TABLE = MappingTable("
    yield "    ("
    yield "        *(row for row in NEAR.table if row.jax_names[0] not in ABSENT)," if unfit else "        *NEAR.table,"
    yield from (f"        {row}" for row in rows)
    yield "    ),"
    yield "    ignore=NEAR.table.ignore,"
    yield "    copies=NEAR.table.copies,"
    yield ")"
    yield ""
    yield "FAMILY = Family("
    yield f"    name={_literal(name)},"
    yield f"    summary={_literal(kind)},"
    yield "    config=Config,"
    yield "    table=TABLE,"
    yield f'    model="tpuconv.models.{name}.modules:Model",  # to be written'
    causal = [str(each) for each in raw.get("architectures") or [] if str(each).endswith(CAUSAL_ENDS)]
    yield f"    architectures={{{', '.join(f'{_literal(each)}: {_literal(kind)}' for each in causal)}}},"
    yield ")"


def _typed(value: Any) -> str | None:
    """Returns the annotation and the default of a field with this value; None if it is not plain."""
    if isinstance(value, str | int | float):
        return f"{type(value).__name__} = {_literal(value)}"
    kinds = {type(each) for each in value} if isinstance(value, list) and len(value) <= MOST_LISTED else set()
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        return f"tuple[{kinds.pop().__name__}, ...] = ({''.join(f'{_literal(each)}, ' for each in value).strip()})"
    return None


def _literal(value: str | int | float) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _row_of(pattern: str, shapes: set[Shape], sizes: Mapping[str, int]) -> str:
    """Returns a row for tensors that no table has, or a comment if their shape has no letters."""
    parts = pattern.split("{}")
    shape = min(shapes)
    indices = ["L", "E"] if "layers." in parts[0] else ["E"]
    sides = [_letters_of(size, sizes) for size in shape]
    if len(shapes) > 1 or len(parts) - 1 > len(indices) or None in sides:
        found = " or ".join(str(list(each)) for each in sorted(shapes))
        return f"# {_literal(pattern)}  {found}: no letters have these sizes"
    letters = [side for side in sides if side is not None]
    if len(letters) == 2 and letters[0] == letters[1] == "D":
        letters[1] = "A"
    hf = parts[0] + "".join(f"{{{index}}}{part}" for index, part in zip(indices, parts[1:], strict=False))
    stacked = ["E"] if "{E}" in hf else []
    order = letters[::-1] if len(letters) == 2 else letters
    plain = [word for letter in [*stacked, *order] for word in letter.strip("()").split()]
    source, target = " ".join(letters), " ".join(plain)
    layout = source if source == target else f"{source} -> {target}"
    names = f"{_literal(hf)}, {_literal(_parameter_of(hf, len(shape)))}"
    return f'Map({names}, "{layout}"),  # a guess by the shape {list(shape)}'


def _letters_of(size: int, known: Mapping[str, int]) -> str | None:
    sizes = {letter: known[letter] for letter in "DFVHNKMWECQPR" if letter in known}
    for product in ("NH", "KH"):
        if all(letter in sizes for letter in product) and sizes[product[0]] * sizes[product[1]] == size != sizes["D"]:
            return f"({product[0]} {product[1]})"
    return next((letter for letter, own in sizes.items() if own == size), None)


def _parameter_of(hf: str, rank: int) -> str:
    """Returns a name for the parameter of a tensor, as other families name theirs."""
    module, _, kind = hf.removeprefix("model.").rpartition(".")
    module = module.replace("self_attn.", "attn.").replace("experts.{E}.", "").replace("_proj", "")
    return f"{module}.{'kernel' if rank > 1 else 'scale'}" if kind == "weight" else f"{module}.{kind}"
