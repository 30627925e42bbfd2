"""Local files that are read around the page cache, and how often each byte of a source comes from the disk."""

import fcntl
import os
import resource
from contextlib import closing
from io import FileIO
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoints import qwen3_config, random_checkpoint, source_shapes, write_checkpoint
from helpers.conversions import PLAIN, plan_for
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.sizing import Limits
from tpuconv.sources.source import open_source
from tpuconv.storage.disk import page_buffer, write_file
from tpuconv.storage.journal import Journal
from tpuconv.storage.local_file import LocalFile, room_for


def local_file(path: Path) -> LocalFile:
    file = LocalFile(FileIO(path))
    file.avoid_cache()
    return file


def test_what_is_in_the_page_cache_is_read_from_there(tmp_path, monkeypatch):
    """Any part of a file that is in the cache, and all else around it: nothing is brought there."""
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    write_file(tmp_path / "file", data)
    file, directly, pread = local_file(tmp_path / "file"), [], os.preadv

    def preadv(fd, buffers, offset):
        directly.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return pread(fd, buffers, offset)

    file.forget()
    monkeypatch.setattr(os, "preadv", preadv)
    for start, stop in [(5, 70_000), (2 << 20, 3 << 20), ((3 << 20) - 1, 3 << 20)]:
        assert file.read(start, stop).tobytes() == data[start:stop].tobytes()
        assert not file.is_cached(start, stop)
    assert all(directly)
    pread(file.fd, [bytearray(1 << 20)], 1 << 20)
    assert file.read((1 << 20) + 7, 2 << 20).tobytes() == data[(1 << 20) + 7 : 2 << 20].tobytes()
    assert not directly[-1]
    file.read(0, 1 << 20)
    assert directly[-1]
    file.close()


def test_a_file_that_ends_early_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 << 20))
    file = local_file(tmp_path / "file")
    with pytest.raises(ValueError, match="file is too short"):
        file.read(5, (2 << 20) + 1)
    os.truncate(tmp_path / "file", 1 << 20)
    with pytest.raises(ValueError, match="file became shorter while it was read"):
        file.read(5, 2 << 20)
    file.close()


def test_what_is_read_again_leaves_the_cache_then(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    write_file(tmp_path / "file", data)
    file = local_file(tmp_path / "file")
    file.forget()
    assert file.read(5, 1 << 20, again=True).tobytes() == data[5 : 1 << 20].tobytes()
    assert file.is_cached(0, 1 << 20)
    assert not file.is_cached(1 << 20, 3 << 20)
    for start, stop in [(5, 1 << 19), (1 << 19, 2 << 20)]:
        assert file.read(start, stop).tobytes() == data[start:stop].tobytes()
    assert not file.is_cached(0, 3 << 20)
    file.close()


def test_of_a_file_of_another_user_the_system_does_not_tell_what_is_cached(tmp_path, monkeypatch):
    write_file(tmp_path / "file", np.zeros(2 << 20, np.uint8))
    (tmp_path / "file").read_bytes()
    with closing(local_file(tmp_path / "file")) as file:
        assert file.is_cached(0, file.size)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with closing(local_file(tmp_path / "file")) as file:
        assert not file.is_cached(0, file.size)


def test_bytes_are_read_to_the_memory_that_is_given(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (2 << 20) + 99, np.uint8)
    write_file(tmp_path / "file", data)
    with closing(local_file(tmp_path / "file")) as file:
        for start, stop in [(0, 1), (4095, 4097), (5, 5 + (1 << 20)), (data.size - 1, data.size), (0, data.size)]:
            memory = page_buffer(room_for(stop - start))
            found = file.read(start, stop, memory)
            assert found.base is not None
            assert np.shares_memory(found, memory)
            assert found.tobytes() == data[start:stop].tobytes()


def test_few_descriptors_are_kept_for_the_files_themselves(tmp_path, monkeypatch):
    """Around the cache each file needs two."""
    source = open_source(random_checkpoint(tmp_path, qwen3_config(hidden_size=256, intermediate_size=1024)))
    info = max(source.tensors.values(), key=lambda info: info.nbytes)
    opened = []
    monkeypatch.setattr(LocalFile, "avoid_cache", lambda file: opened.append(file.name))
    for limit, want in [(5, [info.shard]), (4, [])]:
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        with closing(source.open()) as reader:
            reader.read(info, 0, memoryview(bytearray(info.nbytes)))
        assert opened == want
        opened.clear()


# -- each byte once ---------------------------------------------------------------------------------------------------

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
DENSE = qwen3_config(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)


def release(folder: Path, config: dict, shards: int) -> Path:
    """A checkpoint whose tensors are in the order of their names, as in releases."""
    values = np.random.default_rng(0).integers(0, 60, 1 << 18, np.uint8).view(ml_dtypes.bfloat16)
    shapes = source_shapes(config)
    return write_checkpoint(folder, config, {name: np.resize(values, shapes[name]) for name in sorted(shapes)}, shards)


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_from_disk(folder: Path, out: Path, jobs: int, options: Options = PLAIN) -> int:
    """Converts a source that is in no cache. Returns how many bytes came from a disk; 0 where there is none."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    plan = plan_for(folder, options)
    before = bytes_from_disk()
    for _ in run(plan, out, Limits(jobs, 1 << 40)):
        pass
    return bytes_from_disk() - before


def bytes_from_disk() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["experts", "dense"])
def test_each_byte_comes_from_the_disk_once(config, jobs, tmp_path):
    """But for pages that two tensors share; though files are hashed from start to end, and experts are needed
    projection by projection."""
    folder = release(tmp_path / "hf", config, 1)
    read_from_disk(folder, tmp_path / "before", jobs)  # and with it modules and compiled loops
    assert read_from_disk(folder, tmp_path / "out", jobs) < 1.3 * stored_bytes(folder)


def test_a_resumed_run_reads_what_is_left(tmp_path, monkeypatch):
    """Not files whose hashes are known. So few bytes are counted where they are read: the system's count has pages of
    modules too."""
    monkeypatch.setattr(sizes, "SLAB_BYTES", 2 << 20)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 8 << 20)
    folder, options = release(tmp_path / "hf", DENSE, 4), Options(scan_layers=True)
    wide = {unit.uid: unit.nbytes for unit in plan_for(folder, options).units if unit.is_wide}
    record, preadv, nbytes = Journal.record, os.preadv, []

    def stopped(journal, *entry):
        if entry[0] in wide:
            raise InterruptedError
        record(journal, *entry)

    def counted(fd, *place):
        n = preadv(fd, *place)
        if Path(f"/proc/self/fd/{fd}").readlink().parent == folder:
            nbytes.append(n)
        return n

    monkeypatch.setattr(Journal, "record", stopped)
    monkeypatch.setattr(os, "preadv", counted)
    with pytest.raises(InterruptedError):
        read_from_disk(folder, tmp_path / "out", 2, options)
    assert sum(nbytes) > 0.9 * stored_bytes(folder)
    monkeypatch.setattr(Journal, "record", record)
    assert len(list((tmp_path / ".out.tpuconv").glob("hash-*.done"))) == 4
    nbytes.clear()
    read_from_disk(folder, tmp_path / "out", 2, options)
    assert 0.9 * sum(wide.values()) < sum(nbytes) < 1.1 * sum(wide.values()) < 0.5 * stored_bytes(folder)
