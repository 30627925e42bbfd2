"""Strict reading of headers: what safetensors accepts and a converter must refuse, each with its error."""

import contextlib
import errno
import json
import os
import socket
import struct
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from helpers.times import ProcessorTime
from tpuconv.errors import ConfigError, SourceError, TpuconvError, UsageError
from tpuconv.sources import source as source_module
from tpuconv.sources.config import read_config
from tpuconv.sources.files import ENCODING_FILES, MAX_HEADER_BYTES
from tpuconv.sources.headers import read_header
from tpuconv.sources.source import open_source

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index, as the library writes them."""
    rng = np.random.default_rng(0)
    shards = {
        "model-00001-of-00002.safetensors": {
            "a.weight": rng.normal(size=(4, 6)).astype("f4"),
            "a.bias": np.ones(4, "f2"),
        },
        "model-00002-of-00002.safetensors": {"b.weight": rng.normal(size=(3, 5)).astype("f4")},
    }
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def write_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(start: int, end: int, shape: object = None, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_headers_and_values_are_those_of_the_library(folder):
    source = open_source(folder)
    assert {n: (t.dtype, t.shape) for n, t in source.tensors.items()} == {
        "a.weight": ("F32", (4, 6)),
        "a.bias": ("F16", (4,)),
        "b.weight": ("F32", (3, 5)),
    }
    out = bytearray(40)
    with closing(source.open()) as reader:
        reader.read(source.tensors["b.weight"], 20, memoryview(out))
    expected = np.random.default_rng(0)
    expected.normal(size=(4, 6))
    np.testing.assert_array_equal(np.frombuffer(out, "f4"), expected.normal(size=(3, 5)).astype("f4").reshape(-1)[5:])


TWICE = b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 4)).encode(),) * 2)
FLOAT = {**entry(0, 4), "data_offsets": [0, 4.0]}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

ONE = json.dumps({"a": entry(0, 4)}).encode()


def listen(path: Path) -> None:
    """Makes a socket, whose path must be short."""
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
        server.bind(path.name)


HEADERS = {
    "truncated length": (lambda p: p.write_bytes(b"\1\0"), "truncated"),
    "truncated header": (lambda p: write_header(p, {"a": entry(0, 4)}, b"", 5000), "truncated"),
    "truncated data": (lambda p: write_header(p, {"a": entry(0, 4)}, b"123"), "truncated"),
    "trailing bytes": (lambda p: write_header(p, {"a": entry(0, 4)}, b"12345"), "no tensor owns"),
    "a tensor twice": (lambda p: write_header(p, TWICE, b"1234"), "twice"),
    "overlap": (lambda p: write_header(p, {"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "overlaps"),
    "gap": (lambda p: write_header(p, {"a": entry(0, 4), "b": entry(6, 8)}, b"12345678"), "gap"),
    "no JSON": (lambda p: write_header(p, b"{nonsense"), "not valid JSON"),
    "an array": (lambda p: write_header(p, [1, 2]), "not a JSON object"),
    "deep JSON": (lambda p: write_header(p, b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "unknown dtype": (lambda p: write_header(p, {"a": entry(0, 4, dtype="F7")}, b"1234"), "unknown dtype"),
    "shape of another size": (lambda p: write_header(p, {"a": entry(0, 4, [3])}, b"1234"), "do not hold"),
    "negative shape": (lambda p: write_header(p, {"a": entry(0, 4, [-2, -2])}, b"1234"), "no list of sizes"),
    "fractional offset": (lambda p: write_header(p, {"a": FLOAT}, b"1234"), "no list of sizes"),
    "unknown key": (lambda p: write_header(p, {"a": {**entry(0, 4), "code": "x"}}, b"1234"), "alone"),
    "path in a name": (lambda p: write_header(p, {"../../etc/passwd": entry(0, 4)}, b"1234"), "unsafe tensor name"),
    "escape codes in a name": (lambda p: write_header(p, {"a\x1b[2J": entry(0, 4)}, b"1234"), "unsafe tensor name"),
    "an endless name": (lambda p: write_header(p, {"a" * 10_000: entry(0, 4)}, b"1234"), "unsafe tensor name"),
    "Git LFS pointer": (lambda p: p.write_text(LFS), "Git LFS"),
    "web page": (lambda p: p.write_text("<!DOCTYPE html><html>Sign in</html>"), "web page"),
    "FIFO": (lambda p: os.mkfifo(p), "not a regular file"),
    "empty": (lambda p: p.write_bytes(b""), "truncated"),
    "a folder": (lambda p: p.mkdir(), "not a regular file but a folder"),
    "a socket": (listen, "cannot be read"),
    "a dangling link": (lambda p: p.symlink_to("nowhere"), "is missing: it is a link"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "not a regular file but a device"),
    "UTF-16": (
        lambda p: write_header(p, json.dumps({"a": entry(0, 4)}).encode("utf-16"), b"1234"),
        "not a JSON object",
    ),
    "a byte order mark": (lambda p: write_header(p, b"\xef\xbb\xbf" + ONE, b"1234"), "not a JSON object"),
    "a blank before": (lambda p: write_header(p, b" " + ONE, b"1234"), "not a JSON object"),
    "no header": (lambda p: write_header(p, b""), "not a JSON object"),
    "a NaN": (lambda p: write_header(p, b'{"__metadata__": NaN}'), "not a finite number"),
    "a number that is too large": (lambda p: write_header(p, b'{"__metadata__": 1e999}'), "not a finite number"),
    "metadata that is no text": (lambda p: write_header(p, {"__metadata__": {"a": 1}}), "a must be a text"),
    "metadata that is no object": (lambda p: write_header(p, {"__metadata__": "a"}), "__metadata__: must be an object"),
    "half of a pair": (lambda p: write_header(p, {"__metadata__": {"a": "\ud800"}}), "surrogates"),
    "negative zero": (lambda p: write_header(p, ONE.replace(b"0", b"-0"), b"1234"), "no list of sizes"),
    "sizes beyond 2^63": (lambda p: write_header(p, {"a": entry(0, 4, [0, 1 << 64])}, b"1234"), "no list of sizes"),
    "a dtype of another kind": (lambda p: write_header(p, {"a": entry(0, 4, dtype=["U8"])}, b"1234"), "unknown dtype"),
    "axes without end": (lambda p: write_header(p, {"a": entry(0, 1, [1] * 10_000)}, b"1"), "has 10000 axes"),
}  # fmt: skip


def test_metadata_may_be_null(tmp_path):
    """As in safetensors."""
    write_header(tmp_path / "a.safetensors", {"__metadata__": None, "a": entry(0, 4)}, b"1234")
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert list(file.keys()) == [info.name for info in read_header(tmp_path / "a.safetensors")[2]]


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_not_as_the_format_says_is_refused(case, tmp_path):
    make, message = HEADERS[case]
    path = tmp_path / "model.safetensors"
    make(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=message) as info:
        read_header(path)
    assert str(path.name) in str(info.value)
    with pytest.raises(SourceError, match=message) as info:
        open_source(tmp_path)
    assert info.value.exit_code == 4


def test_a_huge_header_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES * 2)
    with pytest.raises(SourceError, match="more than any real"):
        read_header(path)


EMPTY = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


CROWDS = {
    "empty tensors": (EMPTY, 400_000),
    "no tensors": (b'"%d":1', 2_400_000),
    "sizes": (b"1", 8_000_000),
}


@pytest.mark.parametrize("case", CROWDS)
def test_a_header_of_too_many_tensors_is_refused_before_it_is_parsed(case, tmp_path):
    one, count = CROWDS[case]
    path = tmp_path / "model.safetensors"
    if case == "sizes":
        text = b'{"a":{"shape":[' + b",".join([one] * count) + b"]}}"
    else:
        text = b"{" + b",".join(one % i for i in range(count)) + b"}"
    write_header(path, text)
    with ProcessorTime() as parsing:
        json.loads(text)
    with ProcessorTime() as refusing, pytest.raises(SourceError, match="more than 250000 tensors"):
        read_header(path)
    assert refusing.seconds < parsing.seconds


@pytest.mark.parametrize("call", ["open", "fstat", "pread"])
def test_a_disk_that_fails_is_named(call, folder, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(SourceError) as info:
            read_header(folder / SECOND)
    assert f"{SECOND} cannot be read: Input/output error" in info.value.message


def test_an_index_of_a_million_shards_is_refused_at_once(folder):
    weight_map = ",".join(f'"{i}":"{i}.safetensors"' for i in range(1_000_000))
    (folder / INDEX).write_text(f'{{"weight_map":{{{weight_map}}}}}')
    with ProcessorTime() as parsing:
        json.loads((folder / INDEX).read_bytes())
    with ProcessorTime() as refusing, pytest.raises(SourceError, match="1000000 of 1000000 shards are missing"):
        open_source(folder)
    assert refusing.seconds < 20 * parsing.seconds  # 5 times where the machine does nothing else


def test_more_further_names_than_tensors_are_refused(folder):
    """A tensor that several modules share is saved once, with its other names in the metadata."""
    index = json.loads((folder / INDEX).read_text())
    (kept, *_), count = index["weight_map"], len(index["weight_map"])
    for further in (count, count + 1):
        index["metadata"] = {f"x{i}": kept for i in range(further)}
        (folder / INDEX).write_text(json.dumps(index))
        with nullcontext() if further == count else pytest.raises(SourceError, match="further names of"):
            open_source(folder)


def test_a_file_in_whose_place_there_is_no_file_is_named(folder):
    for name in (INDEX, "config.json"):
        for make in (lambda p: p.mkdir(), os.mkfifo, lambda p: p.symlink_to("/dev/zero"), listen):
            kept = (folder / name).rename(folder / "kept")
            make(folder / name)
            with pytest.raises(SourceError, match=f"{name} (is not a regular file|cannot be read)"):
                open_source(folder)
            (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
            kept.rename(folder / name)
    os.mkfifo(folder / ENCODING_FILES[0])
    with pytest.raises(SourceError, match=f"{ENCODING_FILES[0]} is not a regular file"):
        open_source(folder)


# -- the library as the judge -----------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *(b"{", b"}", b"[", b"]", b",", b":", b'"', b" ", b"\n", b"\t", b"\0", b"\xff", b"\xef\xbb\xbf", b"\\ud800"),
        *(b"0", b"-0", b"4", b"8", b"-1", b"4.0", b"1e1", b"04", b"18446744073709551616", b"NaN", b"Infinity", b"null"),
        *(b"true", b'"a"', b'"b"', b'"U8"', b'"F32"', b'"shape"', b'"dtype"', b'"data_offsets"', b'"__metadata__"'),
        *(b'{"a":"b"}', b'{"a":1}', b"[4]", b"[0,4]", b"[4,8]", b"[0,8]", b"[2,2]", b"[]", b"/**/", b"'"),
    ]
)
TWO = json.dumps({"__metadata__": {"format": "pt"}, "a": entry(0, 4), "b": entry(4, 8, [1], "F32")}).encode()


@st.composite
def files(draw):
    """A small file of two tensors, in which a few things are changed."""
    header = draw(st.sampled_from([TWO, ONE, ONE + b"  ", b"{}", b'{"__metadata__":{}}']))
    for _ in range(draw(st.integers(0, 3))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(header))] * 2)))
        header = header[:at] + draw(PIECES | st.binary(max_size=2)) + header[min(end, at + draw(st.integers(0, 12))) :]
    length = draw(
        st.sampled_from([len(header)] * 8 + [0, len(header) + 1, len(header) - 1, 1 << 63]) | st.integers(0, 99)
    )
    data = b"12345678"[: draw(st.sampled_from([8, 8, 4, 4, 0, 7]))]
    return struct.pack("<Q", max(0, length)) + header + data


def judge(data: bytes, path: Path) -> None:
    """What the library refuses we refuse; what we accept has the library's tensors."""
    path.write_bytes(data)
    try:
        _, _, infos = read_header(path)
    except SourceError:
        return
    theirs = safetensors.deserialize(data)  # raises where we do not
    assert {(info.name, info.dtype, info.shape) for info in infos} == {
        (name, facts["dtype"], tuple(facts["shape"])) for name, facts in theirs
    }
    assert {info.name: data[info.offset :][: info.nbytes] for info in infos} == {
        name: bytes(facts["data"]) for name, facts in theirs
    }


