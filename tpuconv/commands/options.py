"""Options that several commands have, each written once, and the classes of commands."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from tpuconv.commands.params import ByteSize, File, Name, Numbers
from tpuconv.errors import UsageError

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
    """A command whose help ends with examples, one per line. It takes -v, which the process looks for, as the group
    does."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
        )
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write_text(example)


def stacked(*decorators: Callable[[Any], Any]) -> Callable[[Callback], Callback]:
    """The decorators as one; in the help they stand in this order."""

    def decorate(function: Callback) -> Callback:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def command(name: str, summary: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Makes a command of a function; `summary` is its line in the list of commands."""
    return click.command(name, cls=Command, short_help=summary, examples=examples)


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")

ckpt = click.argument("ckpt", required=False, type=File())

overwrite = click.option(
    "--overwrite",
    is_flag=True,
    help="Replace OUT if tpuconv wrote it. It stays complete until the new output is.",
)

writes_output = stacked(
    overwrite,
    click.option(
        "--check",
        is_flag=True,
        help="If OUT is there already, read all of it and compare checksums. By default only file sizes are compared.",
    ),
)

limits = stacked(
    click.option("--max-memory", type=ByteSize(), help="Memory budget, such as 8GB.  [default: 60% of the machine's]"),
    click.option("--jobs", type=click.IntRange(min=1), help="Threads.  [default: one more than processors]"),
)

encoding = click.option(
    "--encoding",
    type=click.Choice(["dequantize", "keep"]),
    default="dequantize",
    show_default=True,
    help="FP8, INT8, INT4 and FP4 weights: decode them to bfloat16, or keep quantized values and scales as they are.",
)

quantize = click.option(
    "--quantize", type=Name(), metavar="CONFIG", help="Quantize as `tpuconv quantize --config` would."
)

target = click.option(
    "--target",
    type=Name(),
    default="tpuconv",
    show_default=True,
    help="The program that the output is for: tpuconv, maxtext, tunix, nnx, jax-llm-examples, or one of a plugin.",
)

dtype = click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Dtype of parameters and activations; auto is the checkpoint's.",
)

cache_dtype = click.option(
    "--cache-dtype",
    type=click.Choice(["auto", "int8"]),
    default="auto",
    show_default=True,
    callback=lambda ctx, param, value: None if value == "auto" else value,
    help="Dtype of the KV cache; int8 halves its memory (one scale per head and token).",
)

mesh = click.option(
    "--mesh",
    callback=lambda ctx, param, value: _parsed_mesh(value),
    help="Sizes of the mesh axes, as tensor=8,expert=2.",
)

prompts = click.option(
    "--prompts",
    type=File(exists=True, dir_okay=False),
    help="A text file with one prompt per line.  [default: built-in prompts]",
)

benchmark_sizes = stacked(
    click.option(
        "--batch", type=Numbers(MOST_SEQUENCES), default="1", show_default=True, help="Sequences at once; a list: 1,8."
    ),
    click.option(
        "--prompt-length",
        type=Numbers(MOST_TOKENS),
        default="128",
        show_default=True,
        help="Tokens of a prompt; a list.",
    ),
    click.option(
        "--new-tokens",
        type=Numbers(MOST_TOKENS),
        default="64",
        show_default=True,
        help="Tokens generated per prompt; a list.",
    ),
)


def _parsed_mesh(text: str | None) -> dict[str, int] | None:
    from tpuconv.sharding import parse_mesh

    return parse_mesh(text) if text else None


def require_mode(mode: str, given: bool, *others: str) -> None:
    """Raises UsageError if one of the other options is given without its mode, such as "--compare-hf"."""
    ctx = click.get_current_context()
    for name in others:
        if not given and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} goes with {mode}")
