"""The text of a family to begin with. What is left of the nearest family is in it, and a guess for the rest."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tpuconv.convert.plan.candidate import FamilyFit
from tpuconv.convert.plan.renaming import indexed, modules_of
from tpuconv.jsonfile import short
from tpuconv.models.common.heads import CAUSAL_ENDS
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.declare import DecoderFamily
from tpuconv.notation.layout import Shape
from tpuconv.notation.spelling import module_of

MOST_LISTED = 1000
"""Entries of a list that the draft writes as a default: as many as there may be layers."""


def draft(
    fit: FamilyFit, raw: Mapping[str, Any], shapes: Mapping[str, set[Shape]], layer_fronts: Collection[str]
) -> str:
    """Returns the text of a family: a few lines, if the nearest one is made of parts and the checkpoint has all of its
    tensors, else a `family.py`.

    Args:
        fit: the nearest family beside the checkpoint.
        raw: the parsed config.json.
        shapes: of the tensors, by pattern.
        layer_fronts: what names have before the numbers of layers.
    """
    modules = modules_of(fit.renamed)
    rows = [
        _row_of(pattern, shapes[pattern], fit.config.sizes, pattern.partition("{}")[0] in layer_fronts, modules)
        for pattern in fit.left
    ]
    has_parts = isinstance(fit.family, DecoderFamily) and not ({"others", "table", "names"} & fit.family.said.keys())
    write = _with_parts if has_parts and not fit.unfit_rows else _with_table
    first, *lines = write(fit, raw, rows, modules)
    return "\n".join([first, *_of_other_kind(fit), *lines]) + "\n"


def _of_other_kind(fit: FamilyFit) -> list[str]:
    """Returns a comment where either the nearest family or the checkpoint is multimodal, and the other is not."""
    if not fit.candidate.is_other_kind:
        return []
    if issubclass(fit.family.config, WrapperConfig):
        return [f"# {fit.family.name} is multimodal, the checkpoint is not: make NEAR the family of its text model."]
    return ["# The checkpoint is multimodal: declare a `tpuconv.models.declare.wrapper` around its text model."]


def _kind(raw: Mapping[str, Any]) -> str:
    return re.sub(r"[^\w.-]", "_", str(raw.get("model_type")))


def _causal(raw: Mapping[str, Any]) -> list[str]:
    return [str(each) for each in raw.get("architectures") or [] if str(each).endswith(CAUSAL_ENDS)]


def _only(fit: FamilyFit) -> str:
    allowed = ", ".join(f"{_literal(key)}: ({fit.unread[key]!r},)" for key in fit.candidate.refused)
    return f"{{**NEAR.config.only, {allowed}}}"


def _with_parts(fit: FamilyFit, raw: Mapping[str, Any], rows: list[str], modules: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of a family that is the nearest one with other parts."""
    near, kind = fit.family, _kind(raw)
    assert isinstance(near, DecoderFamily)
    yield f'"""{kind}: a draft, made of {near.name}: each guess is to be checked."""'
    yield ""
    yield "from tpuconv.models.registry import get_family"
    if any(row.startswith("Map") for row in rows):
        yield "from tpuconv.notation.table import Map"
    yield ""
    yield f"NEAR = get_family({_literal(near.name)})"
    yield f'"""It is made of {", ".join(map(str, near.parts))}. Name the parts that differ behind the architectures."""'
    yield ""
    yield "FAMILY = NEAR.but("
    yield from (f"    {_literal(each)}," for each in (kind, kind, *_causal(raw)))
    if fit.candidate.refused:
        yield f"    only={_only(fit)},  # {near.name} refuses this: to be implemented"
    typed = {key: found for key in fit.candidate.unread if key.isidentifier() and (found := _typed(fit.unread[key]))}
    if typed:
        yield "    # do these keys change the mathematics?"
        yield f"    keys={{{', '.join(f'{_literal(key)}: {kind}' for key, (kind, _) in typed.items())}}},"
        yield f"    defaults={{{', '.join(f'{_literal(key)}: {value}' for key, (_, value) in typed.items())}}},"
    for key in fit.candidate.unread:
        if key not in typed:
            yield f"    # {short(key)}: {short(fit.unread[key])}"
    yield from (f"    {line}" for line in _renamed("names", {home: name for name, home in modules.items()}))
    if rows:
        yield "    others=("
        yield from (f"        {row}" for row in rows)
        yield "    ),"
    yield ")"


def _with_table(fit: FamilyFit, raw: Mapping[str, Any], rows: list[str], modules: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of a `family.py`."""
    near, kind = fit.family.name, _kind(raw)
    name = re.sub(r"\W", "_", kind)
    unfit = {row.jax_names[0] for row in fit.unfit_rows}
    yield f'"""{kind}: config and mapping table. A draft, made of {near}: each guess is to be checked."""'
    yield ""
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
        yield f"    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {_only(fit)}"
    yield ""
    for key in fit.candidate.unread:
        value = fit.unread[key]
        if key.isidentifier() and (typed := _typed(value)):
            yield f"    {key}: {typed[0]} = {typed[1]}  # does it change the mathematics?"
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
    yield f"    architectures={{{', '.join(f'{_literal(each)}: {_literal(kind)}' for each in _causal(raw))}}},"
    yield from (f"    {line}" for line in _renamed("aliases", modules))
    yield ")"


def _renamed(argument: str, modules: Mapping[str, str]) -> Iterator[str]:
    if modules:
        yield f"{argument}={{  # guesses by shapes and words"
        yield from (f"    {_literal(name)}: {_literal(home)}," for name, home in modules.items())
        yield "},"


def _typed(value: Any) -> tuple[str, str] | None:
    """Returns the annotation and the default of a field with this value; None if it is not plain."""
    if isinstance(value, str | int | float):
        return type(value).__name__, _literal(value)
    kinds = {type(each) for each in value} if isinstance(value, list) and len(value) <= MOST_LISTED else set()
    if len(kinds) == 1 and kinds <= {str, int, float, bool}:
        return f"tuple[{kinds.pop().__name__}, ...]", f"({''.join(f'{_literal(each)}, ' for each in value).strip()})"
    return None


def _literal(value: str | int | float) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _row_of(
    pattern: str, shapes: set[Shape], sizes: Mapping[str, int], is_in_layers: bool, modules: Mapping[str, str]
) -> str:
    """Returns a row for tensors that no table has, or a comment if their shape has no letters."""
    shape = min(shapes)
    indices = ["L", "E"] if is_in_layers else ["E"]
    sides = [_letters_of(size, sizes) for size in shape]
    if len(shapes) > 1 or pattern.count("{}") > len(indices) or None in sides:
        found = " or ".join(str(list(each)) for each in sorted(shapes))
        return f"# {_literal(pattern)}  {found}: no letters have these sizes"
    letters = [side for side in sides if side is not None]
    if len(letters) == 2 and letters[0] == letters[1] == "D":
        letters[1] = "A"
    hf = indexed(pattern) if is_in_layers else pattern.replace("{}", "{E}")
    if home := modules.get(module_of(hf)):  # the bias of a module whose weights are renamed
        hf = f"{home}.{hf.rpartition('.')[2]}"
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
    module, _, kind = re.sub(r"^.*?\{L\}", "layers.{L}", hf.removeprefix("model.")).rpartition(".")
    module = module.replace("self_attn.", "attn.").replace("experts.{E}.", "").replace("_proj", "")
    return f"{module}.{'kernel' if rank > 1 else 'scale'}" if kind == "weight" else f"{module}.{kind}"
