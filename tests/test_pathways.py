"""`--pathways`: checkpoints in zarr's format 2 for MaxText on Pathways hold the same arrays, and every changed byte is
found."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

import tpuconv
from helpers.attacks import made
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, in_memory, objects
from helpers.checkpoints import read_tensors
from helpers.commands import tpuconv as command
from helpers.conversions import assert_same, flatten
from helpers.families import BY_ID, CASES, hf_model, save
from helpers.maxtext_settings import settings
from helpers.oracles import ask
from helpers.pages import EIGHT_DEVICES
from helpers.quantizing import leaves
from helpers.trainers import trained_tree
from tpuconv import api
from tpuconv.checkpoint import frames
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.reader import check_contents
from tpuconv.convert.plan import sizes
from tpuconv.convert.run.store import Store
from tpuconv.errors import CorruptOutput, UnsupportedConfig, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.notation.sharding import partition, shard_shape
from tpuconv.targets.maxtext import MAXTEXT

OPTIONS = {"target": "maxtext", "scan_layers": True}
PARAMS = Path("0", "items")


@pytest.fixture(scope="module", autouse=True)
def small_files() -> Iterator[None]:
    """Several files for an array, and several blocks in a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "CHUNK_BYTES", 400)
        patch.setattr(sizes, "SLAB_BYTES", 3000)
        patch.setattr(sizes, "UNIT_BYTES", 4000)
        patch.setattr(frames, "RAW_BLOCK_BYTES", 256)
        yield


@pytest.fixture(scope="module")
def source(small_files, tmp_path_factory) -> Path:
    return made.source(tmp_path_factory.mktemp("source") / "src", shards=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(source) -> Path:
    """In zarr's format 3."""
    api.convert(source, source.parent / "plain", **OPTIONS)
    return source.parent / "plain"


@pytest.fixture(scope="module")
def ckpt(source) -> Path:
    api.convert(source, source.parent / "pathways", **OPTIONS, pathways=True)
    return source.parent / "pathways"


def bits(out: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """The arrays of a checkpoint, restored by Orbax."""
    return {name: (x.shape, np.asarray(x).tobytes()) for name, x in flatten(trained_tree(out))}


def test_the_arrays_are_those_of_the_other_format(plain, ckpt):
    assert bits(ckpt) == bits(plain)
    orbax = json.loads((ckpt / PARAMS / "_METADATA").read_text())
    assert (orbax["use_zarr3"], orbax["use_ocdbt"]) == (False, False)
    assert json.loads((ckpt / PARAMS / "_CHECKPOINT_METADATA").read_text())["custom_metadata"] == {"scan_layers": True}
    for array in read_manifest(ckpt).arrays.values():
        names = {path.name for path in (ckpt / PARAMS / array.name).iterdir()}
        assert names == {".zarray", *array.spec.shard_names()}
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{ckpt / PARAMS / array.name}/"}}
        stored = ts.open(spec, open=True).result()
        assert (stored.shape, stored.dtype.name, stored.chunk_layout.read_chunk.shape) == (
            array.shape,
            array.dtype,
            array.chunks,
        )
    assert max(len(array.spec.shard_names()) for array in read_manifest(ckpt).arrays.values()) > 4


CASES_OF_MAXTEXT = list({case.family: case for case in reversed(CASES) if case.model_type in MAXTEXT.trees}.values())


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["apart", "scanned"])
@pytest.mark.parametrize("case", CASES_OF_MAXTEXT, ids=str)
def test_every_family(case, scan, hf, tmp_path):
    try:
        api.convert(hf(case), tmp_path / "plain", target="maxtext", scan_layers=scan)
    except UnsupportedConfig as error:
        pytest.skip(error.message)
    api.convert(hf(case), tmp_path / "pathways", target="maxtext", scan_layers=scan, pathways=True)
    assert bits(tmp_path / "pathways") == bits(tmp_path / "plain")
    assert api.verify(tmp_path / "pathways").passed


@pytest.mark.slow
@pytest.mark.parametrize("by", ["plain", "pathways"])
@pytest.mark.parametrize("axis", ["first", "last"])
def test_orbax_restores_shards(axis, by, plain, ckpt, tmp_path):
    """On eight devices, also by its array handler for Pathways."""
    script, out = Path(__file__).parent / "helpers" / "pathways_restore.py", tmp_path / "restored.npz"
    environment = {**os.environ, "XLA_FLAGS": EIGHT_DEVICES, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, script, ckpt / PARAMS, axis, by, out], env=environment, check=True)
    with np.load(out) as restored:
        assert {name: (x.shape, x.tobytes()) for name, x in restored.items()} == bits(plain)


