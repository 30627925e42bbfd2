"""The documentation builds as a site: every page is in its navigation, and every link has a target."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tpuconv.models.families import FAMILIES

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
ROOT = Path(__file__).parent.parent


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_site_builds_and_needs_no_network(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert "<h1" in page
    assert "fonts.g" not in page
    assert (tmp_path / "site" / "contributing.html").is_file()
    assert not list((tmp_path / "site").glob("*.py"))
    assert 'href="getting-started.html"' in page
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())["cells"]
    shown = unescape(re.sub("<[^>]+>", "", (tmp_path / "site" / "getting-started.html").read_text()))
    assert all(line in shown for cell in notebook for text in cell["source"] for line in re.findall(r"\w{4,}", text))


def test_links_to_nothing_are_errors(tmp_path):
    for name in ("benchmarks", "examples", "tpuconv"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "json.md").open("a") as file:
        file.write("\n[a](nothing.md) [b](exit-codes.md#none) [c](../tpuconv/no.py)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert all(target in said for target in ("nothing.md", "exit-codes.md#none", "../tpuconv/no.py"))


def test_the_number_of_families_in_the_readme_is_right():
    said = re.search(r"^(\d+) families are supported", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert said is not None
    assert int(said[1]) == len(FAMILIES)


def test_the_picture_is_made_of_what_commands_print_and_no_figure_of_the_run():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec
    assert spec.loader
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    said = "\x1b[1mtiny\x1b[0m: 3.21 MB in {} s ({} kB/s), peak memory {} MB\n"
    assert picture.render(said.format(6.5, 493, 159)) == picture.render(said.format(7.1, 88, 1.2))
    assert picture.render(said) != picture.render(said.replace("3.21", "3.22"))
    svg = picture.PICTURE.read_text()
    assert all(command.split()[1] in svg for command in picture.COMMANDS)
    assert "@font-face" not in svg
    assert set(re.findall(r"https?://[^\"\s]+", svg)) == {"http://www.w3.org/2000/svg"}
