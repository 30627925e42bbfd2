"""The pages of docs/tasks: every block is run as it stands, on small models. A block with a title is for another
machine or program: its commands of tpuconv are parsed, its Python is compiled, and a stand-in makes what it leaves
behind."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.commands import EXAMPLE, SAMPLE
from helpers.pages import Session, blocks_of, parse, reading, run_command
from tpuconv.names import MANIFEST

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))
MOST_LINES = 90
"""The most lines of a page: a screen and a half, with blank lines."""


def trainers_run(made: Path, run: Path) -> None:
    """A run of a trainer, which has the arrays of a conversion and no manifest."""
    shutil.copytree(made, run, ignore=shutil.ignore_patterns(MANIFEST))


def trained_in_maxtext(work: Path) -> None:
    trainers_run(work / "Qwen3-8B-maxtext" / "0", work / "runs" / "sft" / "checkpoints" / "400")


def trained_in_tunix(work: Path) -> None:
    """A run of all parameters, and one with LoRA, whose pairs come from an adapter."""
    trainers_run(work / "Qwen3-8B-tunix", work / "runs" / "sft")
    save_adapter(work / "first")
    run_command("tpuconv convert Qwen/Qwen3-8B tree --target tunix --adapter first --keep-adapter", work)
    trainers_run(work / "tree", work / "runs" / "lora")


def save_adapter(folder: Path) -> None:
    """An adapter of PEFT for the queries of the example, with random values."""
    config = json.loads((EXAMPLE / "config.json").read_text())
    inputs, outputs = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(0, 0.1, (4, inputs)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.1, (outputs, 4)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


STAND_INS: dict[tuple[str, int], Callable[[Path], None]] = {
    ("maxtext", 1): trained_in_maxtext,
    ("tunix", 1): trained_in_tunix,
}
"""What stands for running a titled block, by page and number of the block."""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    with reading(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_exists(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "wiki.txt")  # files of texts must exist
    blocks = blocks_of(page)
    assert blocks
    assert len(page.read_text().splitlines()) <= MOST_LINES
    for block in blocks:
        if block.language == "python":
            compile(block.text, str(page), "exec")
        for line in block.commands() if block.language == "bash" else ():
            assert block.title or line.startswith("tpuconv "), line
            if found := re.search(r"tpuconv .*", line):
                parse(found[0].partition(" > ")[0].removesuffix('"' if f'"{found[0]}' in line else ""))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, work: Path) -> None:
    session, titled = Session(work), 0
    for block in blocks_of(page):
        if block.title:
            titled += 1
            STAND_INS.get((page.stem, titled), lambda folder: None)(work)
        elif block.language == "bash":
            for line in block.commands():
                run_command(line, work)
        else:
            session.run(block.text)
    session.close()
