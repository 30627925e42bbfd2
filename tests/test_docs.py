"""The documentation builds as a site: every page is in its navigation, every link leads somewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("text", ["[a](nothing.md)", "[a](exit-codes.md#nothing)", "[a](../tpuconv/nothing.py)"])
def test_a_link_to_nothing_is_an_error(text, tmp_path):
    for name in ("benchmarks", "examples", "tpuconv"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "json.md").open("a") as file:
        file.write(f"\n{text}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "nothing" in done.stdout + done.stderr
