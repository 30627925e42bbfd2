"""Shard files: read as TensorStore reads them, and every damaged bit is detected."""

import json
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuconv.checkpoint import frames
from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import read_box
from tpuconv.checkpoint.shard_files import LocalShard
from tpuconv.checkpoint.shards import ShardBuilder
from tpuconv.checkpoint.stored import StoredArray
from tpuconv.convert.plan.types import OutputArray
from tpuconv.convert.run.store import Store
from tpuconv.errors import CorruptOutput
from tpuconv.storage import local_file as local_files
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.hashes import hash_bytes
from tpuconv.storage.local_file import LocalFile
from tpuconv.storage.sealed import MANIFEST_FORMAT, Sealed
from tpuconv.storage.sinks import FolderSink

DTYPES = ["int4", "float4_e2m1fn", "uint8", "int8", "bfloat16", "float8_e4m3fn", "float32", "float64"]


@dataclass
class Case:
    """An array "w", how it is cut, and a box of it."""

    array: OutputArray
    box: tuple[slice | int, ...]
    read_bytes: int
    """Read at once."""
    block_bytes: int
    """In a block of a chunk of zarr's format 2."""
    direct: bool
    """Whether around the page cache, which is for larger files otherwise."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    chunks = tuple(draw(st.integers(1, n)) for n in shape)
    shards = tuple(c * draw(st.integers(1, 4)) for c in chunks)
    dtype = np.dtype(getattr(ml_dtypes, name, name) if (name := draw(st.sampled_from(DTYPES))) else None)
    box: list[slice | int] = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        first = draw(st.integers(0, n - 1))
        box.append(first if draw(st.booleans()) else slice(first, draw(st.integers(first, n))))
    read_bytes = draw(st.sampled_from([1, 40, 1 << 20]))
    form = draw(st.sampled_from(["plain", "compressed", "zarr2"]))
    array = OutputArray(shape, dtype, shards, chunks, "w", "", (), compressed=form == "compressed")
    if form == "zarr2":
        array = replace(array, shards=chunks, zarr2=True)
    return Case(array, tuple(box), read_bytes, draw(st.sampled_from([5, 16, 1 << 17])), draw(st.booleans()))


def write(array: OutputArray, folder: Path, values: np.ndarray) -> Manifest:
    store, buffer = Store(FolderSink(folder), "params", {"w": array}), page_buffer(array.shard_bytes)
    store.make_folders()
    metadata = json.dumps(array.metadata()).encode()
    (folder / "params" / "w" / array.metadata_name).write_bytes(metadata)
    bits = values.view(f"u{values.itemsize}")
    for index in product(*map(range, array.grid)):
        shard = ShardBuilder(array, index, buffer)
        for slot, start in shard.chunks():
            part = bits[tuple(slice(a, a + c) for a, c in zip(start, array.chunks, strict=True))]
            chunk = shard.place(slot, bits.dtype)
            chunk[...] = 0
            chunk[tuple(map(slice, part.shape))] = part
            shard.close_chunk(slot)
        store.write("w", shard)
    stored = StoredArray(
        "w",
        array.shape,
        array.dtype.name,
        "",
        array.chunks,
        (),
        "",
        False,
        array.shards if array.zarr2 else None,
        None,
        () if array.compressed else None,
        array.zarr2,
    )
    facts = {"format": 1}  # which says nothing about files; it has no format 2 of zarr
    if array.zarr2:
        facts = {"format": MANIFEST_FORMAT, "files": {f"params/w/{array.metadata_name}": hash_bytes(metadata)}}
    return Manifest(folder, Sealed(facts, None, None), {"w": stored})


def random(array: OutputArray) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 256, prod(array.shape) * array.dtype.itemsize, np.uint8)
    if array.dtype.name == "int4":
        bits = (bits % 16 ^ 8) - np.uint8(8)  # a byte each, with their sign
    elif array.dtype.name == "float4_e2m1fn":
        bits %= 16
    return bits.view(array.dtype).reshape(array.shape)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_any_box_is_what_tensorstore_reads(case):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalShard, "read_bytes", case.read_bytes)
        patch.setattr(frames, "RAW_BLOCK_BYTES", case.block_bytes)
        if case.direct:
            patch.setattr(local_files, "DIRECT_BYTES", 0)
            patch.setattr(LocalFile, "is_cached", lambda *_: False)  # they were written a moment ago
        manifest = write(case.array, Path(name), random(case.array))
        driver = "zarr" if case.array.zarr2 else "zarr3"
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{name}/params/w"}}
        want = ts.open(spec).result()[case.box].read().result()
        have = np.zeros(want.shape, case.array.dtype)
        read_box(manifest, "w", case.box, have)
        assert have.tobytes() == want.tobytes()


SMALL = OutputArray((5, 6), np.dtype("u2"), (4, 6), (2, 3), "w", "", ())
COMPRESSED = replace(SMALL, compressed=True)
ZARR2 = replace(SMALL, shards=SMALL.chunks, zarr2=True)
ALL = (slice(0, 5), slice(0, 6))


@pytest.mark.parametrize("array", [SMALL, COMPRESSED, ZARR2], ids=["plain", "compressed", "zarr2"])
def test_every_bit_is_checked(tmp_path, array, monkeypatch):
    """Of chunks, of the index and of their checksums; and every byte that is lost at the end."""
    monkeypatch.setattr(frames, "RAW_BLOCK_BYTES", 5)
    manifest, out = write(array, tmp_path, random(SMALL)), np.empty((5, 6), "u2")
    for index in product(*map(range, array.grid)):
        path = tmp_path / "params" / "w" / array.shard_name(index)
        data = path.read_bytes()
        for bit in range(8 * len(data)):
            path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
            with pytest.raises(CorruptOutput, match=r"params/w cannot be read: .* does not hold its checksum"):
                read_box(manifest, "w", ALL, out)
        for size in range(len(data)):
            path.write_bytes(data[:size])
            with pytest.raises(CorruptOutput, match=r"params/w cannot be read: "):
                read_box(manifest, "w", ALL, out)
        path.write_bytes(data)
    read_box(manifest, "w", ALL, out)
    assert (out == random(SMALL)).all()


def test_what_is_missing_is_named(tmp_path):
    manifest, out = write(SMALL, tmp_path, random(SMALL)), np.empty((5, 6), "u2")
    folder = tmp_path / "params" / "w"
    short = ShardBuilder(SMALL, (0, 0), page_buffer(SMALL.shard_bytes))  # a shard without its last chunk
    for slot in range(3):
        short.place(slot, np.dtype("u2"))[...] = 0
        short.close_chunk(slot)
    Store(FolderSink(tmp_path), "params", {}).write("w", short)
    read_box(manifest, "w", (slice(0, 2),), out[:2])
    with pytest.raises(CorruptOutput, match=r"w cannot be read: a chunk of c\.0\.0 is missing"):
        read_box(manifest, "w", ALL, out)
    (folder / "c.0.0").unlink()
    with pytest.raises(CorruptOutput, match=r"w cannot be read: c\.0\.0 is missing"):
        read_box(manifest, "w", ALL, out)
    read_box(manifest, "w", (slice(4, 5),), out[4:])
    for text in ("{}", "[", (folder / "zarr.json").read_text().replace("uint16", "int16")):
        (folder / "zarr.json").write_text(text)
        with pytest.raises(CorruptOutput, match=r"w cannot be read: zarr\.json does not describe the array"):
            read_box(manifest, "w", ALL, out)
    (folder / "zarr.json").unlink()
    with pytest.raises(CorruptOutput, match=r"w cannot be read: zarr\.json is missing"):
        read_box(manifest, "w", ALL, out)


def test_codes_of_four_bits_take_less_than_four(tmp_path):
    """Of normally distributed weights in groups of 32: the entropy is 3.71 bits."""
    weights = np.random.default_rng(0).standard_normal((4096, 32))
    codes = np.round(weights / np.abs(weights).max(axis=1, keepdims=True) * 7.5).clip(-8, 7).astype(ml_dtypes.int4)
    array = OutputArray(codes.shape, codes.dtype, (4096, 32), (1024, 32), "w", "", (), compressed=True)
    write(array, tmp_path, codes)
    assert 8 * (tmp_path / "params/w/c.0.0").stat().st_size < 3.8 * codes.size
