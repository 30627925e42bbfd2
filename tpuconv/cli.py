"""The command `tpuconv`. Importing it imports neither numpy nor jax, and none of the commands."""

import click

from tpuconv.commands.group import Group
from tpuconv.commands.process import run
from tpuconv.commands.progress import be_quiet
from tpuconv.memory import check_address_space


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tpuconv")
@click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=be_quiet, help="Show no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
def tpuconv(verbose: bool) -> None:
    """Convert Hugging Face checkpoints to sharded Orbax checkpoints for JAX, quantize them, and verify the result."""
    check_address_space()


def main() -> None:
    """The entry point of the command."""
    run(lambda: tpuconv.main(standalone_mode=False))
