"""The packaged configs and the examples of the README, run as a user runs them: commands in processes of their own,
with the installed version of jax."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.commands import EXAMPLE, tpuconv
from helpers.pages import Session, blocks_of, reading, run, run_command, saved
from tpuconv.quantize.config import config_names, find_config

ROOT = Path(__file__).parent.parent
README, QUANTIZATION = ROOT / "README.md", ROOT / "docs" / "quantization.md"
OF_128 = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2}
MADE_FOR = {
    "mxfp4_weight_only": ("qwen3_moe", {}),  # experts
    "fp8_block": ("qwen3", OF_128),
    "int4_128": ("qwen3", OF_128),
    "tpu_v7": ("qwen3_moe", {"hidden_size": 512, "moe_intermediate_size": 512}),
}
"""Configs that do not fit the example, and a tiny model that each fits."""
SMALL = ("--prompt-length", "8", "--new-tokens", "4", "--repeats", "1")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("config", config_names())
def test_every_packaged_config_from_the_source_to_text(config: str, tmp_path: Path) -> None:
    source = EXAMPLE
    if config in MADE_FOR:
        family, sizes = MADE_FOR[config]
        source = saved(family, tmp_path / "source", **sizes)
    if find_config(config).calibration is None:
        tpuconv("convert", source, "out", "--quantize", config, cwd=tmp_path)
    else:
        tpuconv("quantize", source, "out", "--config", config, "--samples", "16", cwd=tmp_path)
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


def commands(page: Path) -> list[str]:
    """The commands of tpuconv on a page, in their order."""
    found = [line for block in blocks_of(page) if block.language == "bash" for line in block.commands()]
    return [line for line in found if line.startswith("tpuconv ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to run the README in."""
    with reading(tmp_path_factory.mktemp("readme")) as work:
        yield work


def test_every_command_of_the_readme_runs_in_its_order(folder: Path) -> None:
    said = [run_command(line, folder) for page in (README, QUANTIZATION) for line in commands(page)]
    assert len(said) == 16
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
    session = Session(folder)
    session.run(BEFORE)
    for block in blocks_of(README):
        if block.language == "python":
            session.run(block.text.replace("/data/", f"{folder}/"))
    session.run("assert completions[0].text")
    session.close()
    assert (folder / "Qwen3-8B-tuned").is_dir()
