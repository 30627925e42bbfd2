"""Damaged outputs: `verify` detects any change of a file and names the file or the array, and no command uses damaged
weights."""

import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.simulated import contents, copy_tree
from tpuconv import api
from tpuconv.api import verify
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.cli import tpuconv as command
from tpuconv.convert.export import files as export_files
from tpuconv.convert.plan.types import Options
from tpuconv.errors import ConfigError, CorruptOutput, SourceError, TpuconvError, UsageError
from tpuconv.storage.sealed import read_sealed
from tpuconv.verify.checksums import update

KINDS = ("checkpoint", "stacked", "quantized", "compressed", "kept", "maxtext", "pathways",
         "export", "export-of-kept", "huggingface", "serving")  # fmt: skip
EXPORTS = {"export", "export-of-kept", "huggingface", "serving"}
"""Those that hold safetensors."""
MANIFEST = "tpuconv.json"
INT4 = "qwix: {rules: [{module_path: layers/.*, weight_qtype: int4}]}"

pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with made.folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """Every kind of output, and under `twin` the same of a source of the same architecture with other values."""
    base = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_files, "SHARD_BYTES", 3000)
        for folder, seed in ((base, 0), (base / "twin", 1)):
            source = made.source(folder / "source", seed, shards=2)
            made.convert(source, folder / "checkpoint")
            made.with_layouts(folder / "checkpoint")
            made.convert(source, folder / "stacked", Options(scan_layers=True))
            made.quantize(folder / "checkpoint", folder / "quantized")
            (rules := folder / "int4.yaml").write_text(INT4)
            made.convert_for("tpuconv", source, folder / "compressed", quantize=rules, compress=True)
            made.convert_for("maxtext", source, folder / "maxtext", scan_layers=True)
            made.convert_for("maxtext", source, folder / "pathways", scan_layers=True, pathways=True)
            made.convert_for("huggingface", source, folder / "huggingface", dtype="float32")
            made.convert_for("huggingface", source, folder / "serving", quantize="int8_weight_only")
            made.convert(made.encoded_source(folder / "encoded", seed), folder / "kept", Options(encoding="keep"))
            made.export(folder / "checkpoint", folder / "export")
            made.export(folder / "kept", folder / "export-of-kept")
    files = {kind: set(contents(base / kind)) for kind in KINDS}
    assert {"layouts.json", "README.md", "README.source.md", "LICENSE", "tokenizer.json"} <= files["checkpoint"]
    assert "quantization.html" in files["quantized"]
    assert {"model.safetensors.index.json", "generation_config.json"} <= files["export"]
    assert not any(faults(base / kind) for kind in KINDS)
    return base


def faults(folder: Path) -> dict[str, str]:
    """What `verify` finds, by the name of the file or array."""
    return {each.name: each.fault for each in verify(folder).faults}


def flip(rng: random.Random, data: bytearray, _: bytes) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, data: bytearray, _: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def empty(rng: random.Random, data: bytearray, _: bytes) -> None:
    data.clear()


def append(rng: random.Random, data: bytearray, _: bytes) -> None:
    data += rng.randbytes(rng.choice((1, 10, 5000)))


def overwrite(rng: random.Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data))
    data[at : at + 16] = bytes(byte ^ 0xFF for byte in data[at : at + 16])


def swap(rng: random.Random, data: bytearray, others: bytes) -> None:
    data[:] = others


CHANGES: dict[str, Callable[[random.Random, bytearray, bytes], None]] = {
    change.__name__: change for change in (flip, cut, empty, append, overwrite, swap)
}


def damaged(folder: Path, name: str, twin: Path, change: str, rng: random.Random) -> bytes | None:
    """Damages a file; gives what it held, or None where it holds the same afterwards."""
    path = folder / name
    before = path.read_bytes()
    if change == "delete":
        path.unlink()
        return before
    data = bytearray(before)
    if data:
        CHANGES[change](rng, data, (twin / name).read_bytes())
    if bytes(data) == before:
        return None
    path.write_bytes(data)
    return before


