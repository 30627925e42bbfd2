"""What installs an optional package: tpuconv again, from where it came from."""

import json
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tpuconv.commands.process import _known
from tpuconv.extras import EXTRAS, install_command

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'tpuconv[hf]'"),
        ("[]", "pip install 'tpuconv[hf]'"),
        ("{", "pip install 'tpuconv[hf]'"),
        ({"url": "file:///home/me/tpuconv", "dir_info": {}}, "pip install '/home/me/tpuconv[hf]'"),
        (
            {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}},
            "pip install -e '/home/me/my clone[hf]'",
        ),
        (
            {"url": "file:///tmp/tpuconv-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/tpuconv-0.1.0-py3-none-any.whl[hf]'",
        ),
        (
            {"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'tpuconv[hf] @ git+https://example.org/x.git@abc'",
        ),
        ({"url": "https://example.org/x.whl", "archive_info": {}}, "pip install 'tpuconv[hf] @ https://example.org/x.whl'"),
    ],
)  # fmt: skip
def test_the_command_names_where_tpuconv_came_from(noted, command, monkeypatch):
    text = noted if noted is None or isinstance(noted, str) else json.dumps(noted)
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert install_command("hf") == command


def test_a_package_that_is_absent_is_no_bug():
    error = _known(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert (error.exit_code, error.hint) == (2, f"install it: {install_command('hf')}")
    assert "this is a bug" in str(_known(ModuleNotFoundError("No module named 'nnx'", name="nnx")).hint)


def test_every_extra_is_one_of_the_distribution():
    assert set(EXTRAS.values()) <= set(metadata.metadata("tpuconv").get_all("Provides-Extra"))


@pytest.mark.slow
def test_pip_takes_the_command(tmp_path):
    """As it is printed in an environment that was installed from a folder."""
    clone, site = tmp_path / "a clone", tmp_path / "site"
    clone.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "tpuconv", clone / "tpuconv")
    quiet = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "install")
    subprocess.run([*pip, *quiet, "--target", site, clone], check=True, capture_output=True)
    code = "from tpuconv.extras import install_command; print(install_command('hf'))"
    env = {"PYTHONPATH": str(site)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    words = shlex.split(found.stdout)
    assert words[:2] == ["pip", "install"]
    assert str(clone) in words[2]
    done = subprocess.run([*pip, *quiet, "--dry-run", *words[2:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
