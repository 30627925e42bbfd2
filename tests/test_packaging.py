"""The distributions: sdist and wheel are built without network, and the wheel works in an empty environment."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MOST_BYTES = 3_000_000
"""The largest size of the wheel."""
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "tpuconv")


def run(*args, **options) -> str:
    done = subprocess.run(list(map(str, args)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made of a copy: what an earlier build left in the repository must not get into them."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)  # the wheel of the sdist
    return folder


def test_what_is_inside(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = set(ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "tpuconv").rglob("*") if path.suffix in (".py", ".pyi", ".yaml", ".json", ".txt")]
    own = {path.relative_to(ROOT).as_posix() for path in files}
    assert own | {"tpuconv/py.typed"} == {name for name in names if name.startswith("tpuconv/")}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        assert {f"{sdist.name.removesuffix('.tar.gz')}/{name}" for name in SOURCES[:3]} <= set(archive.getnames())


def test_the_wheel_works_by_itself(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--target", site, wheel)
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    found = run(sys.executable, "-c", "import tpuconv; print(tpuconv.__file__)", cwd=tmp_path, env=env)
    assert Path(found.strip()) == site / "tpuconv" / "__init__.py"
    command = site / "bin" / "tpuconv"
    assert version("tpuconv") in run(command, "--version", cwd=tmp_path, env=env)
    assert "convert" in run(command, "--help", cwd=tmp_path, env=env)
    assert "int8_default" in run(command, "quantize", "--list", cwd=tmp_path, env=env)


def test_the_wheel_is_small(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_wheel_is_installed_with_its_dependencies(python, built, tmp_path):
    """As a user installs it, from the index that pip is set to."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    program = sys.executable if python == here else shutil.which(f"python{python}")
    if program is None or subprocess.run([program, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no python{python} here")  # a name in PATH may be a shim of pyenv for a missing one
    (wheel,) = built.glob("*.whl")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    run(program, "-m", "venv", tmp_path / "venv", env=env)
    bin = tmp_path / "venv" / "bin"
    run(bin / "python", "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path, env=env)
    assert "convert" in run(bin / "tpuconv", "--help", cwd=tmp_path, env=env)
    items = json.loads(run(bin / "tpuconv", "doctor", "--offline", "--json", cwd=tmp_path, env=env))["items"]
    found = {item["name"]: item for item in items}
    assert found["python"]["facts"]["version"].startswith(python)
    assert {found[name]["status"] for name in ("python", "jax", "flax", "qwix", "devices")} == {"ok"}


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has(path):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    made = [command.split()[1] for command in commands if command.startswith("make ")]
    assert made
    assert set(made) <= set(targets)


def test_a_tag_is_released_with_its_section_of_the_changelog():
    notes = runpy.run_path(str(ROOT / "tools" / "release_notes.py"), run_name="notes")["release_notes"]
    text = (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- This.\n\n## [0.1.0]\n\n- That.\n"
    )
    assert notes("v0.2.0", text, "0.2.0") == "### Added\n\n- This.\n"
    assert notes("v0.1.0", text, "0.1.0") == "- That.\n"
    for tag, wanted, message in (("v0.2.0", "0.1.0", "is not v0.1.0"), ("v0.3.0", "0.3.0", "has no section")):
        with pytest.raises(ValueError, match=message):
            notes(tag, text, wanted)