def arrays_of(kind: str) -> str:
    """The folder of the arrays, in an output that has one."""
    return "0/items" if kind in ("maxtext", "pathways") else "params"


def expected(name: str) -> set[str]:
    """Names under which the damage of a file may be reported: its own; of a shard that of its array."""
    folder, array, shard = (name.rsplit("/", 2) + ["", ""])[:3]
    return {name, array} if shard and folder in map(arrays_of, KINDS) else {name}


def try_one(outputs: Path, work: Path, kind: str, name: str, change: str, rng: random.Random) -> bool:
    """Damages a file of a working copy, verifies it, and puts it back; False where nothing changed."""
    folder = work / kind
    if (before := damaged(folder, name, outputs / "twin" / kind, change, rng)) is None:
        return False
    what = f"{change} of {kind}/{name}"
    found, refused = {}, None
    try:
        found = faults(folder)
    except (CorruptOutput, UsageError) as error:
        refused = error
    if refused is None:
        assert expected(name) & found.keys() or (name == MANIFEST and change == "swap" and found), what
    else:
        assert name == MANIFEST, what
        assert str(folder) in refused.message, what
        assert isinstance(refused, CorruptOutput) or change == "delete", what
        if change not in ("swap", "delete"):
            with pytest.raises(CorruptOutput):
                read_sealed(folder)
    (folder / name).write_bytes(before)
    count(f"damaged file: {change}", kind)
    return True


@pytest.fixture
def work(outputs, tmp_path) -> Path:
    for kind in KINDS:
        copy_tree(outputs / kind, tmp_path / kind)
    return tmp_path


