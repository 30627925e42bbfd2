"""Options that several commands share, each defined once, and the classes of commands."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tpuconv.api.conversion import DTYPE_CHOICES, ENCODING_CHOICES
from tpuconv.api.ray_tasks import Result, on_ray
from tpuconv.commands.params import ByteSize, File, LocationParam, Name, Numbers, RayAddress
from tpuconv.errors import UsageError

if TYPE_CHECKING:
    from tpuconv.hosts import ProcessPart

MOST_TOKENS, MOST_SEQUENCES = 1 << 24, 1 << 20  # more than any model has and any machine holds

Callback = TypeVar("Callback", bound=Callable[..., Any])


class Group(click.Group):
    """Suggests the nearest command for one that does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = get_close_matches(name, self.list_commands(ctx), 1)
            ctx.fail(f"no such command '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)


class Command(click.Command):
    """A command whose help ends with examples, one per line. It takes -v, as the group does; the process reads it."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
        )
        self.examples = examples

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


def command(name: str, summary: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Makes a command of a function; `summary` is its line in the list of commands."""
    return click.command(name, cls=Command, short_help=summary, examples=examples)


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")

ckpt = click.argument("ckpt", required=False, type=LocationParam())

overwrite = click.option(
    "--overwrite",
    is_flag=True,
    help="Replace OUT if tpuconv wrote it. The old output stays complete until the new one is.",
)

writes_output = stacked(
    overwrite,
    click.option(
        "--check",
        is_flag=True,
        help="If OUT exists already, read all of it and compare checksums. By default only file sizes are compared.",
    ),
)

workspace = click.option(
    "--workspace",
    metavar="DIR",
    type=Name(),
    help="Folder for large temporary files, such as /dev/shm: shards of a streamed source, and the results of a "
    "calibration if OUT is in a bucket.  [default: beside OUT, or the folder for temporary files]",
)

compress = click.option(
    "--compress",
    is_flag=True,
    help="Compress all arrays with zstd: smaller, slower. Quantized values of less than 8 bits are always compressed.",
)

limits = stacked(
    click.option("--max-memory", type=ByteSize(), help="Memory budget, such as 8GB.  [default: 60% of the machine's]"),
    click.option("--jobs", type=click.IntRange(min=1), help="Threads.  [default: one more than processors]"),
)

encoding = click.option(
    "--encoding",
    type=click.Choice(ENCODING_CHOICES),
    default="dequantize",
    show_default=True,
    help="FP8, INT8, INT4 and FP4 weights: decode them to bfloat16, or keep quantized values and scales (passthrough).",
)

quantize = click.option(
    "--quantize",
    type=Name(),
    metavar="CONFIG",
    help="Quantize during the conversion, by this config of `tpuconv quantize`.",
)

target = click.option(
    "--target",
    type=Name(),
    metavar="NAME",
    default="tpuconv",
    show_default=True,
    help="The program that reads the output: tpuconv, huggingface, maxtext, tunix, nnx, jax-llm-examples, or a plugin.",
)

scheme = click.option(
    "--scheme",
    type=click.Choice(["compressed-tensors", "fp8", "awq", "mxfp4"]),
    help="The format of quantized weights: quant_method of config.json.  [default: chosen by the types of the weights]",
)


def _dtype(help: str) -> Callable[[Any], Any]:
    return click.option("--dtype", type=click.Choice(DTYPE_CHOICES), default="auto", show_default=True, help=help)


dtype = _dtype("Dtype of parameters and activations. auto: the dtype of the checkpoint.")
comparison_dtype = _dtype("Compute dtype of both models. auto: float32, so that any difference is a bug, not rounding.")

cache_dtype = click.option(
    "--cache-dtype",
    type=click.Choice(["auto", "int8", "float8_e4m3fn"]),
    default="auto",
    show_default=True,
    callback=lambda ctx, param, value: None if value == "auto" else value,
    help="Dtype of the KV cache; int8 and FP8 halve its memory (one scale per head and token).",
)

gate = click.option(
    "--gate",
    multiple=True,
    metavar="NAME=BOUND",
    callback=lambda ctx, param, value: _parsed_gates(value),
    help="A bound that must hold: top1=0.99, the top-1 agreement over tokens without ties, or mean_kl=0.01. May be "
    "repeated.",
)

speculate = click.option(
    "--speculate",
    is_flag=True,
    help="Draft tokens with the model's MTP module. The checkpoint must be converted with --include-mtp.",
)

mesh = click.option(
    "--mesh",
    callback=lambda ctx, param, value: _parsed_mesh(value),
    help="Sizes of the mesh axes, such as tensor=8,expert=2.",
)

prompts = click.option(
    "--prompts",
    type=File(exists=True, dir_okay=False),
    help="A text file with one prompt per line.  [default: built-in prompts]",
)

benchmark_sizes = stacked(
    click.option(
        "--batch",
        type=Numbers(MOST_SEQUENCES),
        default="1",
        show_default=True,
        help="Sequences in a batch; a list such as 1,8.",
    ),
    click.option(
        "--prompt-length",
        type=Numbers(MOST_TOKENS),
        default="128",
        show_default=True,
        help="Tokens per prompt; a list such as 128,1024.",
    ),
    click.option(
        "--new-tokens",
        type=Numbers(MOST_TOKENS),
        default="64",
        show_default=True,
        help="Tokens generated per prompt; a list such as 64,256.",
    ),
)


processes = stacked(
    click.option(
        "--distributed",
        is_flag=True,
        help="Convert one part; index and count come from the cluster. Give --process-count if the cluster does not "
        "set "
        "it.",
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


on_all_processes = click.option(
    "--distributed",
    is_flag=True,
    help="Run on the devices of all processes of this cluster. Start the same command in each; process 0 prints.",
)


def on_processes(
    command: Callable[..., Result],
    ray: str | None,
    distributed: bool,
    process_index: int | None,
    process_count: int | None,
) -> Callable[..., Result]:
    """Returns a function of `tpuconv.api` that runs as the options `processes` say: on a Ray cluster, for the share of
    this process, or alone.

    Raises:
        UsageError: the options exclude each other, or the cluster does not set the index of this process.
    """
    if ray is not None:
        if distributed or process_index is not None:
            raise UsageError("--ray starts the processes itself", hint="leave out --distributed and --process-index")
        return partial(on_ray, command, address=ray, count=process_count)
    return partial(command, part=_chosen_part(distributed, process_index, process_count))


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
    from tpuconv.sharding import parse_mesh

    return parse_mesh(text) if text else None


def _parsed_gates(texts: Sequence[str]) -> dict[str, float] | None:
    from tpuconv.quantize.config import gate_from_text

    return dict(map(gate_from_text, texts)) or None


def require_mode(mode: str, given: bool, *others: str) -> None:
    """Raises UsageError if one of the other options is given without its mode, such as "--compare-hf"."""
    ctx = click.get_current_context()
    for name in others:
        if not given and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} goes with {mode}")
