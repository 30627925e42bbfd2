"""The example of CONTRIBUTING.md: Seed-OSS is taken out of a copy of the package and added again as the text says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.families import FIRST, save

ROOT = Path(__file__).parent.parent
NAME = "seed_oss"
EXAMPLE = (ROOT / "CONTRIBUTING.md").read_text().partition("### An example")[2].partition("\n## ")[0]
FILES = dict(re.findall(r"`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)```", EXAMPLE, re.DOTALL))
KEYS = "tpuconv/models/common/reference_keys.json"
DEFAULTS = "tpuconv/models/common/reference_defaults.json"
BEFORE = {
    "tpuconv/models/lineages/llama.py": "\nARCEE = decoder(",
    "tpuconv/models/families.py": "FAMILIES: Mapping[str, str] = {\n",
    "docs/models.md": "| `arcee` |",
}
"""Where a line is added to files that there are already: behind the first text, before the second."""


def written() -> Iterator[tuple[str, list[str]]]:
    """Each command of the example, and the lines that it prints in the text."""
    for block in re.findall(r"```console\n(.*?)```", EXAMPLE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield command, lines


def without_figures(text: str) -> str:
    """What a command prints, without what depends on the machine and on rounding, in single spaces. Which tests are
    skipped depends on what is installed, the unit of a size on the machine."""
    single = re.sub(r"[ \n]+", " ", re.sub(r"\d+ skipped, ", "", text))
    return re.sub(r"\d\S*", "0", re.sub(r"(?<=\d )[kMG]B\b", "B", single))


def test_the_files_of_the_example_are_those_of_the_package() -> None:
    assert len(FILES) == 4
    for name, text in FILES.items():
        there = (ROOT / name).read_text()
        assert text in there if name in BEFORE else text == there, name


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests without the family, and its release."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("tpuconv", "tests", "tools", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for name, text in FILES.items():
        if name in BEFORE:
            (folder / name).write_text((folder / name).read_text().replace(text, ""))
        else:
            (folder / name).unlink(missing_ok=True)
    keys = json.loads((folder / KEYS).read_text())
    del keys[NAME]
    (folder / KEYS).write_text(json.dumps(keys))
    (folder / DEFAULTS).write_text(re.sub(f'"{NAME}".*\n', "", (folder / DEFAULTS).read_text()))
    save(FIRST[NAME], folder / "release", "bfloat16")
    return folder


def add(folder: Path) -> None:
    """Writes the files of the example."""
    for name, text in FILES.items():
        path = folder / name
        if name in BEFORE:
            front, mark, rest = path.read_text().partition(BEFORE[name])
            text = front + (mark + text if mark.endswith("\n") else text + mark) + rest
        path.write_text(text)


@pytest.mark.slow
def test_the_example_ends_with_green_tests(package: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(package), "COLUMNS": "160"}
    for command, lines in written():
        if command.startswith("python tools"):
            add(package)
        program, *args = shlex.split(command)
        python = [sys.executable] if program == "python" else [sys.executable, "-m", program]
        done = subprocess.run([*python, *args], cwd=package, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        for line in lines:
            assert without_figures(line.strip()) in without_figures(done.stdout), f"{command}\n{line}\n{done.stdout}"
    for name in (KEYS, DEFAULTS):
        assert (package / name).read_text() == (ROOT / name).read_text()