@given(data=files())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_the_library_refuses_is_refused(data, tmp_path):
    judge(data, tmp_path / "model.safetensors")


@pytest.mark.slow
@given(data=files())
@settings(max_examples=100_000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_the_library_refuses_is_refused_at_length(data, tmp_path):
    judge(data, tmp_path / "model.safetensors")


FOLDERS = {
    "missing shard": (lambda f: (f / SECOND).unlink(), SourceError, "1 of 2 shards is missing"),
    "index names what is not there": (
        lambda f: edit_index(f, lambda m: m.update({"c.weight": "model-00001-of-00002.safetensors"})),
        SourceError,
        "c.weight is not in",
    ),
    "index does not name what is there": (
        lambda f: edit_index(f, lambda m: m.pop("a.bias")),
        SourceError,
        "does not name it",
    ),
    "index names another shard": (
        lambda f: edit_index(f, lambda m: m.update({"a.bias": "model-00002-of-00002.safetensors"})),
        SourceError,
        "the index says",
    ),
    "a tensor in two shards": (
        lambda f: save_file({"b.weight": np.zeros(1, "f4"), "a.bias": np.ones(4, "f2")}, f /
        "model-00002-of-00002.safetensors"), SourceError, "a.bias is in",
    ),
    "path traversal": (
        lambda f: edit_index(f, lambda m: m.update({"b.weight": "../other/model.safetensors"})),
        SourceError,
        "not safetensors files in its folder",
    ),
    "no weights": (lambda f: edit_index(f, lambda m: m.update({"b.weight": "x.bin"})), SourceError, "not safe"),
    "an index without a map": (lambda f: (f / INDEX).write_text('{"weight_map": []}'), SourceError, "no weight_map"),
    "a broken index": (lambda f: (f / INDEX).write_text('{"weight_map": {'), SourceError, "not valid JSON"),
    "no index": (lambda f: (f / INDEX).unlink(), SourceError, "has neither"),
    "no config": (lambda f: (f / "config.json").unlink(), ConfigError, "missing\n.*a folder that holds all files"),
    "a key twice": (lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'), ConfigError, "appears twice"),
    "a config of another kind": (
        lambda f: (f / "config.json").write_text("[]"),
        ConfigError,
        "(?s)no JSON object.*download it again",
    ),
    "a config that ends early": (
        lambda f: (f / "config.json").write_text('{"a":'),
        ConfigError,
        "(?s)not valid JSON.*download it again",
    ),
    "a shard with a name that no file can have": (
        lambda f: edit_index(f, lambda m: m.update({"b.weight": "x" * 300 + ".safetensors"})),
        SourceError,
        "1 of 2 shards is missing",
    ),
    "a shard that is a number": (lambda f: edit_index(f, lambda m: m.update({"b.weight": 1})), SourceError, "not safe"),
    "a shard that is a folder": (
        lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()), SourceError, "not a regular file but a folder",
    ),
    "an index as a pointer": (lambda f: (f / INDEX).write_text(LFS), SourceError, "is a Git LFS pointer"),
    "a config as a page": (lambda f: (f / "config.json").write_text("<html>"), SourceError, "is a web page"),
    "a config with a NUL": (lambda f: (f / "config.json").write_bytes(b"\xff{}"), ConfigError, "not valid JSON"),
    "no checkpoint": (lambda f: [p.unlink() for p in f.iterdir()], UsageError, "holds no model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_no_whole_checkpoint_is_refused(case, folder):
    break_it, error, message = FOLDERS[case]
    break_it(folder)
    with pytest.raises(error, match=message):
        open_source(folder)


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("consolidated.safetensors", "names of Mistral's or Meta's own code"),
        ("model.fp16.safetensors", "these are a variant"),
        ("model-00001-of-00001.safetensors", "rename the file to model.safetensors"),
        ("other.safetensors", "missing files cannot be detected"),
    ],
)
def test_other_safetensors_alone_are_named(file, hint, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "optimizer.pt").touch()  # does not tell what the folder holds
    save_file({"a": np.zeros(1)}, tmp_path / file)
    with pytest.raises(SourceError) as error:
        open_source(tmp_path)
    assert file in error.value.details
    assert hint in error.value.hint


@pytest.mark.parametrize("place", ["merged", "snapshots/abc", "models--org--name/snapshots/abc"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_model_within_a_folder_is_named(place, name, tmp_path):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / name).touch()
    (tmp_path / "logs").mkdir()
    with pytest.raises(UsageError, match=r"holds no model\.safetensors") as error:
        open_source(tmp_path)
    assert error.value.hint == f"give a model within it: {tmp_path / place}"


def test_all_faults_are_named_at_once(folder):
    edit_index(folder, lambda m: m.pop("a.bias"))
    edit_index(folder, lambda m: m.pop("b.weight"))
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model.safetensors")
    edit_index(folder, lambda m: m.update({"b.weight": "model.safetensors", "a.bias": "model.safetensors"}))
    with pytest.raises(TpuconvError) as info:
        open_source(folder)
    assert "a.bias" in str(info.value)
    assert "save a model of your own again" in (info.value.hint or "")


def test_a_shard_that_shrinks_raises_and_does_not_kill(folder):
    source = open_source(folder)
    path = folder / "model-00001-of-00002.safetensors"
    with closing(source.open()) as reader:
        reader.read(source.tensors["a.weight"], 0, memoryview(bytearray(96)))
        os.truncate(path, source.shards[0].size - 60)
        with pytest.raises(SourceError, match="shorter"):
            reader.read(source.tensors["a.weight"], 0, memoryview(bytearray(96)))
        with pytest.raises(SourceError, match="changed"):
            reader.check_unchanged()


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_are_hashed_while_they_are_read_in_any_order(data, folder):
    source = open_source(folder)
    with closing(source.open()) as reader:
        for info in data.draw(st.lists(st.sampled_from(list(source.tensors.values())), max_size=6)):
            start = data.draw(st.integers(0, info.nbytes))
            out = bytearray(data.draw(st.integers(0, info.nbytes - start)))
            reader.read(info, start, memoryview(out))
            whole = (folder / info.shard).read_bytes()
            assert out == whole[info.offset + start :][: len(out)]
        for shard in source.shards:
            assert reader.hash_of(shard.name) == xxhash.xxh3_128_hexdigest((folder / shard.name).read_bytes())


@pytest.mark.parametrize(
    ("file", "answer"),
    [
        ("adapter_config.json", "holds an adapter"),
        ("model-Q4_K_M.gguf", "holds GGUF files"),
        ("checkpoint-40/model.safetensors", "holds checkpoints of a trainer: checkpoint-40"),
        ("zero_to_fp32.py", "DeepSpeed ZeRO: zero_to_fp32.py"),
        ("global_step40/mp_rank_00_model_states.pt", "DeepSpeed ZeRO: global_step40"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "shards of FSDP .*: pytorch_model_fsdp_0"),
        ("iter_0001000/x", "a checkpoint of Megatron: iter_0001000"),
        ("params/_METADATA", "holds no model.safetensors"),
        ("manifest.ocdbt", "a checkpoint of Orbax"),
        ("consolidated.00.pth", "holds pickled weights"),
        ("tf_model.h5", "weights of TensorFlow"),
        ("modules.json", "a list of modules of sentence-transformers"),
        ("pytorch_model-00001-of-00002.bin", "holds pickled weights"),
        ("model-00001-of-00002.safetensors.incomplete", "holds an unfinished download: model-00001"),
        (".cache/huggingface", "holds a download of huggingface_hub without weights: .cache"),
        ("notes.txt", "holds no model.safetensors"),
    ],
)
def test_a_folder_without_a_model_in_safetensors_is_told_what_it_holds(file, answer, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(UsageError, match=answer) as error:
        open_source(tmp_path)
    assert error.value.hint


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"dtype": "float61x!"}, True),
        ({"torch_dtype": "bloat16"}, True),
        ({"text_config": {"dtype": "bf16"}}, True),
        ({"torch_dtype": "torch.bfloat16"}, False),
        ({"dtype": "float8_e4m3fn"}, False),
        ({"dtype": None, "torch_dtype": "auto"}, False),
    ],
)
def test_a_dtype_that_pytorch_does_not_have_is_refused(keys: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **keys}))
    with pytest.raises(ConfigError, match="is no dtype of PyTorch") if refused else nullcontext():
        read_config(tmp_path / "config.json")


def test_a_file_that_may_not_be_read_is_not_to_be_downloaded_again(folder: Path, monkeypatch: Any) -> None:
    def refused(path: Any) -> Any:
        raise SourceError(f"{path} cannot be read: {os.strerror(errno.EACCES)}")

    monkeypatch.setattr(source_module, "read_header", refused)
    with pytest.raises(SourceError, match="cannot be read safely") as info:
        open_source(folder)
    assert info.value.hint == "give this user the right to read the files"
