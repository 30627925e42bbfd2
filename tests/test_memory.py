"""How much memory there is, and what happens where there is none."""

import errno
import json
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from helpers.attacks.counts import count
from helpers.attacks.processes import tpuconv
from helpers.checkpoints import hollow_checkpoint, qwen3_config, random_checkpoint
from helpers.conversions import plan_for
from tpuconv import memory
from tpuconv.commands.process import _known
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run import sizing
from tpuconv.errors import ResourceError
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.local_file import room_for


def group(folder: Path, names: tuple[str, str], limit: str, used: int, cache: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache}\n")


@pytest.mark.parametrize(
    ("listed", "top", "names", "cache"),
    [
        ("0::/jobs/one\n", ".", ("memory.max", "memory.current"), "inactive_file 30"),
        (
            "5:cpu:/other\n4:memory:/jobs/one\n0::/\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file 30",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limits_of_a_container_are_those_of_all_its_groups(listed, top, names, cache, tmp_path):
    """Without the page cache, which the system frees; a group may have no limit."""
    (tmp_path / "own").write_text(listed)
    root = tmp_path / "cgroup" / top
    group(root / "jobs" / "one", names, "1000", 130, cache)
    group(root / "jobs", names, "max" if top == "." else "9223372036854771712", 500, cache)
    group(root, names, "700", 600, cache)
    found = list(memory._limits_of_groups(tmp_path / "own", tmp_path / "cgroup"))
    assert [limits for limits in found if limits[0] < 1 << 60] == [(1000, 100), (700, 570)]


def test_a_group_that_is_not_seen_from_within_has_no_limit(tmp_path):
    (tmp_path / "own").write_text("0::/elsewhere\n")
    assert not list(memory._limits_of_groups(tmp_path / "own", tmp_path))
    assert not list(memory._limits_of_groups(tmp_path / "missing", tmp_path))


def test_a_run_uses_no_more_than_its_container_has(monkeypatch):
    monkeypatch.setattr(memory, "_limits_of_groups", lambda *_: [(10**9, 10**8)])
    available, total = memory.available_memory()
    assert (available <= 9 * 10**8, total) == (True, 10**9)
    assert sizing.Limits.of_this_machine().max_memory == 6 * 10**8
    monkeypatch.setattr(memory, "_limits_of_groups", lambda *_: [])
    assert memory.available_memory()[1] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("nbytes", [1 << 16, 8 << 20])
def test_memory_that_the_system_refuses_is_no_error_of_a_file(nbytes, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(MemoryError) as error:
        page_buffer(nbytes)
    assert isinstance(_known(error.value), ResourceError)


def test_the_memory_of_a_job_holds_what_it_reads(tmp_path):
    plan = plan_for(random_checkpoint(tmp_path, qwen3_config(hidden_size=256, intermediate_size=1024)), Options())
    largest = max(slab.nbytes for unit in plan.units for slab in unit.slabs)
    need = plan.buffers
    assert need.values == room_for(largest) > largest + mmap.PAGESIZE
    assert need.nbytes >= need.values + need.read + 2 * need.shard
    assert page_buffer(need.values).nbytes >= np.ceil(largest / mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.fixture(scope="module")
def larger_than_its_budget(tmp_path_factory) -> Path:
    """A checkpoint of 0.55 GB, most of it the embedding."""
    config = qwen3_config(vocab_size=128_000, hidden_size=2048, tie_word_embeddings=True, num_hidden_layers=1)
    base = tmp_path_factory.mktemp("large")
    tpuconv("convert", hollow_checkpoint(base / "hf", config), base / "ckpt", "--jobs", 2)
    return base / "ckpt"


def under(limit: int) -> str:
    """Code with which the process is in a control group of this limit."""
    return f"from tpuconv import memory; memory._limits_of_groups = lambda *_: [({limit}, 0)]"


def test_what_makes_tensors_divides_its_memory():
    """Among jobs and what waits to be written, as far as it goes; the last way is one tensor after the other."""

    def room(memory: int) -> sizing.TensorRoom:
        return sizing.room_for_tensors("x", sizing.Limits(4, sizing.BASE_MEMORY + 7 + memory), 100, 10**6, 7)

    assert [room(n) for n in (10**6, 650, 649, 200, 120)] == [
        *(sizing.TensorRoom(4, 250), sizing.TensorRoom(4, 250), sizing.TensorRoom(3, 200), sizing.TensorRoom(1, 100)),
        sizing.TensorRoom(1, 20),
    ]
    with pytest.raises(ResourceError, match="needs at least"):
        room(99)


@pytest.mark.slow
def test_an_export_stays_within_the_budget(larger_than_its_budget, tmp_path):
    """As a conversion does: 0.55 GB in 400 MB, interpreter and all. What is too little is refused, with what is not."""
    export = ("export", larger_than_its_budget, tmp_path / "out", "--json")
    done = json.loads(tpuconv(*export, "--max-memory", "400MB", fresh=True).stdout)
    assert done["bytes"] > 5e8
    assert done["peak_memory_bytes"] < 400e6
    refused = json.loads(tpuconv(*export, "--max-memory", "100MB", "--overwrite", code=8).stdout)
    least = re.search(r"--max-memory must be at least (\d+)MB", refused["error"]["hint"])
    assert least
    assert tpuconv(*export, "--max-memory", f"{least[1]}MB", "--overwrite")


@pytest.mark.slow
@pytest.mark.parametrize("limit", range(300_000_000, 1_000_000_000, 100_000_000))
def test_no_command_takes_more_than_its_container_has(limit, larger_than_its_budget, tmp_path):
    """It ends with exit code 8 before a weight is read, or within the limit."""
    source = tmp_path / "again"
    commands = (
        ("export", larger_than_its_budget, source),
        ("convert", larger_than_its_budget.parent / "hf", tmp_path / "ckpt"),
        ("convert", larger_than_its_budget.parent / "hf", tmp_path / "hf", "--target", "huggingface"),
    )
    for words in commands:
        done = tpuconv(*words, "--json", patch=under(limit), fresh=True, code=None)
        assert done.returncode in (0, 8)
        facts = json.loads(done.stdout)
        if done.returncode:
            assert "--max-memory must be at least" in facts["error"]["hint"]
            assert not words[2].exists()
        else:
            assert facts["peak_memory_bytes"] < limit
        count("memory of a container", f"{words[0]}: {'fits' if not done.returncode else 'refused'}")
