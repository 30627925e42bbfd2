"""Private interfaces of other packages: each exists in the installed versions, and is listed in one table."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
import qwix

from tpuconv import private

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("tpuconv", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
OWN = {"tpuconv", *(path.stem for path in FILES)}


@pytest.mark.parametrize("name", private.INTERFACES)
def test_every_entry_exists(name):
    interface = private.INTERFACES[name]
    assert getattr(private, name) is interface.load()
    assert interface.why.endswith(".")


def test_a_name_that_is_no_entry_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no entry 'qarray2'"):
        private.qarray2  # noqa: B018


def test_what_qwix_providers_have_besides_attributes_of_the_class():
    assert qwix.PtqProvider([qwix.QuantizationRule()])._rule_matches == [0]
    assert "_einsum_fn" in inspect.signature(qwix.PtqProvider).parameters


def test_the_versions_tested_are_those_of_the_constraints():
    pinned = re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for package, versions in private.TESTED.items():
        assert set(versions) == {version for name, version in pinned if name == package}


def test_packages_with_private_interfaces_have_an_upper_bound():
    ranges = {re.split(r"[^\w-]", each)[0]: each for each in requires("tpuconv") or ()}
    assert all("<" in ranges[package] for package in private.TESTED)
    modules = {interface.module.partition(".")[0] for interface in private.INTERFACES.values()}
    assert modules == {package.partition("-")[0] for package in private.TESTED}


def test_nothing_private_is_imported_elsewhere():
    """Neither a module or name with an underscore, nor a module that an entry comes from."""
    with_public_names = {"qwix", "huggingface_hub.utils", "transformers.conversion_mapping"}
    modules = {interface.module for interface in private.INTERFACES.values()} - with_public_names
    names = {(each.module, each.attribute) for each in private.INTERFACES.values()}
    faults = []
    for path in FILES:
        for module, name in imported(ast.parse(path.read_text())):
            parts = [*module.split("."), name]
            hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if module.partition(".")[0] not in OWN and (hidden or module in modules or (module, name) in names):
                faults.append((str(path.relative_to(ROOT)), module, name))
    assert not faults


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules and names of them that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def test_the_table_alone_imports_none_of_them():
    code = "import sys, tpuconv.private; print({'qwix', 'transformers', 'huggingface_hub', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
