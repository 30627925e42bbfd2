"""Options that several commands share, each defined once, and the class of commands."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tpuconv.commands.flags import flag_of, with_flags
from tpuconv.commands.params import (
    ByteSize,
    File,
    KnownName,
    Layers,
    LocationParam,
    Name,
    Number,
    Numbers,
    RayAddress,
    known_checkpoints,
    known_configs,
    known_targets,
)
from tpuconv.commands.progress import be_quiet
from tpuconv.errors import UsageError
from tpuconv.options import CACHE_DTYPES, MOST_TOKENS, Description, options_of

if TYPE_CHECKING:
    from tpuconv.api.ray_tasks import Result
    from tpuconv.hosts import ProcessPart
    from tpuconv.location import Location

Callback = TypeVar("Callback", bound=Callable[..., Any])


class Command(click.Command):
    """A command whose help ends with examples, one per line. It takes -q and -v as the group does; the process
    reads -v."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        first: dict[str | None, click.Parameter] = {}
        for param in self.params:
            first.setdefault(param.name, param)
        self.params = [*first.values()]
        self.params += [
            click.Option(
                ["-q", "--quiet"], is_flag=True, expose_value=False, callback=be_quiet, help="Show no progress."
            ),
            click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help="Show the traceback of an error."),
        ]
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Returns the arguments that are left. An error of the parser names the command, whose help its hint shows."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:  # on one line each, to be copied
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def stacked(*decorators: Callable[[Any], Any]) -> Callable[[Callback], Callback]:
    """Combines decorators into one; the help lists their options in this order."""

    def decorate(function: Callback) -> Callback:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Makes a command of a function."""
    return click.command(name, cls=Command, examples=examples)


BY_MTP = "mtp"
"""The value of --speculate without a draft."""

FILE = File(exists=True, dir_okay=False)
CLICK: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"type": Name(), "metavar": "ID_OR_PATH[:WEIGHT]", "multiple": True},
    "allow_config": {"metavar": "KEY", "multiple": True},
    "cache_dtype": {
        "type": click.Choice(["auto", *CACHE_DTYPES]),
        "default": "auto",
        "show_default": True,
        "callback": lambda ctx, param, value: None if value == "auto" else value,
    },
    "calibration": {"type": Name(), "metavar": "TEXT"},
    "beside": {"type": Name(), "metavar": "PATH"},
    "config": {"type": Name(), "metavar": "SRC"},
    "draft_for": {"type": Name(), "metavar": "TARGET"},
    "fit": {"multiple": True, "metavar": "SLICE"},
    "gates": {
        "multiple": True,
        "metavar": "NAME=BOUND",
        "callback": lambda ctx, param, value: _parsed_gates(value),
    },
    "html": {"type": File()},
    "layers": {"type": Layers()},
    "lora_alpha": {"type": Number(min=0, min_open=True)},
    "max_memory": {"type": ByteSize()},
    "mesh": {"callback": lambda ctx, param, value: _parsed_mesh(value)},
    "prompts": {"type": FILE},
    "quantize": {"type": KnownName(known_configs, or_file=True), "metavar": "CONFIG"},
    "recipe": {"type": File()},
    "source": {"type": Name()},
    "speculate": {
        "type": Name(),
        "is_flag": False,
        "flag_value": BY_MTP,
        "metavar": "[DRAFT]",
        "callback": lambda ctx, param, value: False if value is None else value == BY_MTP or value,
    },
    "target": {"type": KnownName(known_targets), "metavar": "NAME"},
    "target_bits": {"type": Number(min=0, min_open=True)},
    "task_folder": {"type": File(exists=True, file_okay=False)},
    "temperature": {"type": Number(min=0, max=1000)},
    "text": {"type": FILE},
    "top_p": {"type": Number(min=0, max=1, min_open=True)},
    "topologies": {"multiple": True, "required": True},
    "with_skipped": {"type": Name(), "metavar": "SRC"},
    "workspace": {"type": Name(), "metavar": "DIR"},
}
"""Settings of click besides the description of an option with a value: how it is written and parsed."""


def of(function: Callable[..., Any], *names: str, **spelled: Mapping[str, Any]) -> Callable[[Callback], Callback]:
    """The options of a function of `tpuconv.api`, or those with these names. Options that the command has already are
    left out. `spelled` adds to `CLICK`, by name."""
    chosen = names or flags_of(function)
    return stacked(*(_option(each, known, spelled) for each, known in _described(function) if each.name in chosen))


def flags_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the options that a command has of a function of `tpuconv.api`."""
    return tuple(each.name for each, known in _described(function) if known.is_flag)


def _described(function: Callable[..., Any]) -> "Iterator[tuple[Field[Any], Description]]":
    return options_of(function.request)  # type: ignore[attr-defined]


