"""The group of all commands. A command is imported when it is asked for: the list of commands imports none of them."""

from difflib import get_close_matches
from importlib import import_module

import click

from tpuconv.errors import UsageError

SUMMARIES = {
    "recipe": "Show the sizes of a model and the commands for it.",
    "convert": "Convert safetensors to an Orbax checkpoint.",
    "quantize": "Quantize a checkpoint by Qwix rules.",
    "verify": "Check a checkpoint, or compare it with the original.",
    "compare": "Compare two checkpoints: logits, perplexity, parameters.",
    "benchmark": "Time prefill and decoding on this machine.",
    "fit": "Ask the TPU compiler whether a model fits.",
    "generate": "Generate text.",
    "export": "Write a checkpoint as safetensors.",
    "reshard": "Rewrite a checkpoint for another mesh.",
    "push": "Upload a checkpoint or an export to the Hub.",
    "inspect": "Show the tensors of a checkpoint.",
    "families": "List the model families that can be converted.",
    "explain": "Explain an error by its id or its message.",
    "doctor": "Check this machine: versions, devices, disk, access to the Hub.",
}
"""The line of each command in the list of commands. The module of this package with its name defines it."""


class Group(click.Group):
    """Suggests the nearest command for one that does not exist. Takes `help` and `help COMMAND` as `--help`."""

    def command_of(self, name: str) -> click.Command:
        """Returns a command of `SUMMARIES`."""
        if name not in self.commands:
            command: click.Command = getattr(import_module(f"tpuconv.commands.{name}"), name)
            command.short_help = SUMMARIES[name]
            self.add_command(command)
        return self.commands[name]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.command_of(cmd_name) if cmd_name in SUMMARIES else None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUMMARIES)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUMMARIES.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name == "help" and len(args) == 1:
            click.echo(ctx.get_help())
            ctx.exit()
        if name == "help":
            name, args = args[1], [args[1], "--help"]
        if name not in SUMMARIES and not name.startswith("-"):
            near = get_close_matches(name, SUMMARIES, 1)
            hint = f"did you mean '{near[0]}'?" if near else "see `tpuconv --help`"
            raise UsageError(f"no such command '{name}'", hint=hint)
        return super().resolve_command(ctx, args)
