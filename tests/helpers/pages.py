"""Runs the commands and programs of a page, as a user runs them: each in a process of its own, with small models on a
Hub of this machine under the names that the page has."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import EXAMPLE, SAMPLE
from helpers.families import save
from helpers.hub_server import HubServer
from helpers.quantizing import ONE_OF_EACH

CHAT = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. A block with a title is for another machine or program, and is not run."""

    language: str
    title: str
    text: str

    def commands(self) -> list[str]:
        """The lines that begin with a program, without comments; a line that ends with a backslash goes on."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for each in lines if (line := each.partition(" #")[0].strip()) and not line.startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


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


@contextmanager
def reading(base: Path) -> Iterator[Path]:
    """Yields a folder to run pages in. Small models are on the Hub under the names that pages have."""
    shutil.copytree(EXAMPLE, base / "qwen3")
    hub = {
        "Qwen/Qwen3-8B": with_tokenizer(base / "qwen3"),
        "deepseek-ai/DeepSeek-R1": saved("deepseek_v3", base / "r1"),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": saved("qwen3_next", base / "next"),
        "Qwen/Qwen3-235B-A22B": saved("qwen3_moe", base / "moe", hidden_size=512, moe_intermediate_size=512),
        "meta-llama/Llama-3.3-70B-Instruct": saved("llama", base / "llama"),
    }
    work = base / "work"
    work.mkdir()
    shutil.copy(SAMPLE, work / "wiki.txt")
    with HubServer(hub) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HOME", str(base / "hf-home"))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("XLA_FLAGS", EIGHT_DEVICES)
        yield work


def run(args: list[str], folder: Path) -> str:
    """Runs a program in a process of its own, which reads the environment of this test."""
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{args}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_command(line: str, folder: Path) -> str:
    """Runs a line of a shell that begins with `tpuconv`."""
    assert line.startswith("tpuconv "), line
    return run(["bash", "-c", f"{sys.executable} -m {line}"], folder)


SESSION = """
import json, sys
names = {}
for line in sys.stdin:
    exec(json.loads(line), names)
    print(json.dumps("done"), flush=True)
"""


class Session:
    """A Python process that runs blocks one after the other, with the names of earlier ones."""

    def __init__(self, folder: Path):
        self.said = folder / "session.log"
        with self.said.open("w") as log:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process = subprocess.Popen([sys.executable, "-c", SESSION], cwd=folder, **pipes)

    def run(self, text: str) -> None:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps(text) + "\n")
        stdin.flush()
        for line in stdout:
            if line == '"done"\n':
                return
        raise AssertionError(f"{text}\n{self.said.read_text()}")

    def close(self) -> None:
        self.process.communicate()


def parse(line: str) -> None:
    """Parses a command of tpuconv, without running it. Raises click.ClickException for an unknown option."""
    from tpuconv.cli import tpuconv

    name, *args = shlex.split(line)[1:]
    tpuconv.command_of(name).make_context(name, args)
