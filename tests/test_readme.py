"""The packaged configs and the examples of the README, run as a user runs them: commands in processes of their own,
with the installed version of jax."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import EXAMPLE, SAMPLE, tpuconv
from helpers.families import save
from helpers.hub_server import HubServer
from helpers.quantizing import ONE_OF_EACH
from tpuconv.quantize.config import config_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
OF_128 = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2}
MADE_FOR = {
    "mxfp4_weight_only": ("qwen3_moe", {}),  # experts
    "fp8_block": ("qwen3", OF_128),
    "int4_128": ("qwen3", OF_128),
}
"""Configs that do not fit the example, and a tiny model that each fits."""
SMALL = ("--prompt-length", "8", "--new-tokens", "4", "--repeats", "1")

pytestmark = pytest.mark.slow


def with_tokenizer(folder: Path) -> Path:
    """The folder with the tokenizer of the example and a chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def saved(family: str, folder: Path, **sizes: Any) -> Path:
    """A tiny model of this family with the tokenizer of the example."""
    case = ONE_OF_EACH[family]
    vocabulary = json.loads((EXAMPLE / "config.json").read_text())["vocab_size"]
    case = replace(case, config={**case.config, "vocab_size": vocabulary, "max_position_embeddings": 512, **sizes})
    return with_tokenizer(save(case, folder, "bfloat16"))


@pytest.mark.parametrize("config", config_names())
def test_every_packaged_config_from_the_source_to_text(config: str, tmp_path: Path) -> None:
    source = EXAMPLE
    if config in MADE_FOR:
        family, sizes = MADE_FOR[config]
        source = saved(family, tmp_path / "source", **sizes)
    tpuconv("convert", source, "out", "--quantize", config, cwd=tmp_path)
    tpuconv("verify", "out", cwd=tmp_path)
    checked = tpuconv("verify", "out", "--compare-hf", "--json", cwd=tmp_path)
    assert json.loads(checked.stdout)["passed"]
    text = json.loads(
        tpuconv(
            "generate", "out", "--prompt", "In the beginning", "--max-new-tokens", "8", "--json", cwd=tmp_path
        ).stdout
    )
    timed = json.loads(tpuconv("benchmark", "out", *SMALL, "--json", cwd=tmp_path).stdout)
    assert len(text["ids"]) == 8
    assert timed["timings"][0]["step_seconds"] > 0


def commands() -> list[str]:
    """The commands of the README, in their order."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines() if "tpuconv " in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to run the README in. Small models are on the Hub under the names that the README has."""
    base = tmp_path_factory.mktemp("readme")
    shutil.copytree(EXAMPLE, base / "qwen3")
    hub = {
        "Qwen/Qwen3-8B": with_tokenizer(base / "qwen3"),
        "deepseek-ai/DeepSeek-R1": saved("deepseek_v3", base / "r1"),
        "meta-llama/Llama-3.3-70B-Instruct": saved("llama", base / "llama"),
    }
    work = base / "work"
    work.mkdir()
    shutil.copy(SAMPLE, work / "wiki.txt")
    with HubServer(hub) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HOME", str(base / "hf-home"))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        yield work


def run(args: list[str], folder: Path) -> str:
    """Runs a program in a process of its own, which reads the environment of this test."""
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{args}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_command_of_the_readme_runs_in_its_order(folder: Path) -> None:
    said = {line: run([sys.executable, "-m", *shlex.split(line)], folder) for line in commands()}
    assert len(said) == 11
    made = {path.name for path in folder.iterdir()}
    assert {"Qwen3-8B-orbax", "DeepSeek-R1-orbax", "DeepSeek-R1-orbax-int8_default", "Qwen3-8B-orbax-recipe"} <= made
    assert {"recipe.yaml", "recipe.html"} <= made


BEFORE = """
import jax.numpy as jnp
ids_BT = jnp.array([[3, 1, 4]])
"""


def test_the_python_of_the_readme_runs(folder: Path) -> None:
    if not (folder / "Qwen3-8B-orbax").exists():
        run([sys.executable, "-m", "tpuconv", "convert", "Qwen/Qwen3-8B"], folder)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    text = BEFORE + "\n".join(blocks).replace("/data/", f"{folder}/")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    run([sys.executable, "-c", text + "\nprint(completions[0].text)"], folder)
    assert (folder / "Qwen3-8B-tuned").is_dir()
