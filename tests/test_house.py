"""The house stands as it is drawn: imports point one way, one place prints, tools agree."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tpuconv"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# From the ground up: a room imports those that stand before it.
ORDER = (
    *("errors", "sizes", "text", "names", "jsonfile", "patterns", "private", "libtpu", "layout", "sharding"),
    *("storage", "sources", "encodings", "mapping", "checkpoint", "models", "convert", "quantize", "restore", "verify"),
    *("doctor", "cli", "__main__"),
)
HEAVY = {"jax", "flax", "orbax", "torch", "transformers"}


def imports(path: Path, everywhere: bool) -> set[str]:
    """The modules that a file imports; at its top level alone, or in its functions too."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    out = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            out |= names & set(MODULES) or {module}
    return out


def room(module: str) -> int:
    return ORDER.index(module.split(".")[1])


INSIDE = [module for module in MODULES if module != "tpuconv"]


@pytest.mark.parametrize("module", INSIDE)
def test_imports_point_one_way(module):
    others = {name for name in imports(MODULES[module], everywhere=True) if name.startswith("tpuconv.")}
    assert not {name for name in others if room(name) > room(module)}


def test_no_files_import_each_other_in_a_circle():
    """Not even in functions. TopologicalSorter raises CycleError, which names the files."""
    TopologicalSorter({m: imports(MODULES[m], everywhere=True) & set(INSIDE) - {m} for m in INSIDE}).prepare()


WITH_JAX = ("tpuconv.models.", "tpuconv.quantize.", "tpuconv.restore")


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith(WITH_JAX) or m == "tpuconv.quantize.config"])
def test_what_converts_needs_no_jax(module):
    top = {name.partition(".")[0] for name in imports(MODULES[module], everywhere=False)}
    assert not top & HEAVY


@pytest.mark.parametrize("module", [m for m in MODULES if m != "tpuconv.cli"])
def test_only_the_command_line_prints_and_exits(module):
    calls = [node.func for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    assert not names & {"print", "exit", "input"}
    assert not imports(MODULES[module], everywhere=True) & {"click", "rich"}


def test_the_readme_knows_every_option_of_the_commands():
    """An option that is not in the README is not there for a reader."""
    readme = (ROOT / "README.md").read_text()
    options = set(re.findall(r'@click\.option\(\s*"(--[\w-]+)"', (PACKAGE / "cli.py").read_text()))
    assert options
    assert not {option for option in options if option not in readme}


def test_the_readme_knows_every_family():
    from tpuconv.models.registry import FAMILIES

    readme = (ROOT / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in FAMILIES)


def test_every_exit_code_is_documented():
    from tpuconv import errors

    documented = set(re.findall(r"^\| (\d+)", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]
    assert {str(kind.exit_code) for kind in kinds} <= documented


def test_kernels_bring_no_scipy():
    """Numba would look for its BLAS, which takes longer than all kernels do to load."""
    program = """
import sys
import numpy as np
from tpuconv.encodings.kernels import transpose
words, at = np.arange(64, dtype=np.uint64), np.zeros(1, np.int64)
transpose(words, at, 8, np.zeros(512, np.uint8), at, 8, 8, 1)
assert "scipy.linalg" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
