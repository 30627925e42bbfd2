"""The errors of click's parser of arguments as errors of tpuconv, so that each has an id."""

import click

from tpuconv.errors import UsageError


def usage_error(error: click.ClickException) -> UsageError:
    """Returns the error to show for one of click. Its hint names the help of the command."""
    ctx = getattr(error, "ctx", None)
    hint = f"see `{ctx.command_path if ctx else 'tpuconv'} --help`"
    match error:
        case click.NoSuchOption():
            if error.possibilities:
                hint = f"did you mean {' or '.join(error.possibilities)}? Or {hint}"
            return UsageError(f"No such option '{error.option_name}'", hint=hint)
        case click.MissingParameter(param=click.Argument()):
            return UsageError(f"Missing argument {_name_of(error)}", hint=hint)
        case click.MissingParameter(param=click.Option(help=str(text))):
            return UsageError(f"Missing option {_name_of(error)}", hint=f"{text.partition('.')[0]}. Or {hint}")
        case click.MissingParameter():
            return UsageError(f"Missing option {_name_of(error)}", hint=hint)
        case click.BadParameter():
            return UsageError(f"Invalid value for {_name_of(error)}: {error.message}", hint=hint)
    return UsageError(f"Wrong arguments: {error.format_message()}", hint=hint)


def _name_of(error: click.BadParameter) -> str:
    """Returns the name of the argument or option, as the help has it."""
    named = error.param_hint
    if named is None and error.param is not None:
        named = error.param.get_error_hint(error.ctx)
    return named if isinstance(named, str) else " / ".join(map(repr, named or ["an argument"]))