def test_a_changed_byte_of_any_file_is_found(ckpt, tmp_path):
    """By `verify`; and by what reads the array, which is only sampled first."""
    folder = shutil.copytree(ckpt, tmp_path / "ckpt")
    manifest = read_manifest(folder)
    files = {
        name: [folder / PARAMS / name / each for each in a.spec.shard_names()] for name, a in manifest.arrays.items()
    }
    for number in range(max(map(len, files.values()))):
        chosen = {name: paths[number] for name, paths in files.items() if number < len(paths)}
        before = {path: path.read_bytes() for path in chosen.values()}
        for part in (0.0, 0.1, 0.5, 0.9999):  # of the header, of blocks and their headers, of the checksum
            for path, data in before.items():
                place = int(part * len(data))
                path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert {each.name for each in api.verify(folder).faults} == chosen.keys()
        for path, data in before.items():
            path.write_bytes(data)
    assert not api.verify(folder).faults
    name, (path, *_) = next(iter(files.items()))
    data = path.read_bytes()
    shutil.copy(path, twin := path.with_name("0.9.9"))  # as Orbax would read it, if the array were larger
    assert [Path(each.name).name for each in api.verify(folder).faults] == [twin.name]
    twin.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptOutput, match="does not hold the arrays of its manifest"):
        check_contents(manifest, manifest.arrays)
    path.unlink()
    assert [each.fault for each in api.verify(folder).faults if each.name == name] == [
        f"cannot be read: {path.name} is missing"
    ]


def test_the_way_back_and_other_chunks(source, plain, ckpt, tmp_path):
    api.export(ckpt, tmp_path / "hf")
    assert_same(read_tensors(tmp_path / "hf"), read_tensors(source))
    loaded = [{name: x.tobytes() for name, x in leaves(tpuconv.load(out)).items()} for out in (ckpt, plain)]
    assert loaded[0] == loaded[1]
    mesh = {"fsdp": 2, "tensor": 2}
    api.reshard(plain, tmp_path / "a", pathways=True, mesh=mesh)
    api.reshard(ckpt, tmp_path / "b", mesh=mesh)  # it stays for Pathways
    api.reshard(ckpt, tmp_path / "apart", unscan_layers=True)
    api.reshard(tmp_path / "apart", tmp_path / "c", scan_layers=True)
    api.convert(source, tmp_path / "compressed", **OPTIONS, compress=True)
    api.reshard(tmp_path / "compressed", tmp_path / "d", pathways=True)
    assert read_manifest(tmp_path / "d").raw["options"] == read_manifest(ckpt).raw["options"]
    for name in "abcd":
        assert bits(tmp_path / name) == bits(plain)
        assert api.verify(tmp_path / name).passed
    assert read_manifest(tmp_path / "a").arrays == read_manifest(tmp_path / "b").arrays
    for array in read_manifest(tmp_path / "a").arrays.values():
        own = shard_shape(array.shape, partition(array.axes, array.shape, mesh), mesh)
        assert array.zarr2
        assert all(n % chunk == 0 for n, chunk in zip(own, array.chunks, strict=True))


