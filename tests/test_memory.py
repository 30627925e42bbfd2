"""How much memory there is, and what happens where there is none."""

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import qwen3_config, random_checkpoint
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
    need = sizing.buffers(plan)
    assert need.values == room_for(largest) > largest + mmap.PAGESIZE
    assert need.nbytes >= need.values + need.read + 2 * need.shard
    assert page_buffer(need.values).nbytes >= np.ceil(largest / mmap.PAGESIZE) * mmap.PAGESIZE
