"""The command `tpuconv`: the group of all commands. Importing it imports neither numpy nor jax."""

import click

from tpuconv.commands import options
from tpuconv.commands.benchmark import benchmark
from tpuconv.commands.compare import compare
from tpuconv.commands.convert import convert
from tpuconv.commands.doctor import doctor
from tpuconv.commands.export import export
from tpuconv.commands.families import families
from tpuconv.commands.fit import fit
from tpuconv.commands.generate import generate
from tpuconv.commands.inspect import inspect
from tpuconv.commands.process import run
from tpuconv.commands.push import push
from tpuconv.commands.quantize import quantize
from tpuconv.commands.recipe import recipe
from tpuconv.commands.reshard import reshard
from tpuconv.commands.verify import verify
from tpuconv.memory import check_address_space


@click.group(cls=options.Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tpuconv")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
def tpuconv(verbose: bool) -> None:
    """Convert Hugging Face checkpoints to sharded Orbax checkpoints for JAX, quantize them, and verify the result."""
    check_address_space()


for command in (
    *(recipe, convert, quantize, verify, compare, benchmark, fit),
    *(generate, export, reshard, push, inspect, families, doctor),
):
    tpuconv.add_command(command)


def main() -> None:
    """The entry point of the command."""
    run(lambda: tpuconv.main(standalone_mode=False))