def test_work_that_was_interrupted_goes_on(source, ckpt, tmp_path, monkeypatch):
    written, write = [], Store.write

    def stop(self, name, shard):
        written.append(name)
        if len(written) == 20:
            raise KeyboardInterrupt
        return write(self, name, shard)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            api.convert(source, tmp_path / "out", **OPTIONS, pathways=True, jobs=1)
    assert not (tmp_path / "out").exists()
    assert api.convert(source, tmp_path / "out", **OPTIONS, pathways=True).resumed_bytes
    assert contents(tmp_path / "out") == contents(ckpt)


def test_three_processes_equal_one(source, ckpt, tmp_path):
    for index in range(3):
        api.convert(source, tmp_path / "out", **OPTIONS, pathways=True, part=ProcessPart(index, 3))
    assert contents(tmp_path / "out") == contents(ckpt)


def test_in_a_bucket(source, ckpt, tmp_path, monkeypatch):
    bucket = in_memory(monkeypatch)
    api.convert(source, f"{ROOT}/ckpt", **OPTIONS, pathways=True)
    assert objects(f"{ROOT}/ckpt") == contents(ckpt)
    assert api.verify(f"{ROOT}/ckpt").passed
    api.export(f"{ROOT}/ckpt", tmp_path / "hf")
    assert_same(read_tensors(tmp_path / "hf"), read_tensors(source))
    name = next(name for name in objects(ROOT) if name.endswith(".kernel/0.0.0"))
    data = objects(ROOT)[name]
    bucket.put(name, data[:40] + bytes([data[40] ^ 1]) + data[41:])
    assert len(api.verify(f"{ROOT}/ckpt").faults) == 1


def test_what_it_is_not_for(source, tmp_path):
    for target in ("tpuconv", "nnx", "huggingface"):
        with pytest.raises(UsageError, match=f"the target {target} does not run on Pathways"):
            api.plan(source, target=target, pathways=True)
    with pytest.raises(UsageError, match="are not compressed"):
        api.plan(source, **OPTIONS, pathways=True, compress=True)
    with pytest.raises(UnsupportedConfig, match="Pathways does not read float8_e4m3fn, the dtype of params"):
        api.plan(made.encoded_source(tmp_path / "fp8"), target="maxtext", pathways=True, encoding="keep")
    api.convert(source, tmp_path / "own")
    with pytest.raises(UsageError, match="the target tpuconv does not run on Pathways"):
        api.reshard(tmp_path / "own", tmp_path / "out", pathways=True)


@pytest.mark.slow
def test_the_commands(source, ckpt, tmp_path):
    command("convert", source, tmp_path / "out", "--target", "maxtext", "--scan-layers", "--pathways")
    assert "checkpoint_storage_use_zarr3=false" in (tmp_path / "out" / "README.md").read_text()
    command("reshard", tmp_path / "out", tmp_path / "again", "--mesh", "fsdp=4")
    assert bits(tmp_path / "again") == bits(ckpt)
    command("inspect", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.oracles
def test_maxtext_loads_it(tmp_path):
    """With the settings that the model card states: the logits are those of the other format, bit for bit."""
    case, requests = BY_ID["qwen3-tied"], []
    save(case, tmp_path / "hf")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 100, (2, 12)))
    for name in ("plain", "pathways"):
        pathways = name == "pathways"
        api.convert(tmp_path / "hf", tmp_path / name, **OPTIONS, pathways=pathways)
        stated = dict(each.split("=") for each in MAXTEXT.pathways.split()) if pathways else {}
        given = settings(case, hf_model(case).config) | {"scan_layers": "true"} | stated
        paths = {"items": tmp_path / name / PARAMS, "ids": tmp_path / "ids.npy", "out": tmp_path / f"{name}.npy"}
        requests.append({key: str(path) for key, path in paths.items()} | {"settings": given})
    ask("maxtext", "maxtext_models.py", requests)
    assert not [path.read_text() for path in tmp_path.glob("*.error")]
    assert np.load(tmp_path / "pathways.npy").tobytes() == np.load(tmp_path / "plain.npy").tobytes()