def trials(outputs: Path, flips: int, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Every change of every file, and so many flipped bits more, dealt evenly to kinds and files."""
    files = [(kind, name) for kind in KINDS for name in sorted(contents(outputs / kind))]
    yield from ((kind, name, change) for kind, name in files for change in (*CHANGES, "delete"))
    for i in range(flips):
        kind = KINDS[i % len(KINDS)]
        yield kind, rng.choice([name for own, name in files if own == kind]), "flip"


def test_a_few_damaged_files(outputs, work):
    rng = random.Random(0)
    chosen = [trial for trial in trials(outputs, 100, rng) if rng.random() < 0.1]
    assert sum(try_one(outputs, work, *trial, rng) for trial in chosen) > 50


@pytest.mark.slow
def test_damaged_files(outputs, work):
    rng = random.Random(1)
    tried = [trial[2] for trial in trials(outputs, 2000, rng) if try_one(outputs, work, *trial, rng)]
    assert tried.count("flip") >= 2000


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_belong_there_is_named(kind, work):
    folder = work / kind
    arrays = [] if kind in EXPORTS else [next(path for path in (folder / arrays_of(kind)).iterdir() if path.is_dir())]
    for inside in (folder, *([folder / arrays_of(kind)] if arrays else []), *arrays):
        for name in ("c.9.9", "extra.bin", ".hidden", "tokenizer.model", "zarr.json.partial.x"):
            path = inside / name
            path.write_bytes(b"")
            assert str(path.relative_to(folder)) in faults(folder)
            path.unlink()
            path.mkdir()
            assert {str(path.relative_to(folder)), f"{path.relative_to(folder)}/"} & faults(folder).keys()
            path.rmdir()
            path.symlink_to("/nowhere")
            assert str(path.relative_to(folder)) in faults(folder)
            path.unlink()
            count("damaged file: extra", kind, 3)
    assert not faults(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_place_of_a_file_is_named(kind, work):
    """A folder, or a link to another file; a link to the same bytes is the same."""
    folder = work / kind
    for name in sorted(contents(folder))[::3]:
        path, aside = folder / name, work / "aside"
        path.rename(aside)
        path.mkdir()
        with pytest.raises(CorruptOutput) if name == MANIFEST else warnings.catch_warnings():
            assert expected(name) & faults(folder).keys()
        path.rmdir()
        path.symlink_to("/dev/zero")
        with pytest.raises(CorruptOutput) if name == MANIFEST else warnings.catch_warnings():
            assert expected(name) & faults(folder).keys()
        path.unlink()
        aside.rename(path)
        count("damaged file: replaced by no file", kind, 2)
    assert not faults(folder)


def by_command(arguments: list[str]) -> int:
    """The exit code of a command, run in this process."""
    try:
        return command.main(arguments, standalone_mode=False) or 0
    except TpuconvError as error:
        return error.exit_code


def test_the_command_verify(outputs, work, capsys):
    rng = random.Random(2)
    for i in range(40):
        kind = KINDS[i % len(KINDS)]
        name = rng.choice(sorted(contents(work / kind)))
        before = damaged(work / kind, name, outputs / "twin" / kind, "flip", rng)
        assert by_command(["verify", str(work / kind)]) == 10
        if before is not None:
            (work / kind / name).write_bytes(before)
        count("damaged file: by the command", kind)
    assert [by_command(["verify", str(work / kind)]) for kind in KINDS] == [0] * len(KINDS)
    damaged(work / "export", "config.json", outputs / "twin/export", "flip", rng)
    done = subprocess.run(
        [sys.executable, "-m", "tpuconv", "verify", work / "export"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 10
    assert "config.json was changed" in done.stderr


# -- who reads an output ----------------------------------------------------------------------------------------------


def weights(model: Any) -> dict[str, np.ndarray]:
    from flax import nnx

    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model))}


def load(folder: Path) -> dict[str, np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weights(tpuconv.load(folder))


def output_of(write: Callable[[Path, Path], None]) -> Callable[[Path], dict[str, Any]]:
    def read(folder: Path) -> dict[str, Any]:
        out = folder.parent / "read"
        try:
            write(folder, out)
            return contents(out)
        finally:
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(folder.parent / ".read.tpuconv", ignore_errors=True)

    return read


def orbax(folder: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict

    with ocp.StandardCheckpointer() as checkpointer:
        return {".".join(k): np.asarray(v) for k, v in flatten_dict(checkpointer.restore(folder / "params")).items()}


READERS = {"load": load, "quantize": output_of(made.quantize), "export": output_of(api.export)}
READ = [("load", "checkpoint"), ("load", "quantized"), ("load", "compressed"), ("load", "kept"),
        ("quantize", "checkpoint"), ("export", "checkpoint"), ("export", "kept"), ("export", "compressed"),
        ("export", "maxtext")]  # fmt: skip


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(x.view(np.uint8), b[k].view(np.uint8)) if isinstance(x, np.ndarray) else x == b[k]
        for k, x in a.items()
    )


def read_damaged(outputs: Path, work: Path, reader: str, kind: str, times: int) -> None:
    """What is read of a damaged output is an error of ours, or what was written."""
    rng, read = random.Random(f"{reader} {kind}"), READERS[reader]
    right, names = read(work / kind), sorted(contents(work / kind))
    names += [name for name in names if name.startswith(arrays_of(kind))]
    for _ in range(times):
        name, change = rng.choice(names), rng.choice(("flip", "flip", "cut", "append", "overwrite", "swap", "delete"))
        before = damaged(work / kind, name, outputs / "twin" / kind, change, rng)
        if before is None:
            continue
        code = 0
        try:
            assert same(read(work / kind), right), f"{change} of {name}"
        except TpuconvError as error:
            code = error.exit_code
        assert code in (0, 2, 4, 6, 10), f"{change} of {name}"
        end = "an error" if code else "the right weights"
        if len(expected(name)) > 1:
            assert end == "an error", f"{change} of {name}"
        (work / kind / name).write_bytes(before)
        count(f"read a damaged {kind}: {reader}", end)


@pytest.mark.parametrize(("reader", "kind"), [("load", "checkpoint"), ("export", "kept")])
def test_a_few_damaged_outputs_are_read(reader, kind, outputs, work):
    read_damaged(outputs, work, reader, kind, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "kind"), READ)
def test_damaged_outputs_are_read(reader, kind, outputs, work):
    read_damaged(outputs, work, reader, kind, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "quantized", "kept"])
def test_orbax_alone_reads_damaged_shards(kind, outputs, work):
    """Its checksums are those of the chunks: what it restores of a damaged shard is an error or what was written."""
    rng, right = random.Random(kind), orbax(work / kind)
    shards = sorted(name for name in contents(work / kind) if "/c." in name)
    for _ in range(60):
        name, change = rng.choice(shards), rng.choice(("flip", "flip", "cut", "overwrite"))
        before = damaged(work / kind, name, outputs / "twin" / kind, change, rng)
        assert before is not None
        try:
            end = "the right weights" if same(orbax(work / kind), right) else "others"
        except Exception:  # of Orbax, which raises any
            end = "an error"
        assert end != "others", f"{change} of {name}"
        (work / kind / name).write_bytes(before)
        count(f"read a damaged {kind}: Orbax", end)


@pytest.mark.parametrize(("reader", "kind"), READ)
def test_foreign_arrays_are_refused(reader, kind, outputs, work):
    """Those of another checkpoint of the same architecture, all of them or a single shard: every checksum in the files
    themselves holds."""
    inside = arrays_of(kind)
    params = work / kind / inside
    shutil.rmtree(params)
    shutil.copytree(outputs / "twin" / kind / inside, params)
    with pytest.raises(CorruptOutput, match="does not hold the arrays of its manifest"):
        READERS[reader](work / kind)
    shutil.rmtree(params)
    shutil.copytree(outputs / kind / inside, params)
    shard = next(name for name in sorted(contents(params)) if "/c." in name)
    shutil.copy(outputs / "twin" / kind / inside / shard, params / shard)
    with pytest.raises(CorruptOutput) as info:
        READERS[reader](work / kind)
    assert shard.split("/")[0] in str(info.value)
    count("foreign arrays", f"{reader} of {kind}", 2)


def test_an_edited_config_is_refused_until_it_is_taken_in(work, capsys):
    folder = work / "checkpoint"
    right, config = load(folder), folder / "config.json"
    config.write_text(
        config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 4, "rms_norm_eps": 0.5')
    )
    with pytest.raises(CorruptOutput, match=r"(?s)config\.json was changed .* --update"):
        load(folder)
    for reader in ("quantize", "export"):
        with pytest.raises((CorruptOutput, SourceError), match=r"config\.json was changed"):
            READERS[reader](folder)
    assert faults(folder).keys() == {"config.json"}
    assert update(read_manifest(folder)) == ["config.json"]
    assert not faults(folder)
    assert same(load(folder), right)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").unlink()
    assert by_command(["verify", "--update", str(folder)]) == 0
    assert not faults(folder)
    config.write_text("{")
    assert by_command(["verify", "--update", str(folder)]) == 0
    with pytest.raises(ConfigError):
        load(folder)


def test_update_takes_no_damage_in(outputs, work):
    rng, folder = random.Random(3), work / "checkpoint"
    for name in ("params/_METADATA", "params/embed.embedding/zarr.json"):
        before = damaged(folder, name, outputs / "twin/checkpoint", "flip", rng)
        with pytest.raises(CorruptOutput, match=name):
            update(read_manifest(folder))
        (folder / name).write_bytes(before)
    shard = next(name for name in sorted(contents(folder)) if "/c." in name)
    damaged(folder, shard, outputs / "twin/checkpoint", "flip", rng)
    (folder / "tokenizer.json").write_text("{}")
    update(read_manifest(folder))
    assert faults(folder).keys() == {shard.split("/")[1]}
