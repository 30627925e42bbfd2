"""`tpuconv families`."""

import json
from typing import TYPE_CHECKING, Any

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, lines, print_json, say, show
from tpuconv.commands.params import KnownName, Name, known_families, known_targets
from tpuconv.errors import UsageError
from tpuconv.text import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from tpuconv.convert.plan.proposal import FamilyProposal
    from tpuconv.models.common.beside import Modality
    from tpuconv.models.registry import Family
    from tpuconv.models.wrappers import Wrapper


@options.command(
    "families",
    "tpuconv families",
    "tpuconv families Qwen3ForCausalLM",
    "tpuconv families llama --table",
    "tpuconv families --target maxtext",
    "tpuconv families --new org/a-new-model",
    "tpuconv families Qwen/Qwen3-8B --map maxtext:vllm --scan-layers",
)
@click.argument("name", required=False, type=KnownName(known_families), metavar="[NAME]")
@click.option("--table", "as_table", is_flag=True, help="Show the mapping of every tensor.")
@click.option(
    "--target", type=KnownName(known_targets), metavar="NAME", help="List the families that this target supports."
)
@click.option(
    "--new",
    type=Name(),
    metavar="SRC",
    help="Draft a family.py for a model without a family; show the nearest family and the tensors that it explains.",
)
@click.option(
    "--map",
    "mapped",
    type=Name(),
    metavar="SRC:DST",
    help="Show the map between the weights of two trees, such as maxtext:vllm.",
)
@options.of(api.weight_map)
@options.as_json
def families(
    name: str | None,
    as_table: bool,
    target: str | None,
    new: str | None,
    mapped: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """List the model families that can be converted. With NAME (a family, or a model_type or an architecture of
    config.json) show this family, its targets and an example of a config.json; with --table show its mapping of every
    tensor.

    With --new, read the config.json and the headers of SRC, a Hub id or a folder with safetensors. No weights are read.

    With --map, NAME may also be a model: a checkpoint, a folder, a Hub id or a config.json. A family or a model_type
    has the sizes that transformers gives it by default.
    """
    options.require_mode("--map", mapped is not None, *asked)
    if mapped is not None:
        if name is None or as_table or target or new:
            raise UsageError(
                "--map needs NAME, and goes with no other mode", hint="`tpuconv families NAME --map SRC:DST`"
            )
        _show_map(name, mapped, as_json, asked)
        return
    if new is not None:
        if name or as_table or target:
            raise UsageError(
                "--new takes no NAME, and no other option than --json", hint="`tpuconv families --new SRC`"
            )
        proposed = api.propose(new)
        if as_json:
            print_json(proposed.to_json())
        else:
            _show_proposal(proposed)
        return
    if target is not None:
        if as_table:
            raise UsageError(
                "--table shows the table of a family, --target the families of a target",
                hint="`tpuconv convert SRC --target NAME --dry-run` shows the parameters of a model there",
            )
        _show_target(target, name, as_json)
        return
    from tpuconv.models.named import families_named

    chosen, wrappers = _all() if name is None else families_named(name)
    if as_json:
        listed = {"wrappers": [wrapper.to_json() for wrapper in wrappers]} if wrappers else {}
        facts = [_to_json(family) | (_support_to_json(family, name) if name else {}) for family in chosen]
        print_json({"families": facts, **listed})
    elif as_table:
        for family in chosen:
            _show_table(family)
    else:
        _show_families(chosen, wrappers)
        if name is not None:
            for family in chosen:
                _show_support(family, name)


def _show_families(chosen: "Sequence[Family]", wrappers: "Sequence[Wrapper]") -> None:
    columns = ("name", "architectures", "converts", "sees and hears by")
    table = Table("families", columns, optional=("architectures", "sees and hears by"))
    for family in chosen:
        table.add_row(family.name, lines(family.architectures), family.summary, _towers(family.modalities))
    if chosen:
        console().print(table)
    if wrappers:
        parts = ("model_type", "architecture", "models", "text models", "sees and hears by")
        table = Table("multimodal models", parts, optional=("architecture", "text models"))
        for wrapper in wrappers:
            row = (wrapper.model_type, wrapper.architecture, wrapper.models, lines(wrapper.families))
            table.add_row(*row, _towers(wrapper.modalities))
        console().print(table)


def _towers(modalities: "Sequence[Modality]") -> "Text":
    """Returns the encoders of a model, each once."""
    return lines(dict.fromkeys(each.tower.summary for each in modalities))


def _all() -> "tuple[list[Family], list[Wrapper]]":
    """Returns all families, and the multimodal models around their text models. Names a family that cannot be imported
    on stderr."""
    from tpuconv.models.registry import family_names, get_family
    from tpuconv.models.wrappers import WRAPPERS

    found = []
    for name in family_names():
        try:
            found.append(get_family(name))
        except UsageError as error:
            say(f"note: {plain(error.message)}", err=True)
    return found, list(WRAPPERS.values())


def _to_json(family: "Family") -> dict[str, Any]:
    rows = [
        {"hf": list(row.hf_names), "jax": list(row.jax_names), "layout": row.layout, "when": row.when, "part": row.part}
        for row in family.whole_table
    ]
    towers = {each.part: each.tower.name for each in family.modalities}
    facts = {"name": family.name, "architectures": list(family.architectures), "towers": towers}
    return {**facts, "rows": rows, "ignored": dict(family.whole_table.ignore)}


def _support_to_json(family: "Family", name: str) -> dict[str, Any]:
    from tpuconv.targets.listing import targets_of

    return {"targets": [vars(each) for each in targets_of(family)], "example": _example(family, name)}


def _example(family: "Family", name: str) -> dict[str, Any]:
    """Returns an example of a config.json, of the model_type or architecture that the user named."""
    from tpuconv.models.named import example_config

    types = family.architectures.values()
    return example_config(family, name if name in types else family.architectures.get(name, ""))


def _show_support(family: "Family", name: str) -> None:
    """Shows which targets have a family, and an example of a config.json."""
    from tpuconv.targets.listing import targets_of

    columns = ("target", "supported", "scanned layers", "quantized", "encoders", "notes")
    table = Table(f"targets of {family.name}", columns, optional=("notes", "encoders", "scanned layers", "quantized"))
    for each in targets_of(family):
        words = ["yes" if value else "no" for value in (each.supported, each.scanned, each.quantized)]
        table.add_row(each.target, *words, " ".join(each.parts), lines(each.notes))
    console().print(table)
    show("  an example of its config.json, with default sizes:")
    click.echo("  " + json.dumps(_example(family, name)))
    show("  measured parity: docs/status.md; to plan a model: `tpuconv convert SRC --dry-run`")


def _show_proposal(proposed: "FamilyProposal") -> None:
    """Shows the nearest families, the tensors that the nearest does not explain, and the draft."""
    from tpuconv.jsonfile import short

    near = proposed.nearest
    if proposed.read_by:
        show((proposed.read_by, "bold"), " reads this model_type already. The draft follows anyway.")
    elif not near.likeness and len(near.explained) + len(near.renamed) <= len(near.left):
        show("No family is near: none has a quarter of the names, or the shapes. The draft is mostly empty.")
    elif not (near.left or near.missing or near.renamed or proposed.unread):
        show(
            (near.name, "bold"),
            " explains every tensor and every key. If the model computes the same, write the model_type of ",
            (near.name, "bold"),
            " into config.json.",
        )
    table = Table(
        f"{proposed.source}: model_type {proposed.model_type}",
        ("family", "patterns explained", "renamed", "left", "missing", "keys refused", "keys not read"),
        right=("patterns explained", "renamed", "left", "missing", "keys refused", "keys not read"),
        optional=("keys not read", "renamed", "keys refused"),
    )
    for each in proposed.candidates:
        counted = (each.explained, each.renamed, each.left, each.missing, each.refused, each.unread)
        table.add_row(each.name, *(str(len(items)) for items in counted))
    console().print(table)
    for name, home in near.renamed.items():
        show(f"  {name} may be {home} of {near.name}")
    for left in proposed.left:
        show(f"  {near.name} has no row for {left.pattern}  {left.dtype} {list(left.shape)} ({left.count})")
    for pattern in near.missing:
        show(f"  {near.name} has {pattern}; the source does not have it, or has another shape")
    for key, value in proposed.unread.items():
        readers = proposed.readers.get(key)
        others = f"; read by {', '.join(readers)}" if readers else ""
        show(f"  {near.name} {'refuses' if key in near.refused else 'does not read'} {key}={short(value)}{others}")
    for key, value in proposed.absent.items():
        show(f"  {near.name} reads {key}, which config.json does not set (default: {short(value)})")
    show()
    click.echo(proposed.draft)


def _show_target(name: str, family: str | None, as_json: bool) -> None:
    """Shows the families that a target supports, and how its output is loaded."""
    from tpuconv.models.named import families_named
    from tpuconv.targets.listing import supported
    from tpuconv.targets.registry import get_target

    target = get_target(name)
    chosen = families_named(family)[0] if family else []
    found = supported(target, chosen[0].name if chosen else family)
    quantized = target.quantized is not None
    if as_json:
        facts = {"target": target.name, "summary": target.summary, "loading": target.loading, "quantized": quantized}
        print_json({**facts, "families": [each.to_json() for each in found]})
        return
    table = Table(
        f"{target.name}: {target.summary}",
        ("name", "converts", "scanned layers", "encoders", "notes"),
        optional=("notes", "converts") if not any(each.notes for each in found) else ("converts", "encoders"),
    )
    for each in found:
        table.add_row(each.name, each.models, "yes" if each.scanned else "no", " ".join(each.parts), lines(each.notes))
    console().print(table)
    of_release = f"FP8 weights of a release in blocks of {target.fp8_block}, with --encoding keep"
    show("  quantized parameters: " + ((of_release if target.fp8_block else "yes") if quantized else "no"))
    show(f"  to load OUT there: {target.loading}")
    if target.is_safetensors:
        show("  names: the names of the release")
    elif target.trees is None:
        show("  names: our names; --scan-layers is refused if the kinds of layers do not repeat with a period")


def _show_map(name: str, mapped: str, as_json: bool, asked: dict[str, Any]) -> None:
    """Shows the rows of the map between two trees of a family or a model."""
    from tpuconv.weight_map.model import config_of_family

    source, colon, target = mapped.partition(":")
    if not (source and colon and target):
        raise UsageError(f"--map {mapped} does not name two trees", hint="write --map maxtext:vllm")
    found = api.weight_map(config_of_family(name) or name, source, target, **asked)
    if as_json:
        print_json(found.to_json())
        return
    title = f"{name}: {found.source.form.title} to {found.target.form.title}"
    columns = (source, "layouts", target, "target layouts", "changes")
    if source == target:
        columns = ("source", "layouts", "target", "target layouts", "changes")
    table = Table(title, columns, optional=() if not all(row.exact for row in found.rows) else ("changes",))
    for row in found.rows:
        changes = [f"undo {each}" for each in row.source.changes] + list(row.target.changes)
        table.add_row(
            lines(row.source.names),
            lines(row.source.layouts),
            lines(row.target.names),
            lines(row.target.layouts),
            lines([*changes, *([] if row.exact else ["rounds"])]),
        )
    console().print(table)
    show("  Layouts lead from the tensors of the release; layouts of the source are applied backwards.")


def _show_table(family: "Family") -> None:
    from tpuconv.notation.letters import meaning
    from tpuconv.notation.table import row_axes

    whole = family.whole_table
    table = Table(family.name, ("Hugging Face", "JAX", "layout", "when"), optional=("when",))
    for row in whole:
        table.add_row(lines(row.hf_names), lines(row.jax_names), row.layout, row.when or "")
    console().print(table)
    for pattern, why in whole.ignore.items():
        show(f"  not converted: {pattern}: {why}")
    for copy, original in family.table.copies.items():
        show(f"  not converted: {copy}, if it is a copy of {original}")
    for names in family.table.recut:
        show(f"  may be cut at other rows: {', '.join(names)}")
    for place in family.release_reader().places:
        others = "; ".join(name for name in place.forms if name != place.home)
        show(f"  {place.hf}* has the form {place.home}; other releases have one of {others}")
    if family.modalities:
        beside = ", ".join(f"{each.part} ({each.tower.summary})" for each in family.modalities)
        show(f"  beside the text model, with letters of their own: {beside}")
    used = {name for row in family.table for name in row_axes(row)} | {"L"}
    for name in sorted(used, key=lambda name: (len(name) > 1, name)):
        show(f"  {name}: {meaning(name)}")