def _option(
    each: "Field[Any]", known: Description, spelled: Mapping[str, Mapping[str, Any]]
) -> Callable[[Callback], Callback]:
    settings: dict[str, Any] = {"help": with_flags(known.help)}
    if isinstance(each.default, bool) and "is_flag" not in CLICK.get(each.name, {}):
        settings["is_flag"] = True
    elif isinstance(each.default, tuple) and each.default:
        default = ",".join(map(str, each.default))
        settings |= {"default": default, "show_default": True, "type": Numbers(known.most or MOST_TOKENS)}
    elif each.default not in (None, (), MISSING) and each.default is not False:
        settings |= {"default": each.default, "show_default": True}
    if known.choices:
        settings["type"] = click.Choice(known.choices)
    elif known.least is not None and "type" not in settings:
        settings["type"] = click.IntRange(known.least, known.most)
    written = {} if settings.get("is_flag") else CLICK.get(each.name, {})
    settings |= {**written, **spelled.get(each.name, {})}
    return click.option(flag_of(each.name), each.name, **settings)


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")

ckpt = click.argument("ckpt", required=False, type=LocationParam(), shell_complete=known_checkpoints)

src_or_ckpt = click.argument(
    "src", required=False, type=Name(), metavar="[SRC_OR_CKPT]", shell_complete=known_checkpoints
)

processes = stacked(
    click.option(
        "--distributed",
        is_flag=True,
        help="Convert one part; index and count come from the cluster. Give --process-count if the cluster does not "
        "set it.",
    ),
    click.option(
        "--process-index",
        type=click.IntRange(min=0),
        metavar="I",
        help="Convert one part, as process I of several, from 0. The last process to end publishes OUT.",
    ),
    click.option("--process-count", type=click.IntRange(min=1), metavar="N", help="The number of processes."),
    click.option(
        "--ray",
        type=RayAddress(),
        is_flag=False,
        flag_value="auto",
        metavar="[ADDRESS]",
        help="Run as tasks of the Ray cluster at this address, by default the cluster of this host: one task for each "
        "node, or --process-count tasks.",
    ),
)


PROCESS_OPTIONS = ("ray", "distributed", "process_index", "process_count")
"""The options of `processes`."""

on_all_processes = click.option(
    "--distributed",
    is_flag=True,
    help="Run on the devices of all processes of this cluster. Start the same command in each; process 0 prints.",
)


def asked_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a command that a function of `tpuconv.api` takes."""
    return {each.name: given[each.name] for each, _ in _described(function) if each.name in given}


def on_processes(command: "Callable[..., Result]", given: Mapping[str, Any]) -> "Callable[..., Result]":
    """Returns a function of `tpuconv.api` that runs as the options `processes` say: on a Ray cluster, for the share of
    this process, or alone.

    Raises:
        UsageError: the options exclude each other, or the cluster does not set the index of this process.
    """
    ray, distributed, index, count = (given[name] for name in PROCESS_OPTIONS)
    if ray is not None:
        if distributed or index is not None:
            raise UsageError("--ray starts the processes itself", hint="leave out --distributed and --process-index")
        from tpuconv.api.ray_tasks import on_ray

        return partial(on_ray, command, address=ray, count=count)
    return partial(command, part=_chosen_part(distributed, index, count))


def _chosen_part(distributed: bool, process_index: int | None, process_count: int | None) -> "ProcessPart | None":
    """Returns this process's share of the work; None for all of it."""
    from tpuconv.hosts import ProcessPart, find_part

    if distributed and process_index is not None:
        raise UsageError("--distributed finds the index of this process", hint="leave out --process-index")
    if distributed:
        return find_part(process_count)
    if (process_index is None) != (process_count is None):
        raise UsageError(
            "--process-index and --process-count go together",
            hint="give both, or --distributed if the cluster sets them",
        )
    if process_index is None or process_count is None:
        return None
    return ProcessPart(process_index, process_count)


def _parsed_mesh(text: str | None) -> dict[str, int] | None:
    from tpuconv.notation.sharding import parse_mesh

    return parse_mesh(text) if text else None


def _parsed_gates(texts: Sequence[str]) -> dict[str, float] | None:
    from tpuconv.quantize.config import gate_from_text

    return dict(map(gate_from_text, texts)) or None


def is_given(name: str) -> bool:
    """Returns True if an option of the running command is on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def require_mode(mode: str, given: bool, *others: str) -> None:
    """Raises UsageError if one of the other options is given without its mode, such as "--compare-hf"."""
    for name in others:
        if not given and is_given(name):
            raise UsageError(f"{flag_of(name)} goes with {mode}", hint=f"leave {flag_of(name)} out, or give {mode}")


def check_planned_place(folder: "Location", out: "Location") -> None:
    """Checks that the output of a source in `folder` may lie in OUT, as a run would, whatever is there.

    Raises:
        UsageError, OutputError: it may not.
    """
    from tpuconv.convert.run.engine import check_outside
    from tpuconv.storage.refusals import check_not_nested

    check_outside(folder, out)
    check_not_nested(out)
