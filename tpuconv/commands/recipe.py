"""`tpuconv recipe`."""

import shlex
from collections.abc import Iterator
from typing import Any

import click

from tpuconv import api
from tpuconv.api.recipe_facts import SPARE, CommandCall, ModelForm, RecipeStep
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, lines, print_json, say, show
from tpuconv.commands.flags import flag_of
from tpuconv.commands.params import Name
from tpuconv.commands.progress import shown
from tpuconv.text import format_size, plain


@options.command(
    "recipe",
    "tpuconv recipe Qwen/Qwen3-8B",
    "tpuconv recipe ./my-checkpoint --json",
    "tpuconv recipe Qwen/Qwen3-32B --fit v5e --fit v6e",
)
@click.argument("model", type=Name())
@options.of(api.recipe)
@options.as_json
def recipe(model: str, fit: tuple[str, ...], as_json: bool) -> None:
    """Show the family and the sizes of MODEL, and the commands that convert, quantize, serve, train and load it. MODEL
    is a Hub id, a folder with safetensors, or a config.json.

    No weights are read. Forms and targets are planned on the headers: those that the model cannot have are shown with
    the reason. --fit asks the TPU compiler too.
    """
    with shown(as_json) as progress:
        found = api.recipe(model, fit=fit, progress=progress)
    if as_json:
        facts = found.to_json()
        for step, described in zip(found.steps, facts["steps"], strict=True):
            described["commands"] = list(map(command_line, step.calls))
        print_json(facts)
        return
    show((found.model, "bold"), f": {sizes(found)}")
    console().print(forms_table(found))
    console().print(targets_table(found))
    if found.fit:
        asked = found.asked
        form = asked.get("quantize", "as released")
        show(f"by the TPU compiler, {form}, batch {asked['batch']}, context {asked['context']}:")
    for report in found.fit:
        show(f"  {report.verdict()}")
    if not found.from_headers:
        show("Read from config.json alone: the commands below take the weights from its folder.")
    for step in found.steps:
        show()
        show((step.title, "bold"))
        for line in step_lines(step):
            say(f"  {plain(line)}")
        if step.note:
            show(f"  {step.note}")


def sizes(found: "api.ModelRecipe") -> str:
    """Returns one line about the family and the sizes of a model."""
    encoded = f" in {found.encoding}" if found.encoding else ""
    beside = f"; encoders: {', '.join(found.parts)}" if found.parts else ""
    returned = "" if found.returns == "logits" else f"; returns {found.returns}"
    return (
        f"family {found.family}, {found.architecture}; {found.parameters:,} parameters; {found.tensors:,} tensors, "
        f"{format_size(found.source_bytes)}{encoded} -> {found.arrays:,} arrays, {format_size(found.output_bytes)}; "
        f"context {found.positions:,}{beside}{returned}"
    )


def form_cells(form: ModelForm) -> list[str]:
    """Returns the size of a form in device memory, and the smallest slice of each kind of chip."""
    if form.device_bytes is None:
        return ["-"]
    slices = (name.partition(":")[2] if name else "none" for name in form.slices.values())
    return [format_size(form.device_bytes), *slices]


SLICES_NOTE = (
    f"Slices: the smallest whose memory holds the parameters with {SPARE:.0%} to spare, by arithmetic; `tpuconv fit` "
    "asks the TPU compiler."
)


def forms_table(found: "api.ModelRecipe") -> Table:
    """Returns the table of forms: bytes in device memory, and slices."""
    chips = list(found.forms[0].slices)
    columns = ("form", "bytes", *chips, "types")
    title = f"forms of the parameters. {SLICES_NOTE}"
    table = Table(title, columns, right=("bytes",), optional=("types", *reversed(chips)))
    for form in found.forms:
        cells = form_cells(form)
        table.add_row(form.name, *cells, *[""] * (len(chips) + 1 - len(cells)), form.refusal or form.summary)
    return table


def targets_table(found: "api.ModelRecipe") -> Table:
    """Returns the table of targets."""
    columns = ("target", "supported", "scanned layers", "why not")
    table = Table("targets", columns, optional=("why not", "scanned layers"))
    for each in found.targets:
        words = ["yes" if value else "no" for value in (each.supported, each.scanned)]
        table.add_row(each.target, *words, lines([each.refusal]))
    return table


def step_lines(step: RecipeStep) -> Iterator[str]:
    """Yields the lines of a step, to be copied."""
    yield from (command_line(call) for call in step.calls)
    yield from step.elsewhere


def command_line(call: CommandCall) -> str:
    """Returns a command as a shell takes it."""
    return " ".join(["tpuconv", call.name, *map(shlex.quote, call.arguments), *_flags(call)])


def _flags(call: CommandCall) -> Iterator[str]:
    for name, value in call.options.items():
        values: list[Any] = value if isinstance(value, list) else [value]
        for each in values:
            yield flag_of(name) if each is True else f"{flag_of(name)} {shlex.quote(str(each))}"
