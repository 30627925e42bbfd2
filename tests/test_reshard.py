"""`reshard`: the same values in the chunks of a mesh, with layers stacked or apart; our checkpoints and trainers'."""

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tpuconv
from helpers.attacks.publishers import INT4_RULES
from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors
from helpers.commands import tpuconv as command
from helpers.conversions import assert_same, flatten, same_bits
from helpers.families import CASES, Case
from helpers.logits import forward
from helpers.trainers import adam_state, save_step, trained_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan import sizes
from tpuconv.convert.reshard.chunks import device_chunks, file_shape
from tpuconv.convert.reshard.work import ReshardWork
from tpuconv.errors import TpuconvError, UnsupportedConfig, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.notation.sharding import AXES, partition, shard_shape
from tpuconv.targets.registry import get_target, target_names

MESH = {"data": 2, "tensor": 2}
SCANNING = [name for name in target_names() if get_target(name).layer_axis is not None]


def arrays(out: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint for any target, restored by Orbax."""
    return dict(flatten(trained_tree(out)))


def assert_equal(have: Path, want: Path) -> None:
    """Two checkpoints have the same arrays, bit for bit, and the same descriptions of them."""
    found, known = arrays(have), arrays(want)
    assert found.keys() == known.keys()
    assert not [name for name in found if not same_bits(found[name], known[name])]
    mine, theirs = read_manifest(have), read_manifest(want)
    keys = ("axes", "sources", "buffer")
    for name, array in mine.arrays.items():
        assert [getattr(array, key) for key in keys] == [getattr(theirs.arrays[name], key) for key in keys], name
    same = ("family", "parameters", "bytes", "folder", "release", "returns", "parts")
    assert {key: mine.raw.get(key) for key in same} == {key: theirs.raw.get(key) for key in same}
    assert api.verify(have).passed


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    folder = random_checkpoint(tmp_path_factory.mktemp("qwen3") / "hf", qwen3_config())
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# The model\n")
    return folder


# -- every family and target ------------------------------------------------------------------------------------------


def scanned_forms() -> list:
    first = {case.family: case for case in reversed(CASES)}
    fast = {"llama-plain-tpuconv", "gemma3_text-plain-maxtext"}
    out = []
    for case in first.values():
        for target in SCANNING:
            trees = get_target(target).trees
            if trees is None or (case.written_as or case.model_type) in trees:
                name = f"{case.id}-{target}"
                out.append(pytest.param(case, target, id=name, marks=[] if name in fast else [pytest.mark.slow]))
    return out


@pytest.mark.parametrize(("case", "target"), scanned_forms())
def test_layers_are_stacked_and_taken_apart(case: Case, target, hf, tmp_path):
    """As `convert` writes them with and without `scan_layers`."""
    apart, stacked = tmp_path / "apart", tmp_path / "stacked"
    try:
        api.convert(hf(case), stacked, target=target, scan_layers=True)
    except UnsupportedConfig as error:
        pytest.skip(f"no stacked layers: {error.message}")
    api.convert(hf(case), apart, target=target)
    api.reshard(apart, tmp_path / "to-stacked", mesh=MESH, scan_layers=True)
    assert_equal(tmp_path / "to-stacked", stacked)
    api.reshard(stacked, tmp_path / "to-apart", mesh=MESH, unscan_layers=True)
    assert_equal(tmp_path / "to-apart", apart)


@pytest.mark.parametrize("config", ["int8_default", "int4.yaml"])
def test_quantized_parameters_come_along(config, qwen3, tmp_path, monkeypatch):
    """Values of 4 bits lie in compressed chunks."""
    monkeypatch.chdir(tmp_path)
    Path("int4.yaml").write_text(INT4_RULES)
    api.convert(qwen3, tmp_path / "a", quantize=config)
    api.reshard(tmp_path / "a", tmp_path / "b", mesh=MESH)
    assert_equal(tmp_path / "b", tmp_path / "a")
    assert read_manifest(tmp_path / "b").quantization == read_manifest(tmp_path / "a").quantization
    assert (tmp_path / "b" / "quantization.html").read_bytes() == (tmp_path / "a" / "quantization.html").read_bytes()
    with pytest.raises(UsageError, match="quantized"):
        api.reshard(tmp_path / "a", tmp_path / "c", scan_layers=True)


def test_every_command_reads_the_output(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "a")
    api.reshard(tmp_path / "a", tmp_path / "b", mesh={"fsdp": 4})
    ids_BT = np.array([[1, 2, 3, 4]])
    assert np.array_equal(forward(tpuconv.load(tmp_path / "b"), ids_BT), forward(tpuconv.load(tmp_path / "a"), ids_BT))
    api.export(tmp_path / "b", tmp_path / "hf")
    assert_same(read_tensors(tmp_path / "hf"), read_tensors(qwen3))
    api.quantize(tmp_path / "b", tmp_path / "q", config="int8_weight_only")


# -- chunks -----------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("LEDNHFVM"), st.integers(1, 96), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(AXES), st.sampled_from([1, 2, 3, 4, 8]), max_size=3),
    st.integers(1, 4096),
)
def test_a_device_reads_complete_chunks(letters, mesh, chunk_bytes):
    axes, shape = " ".join(letters), tuple(letters.values())
    chunks = device_chunks(axes, shape, 2, mesh, chunk_bytes)
    files = file_shape(axes, shape, chunks, 4 * chunk_bytes)
    shard = shard_shape(shape, partition(axes, shape, mesh), mesh)
    assert all(own % chunk == 0 for own, chunk in zip(shard, chunks, strict=True))
    assert all(file % chunk == 0 for file, chunk in zip(files, chunks, strict=True))
    assert prod(files) * 2 <= max(8 * chunk_bytes, prod(chunks) * 2)


def test_a_file_is_read_from_one_chunk_of_a_trainer():
    """MaxText saves all layers of a part of D in one chunk; each is decoded once."""
    chunks = device_chunks("D F", (4096, 16384), 2, {}, sizes.CHUNK_BYTES)
    assert file_shape("D F", (4096, 16384), chunks, 1 << 24) == (1024, 16384)
    assert file_shape("D F", (4096, 16384), chunks, 1 << 24, (128, 16384)) == (128, 16384)


# -- trainers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "scan"),
    [
        ("maxtext", True),
        *(pytest.param(target, False, marks=pytest.mark.slow) for target in ("maxtext", "tunix", "nnx")),
    ],
)
def test_the_run_of_a_trainer(target, scan, qwen3, tmp_path):
    """Its parameters, not the state of its optimizer."""
    api.convert(qwen3, tmp_path / "known", target=target, scan_layers=scan)
    tree = trained_tree(tmp_path / "known")
    save_step(tmp_path / "run", 7, {"params": tree, "opt_state": adam_state(tree), "step": np.int32(7)})
    done = api.reshard(tmp_path / "run", tmp_path / "out", config=qwen3, mesh=MESH)
    assert done.target == target
    assert "\nlicense: mit\n" in (tmp_path / "out" / "README.md").read_text()
    assert {skip.reason for skip in done.skipped} == {
        "arrays of an optimizer's state",
        "arrays with the number of a step",
    }
    assert_equal(tmp_path / "out", tmp_path / "known")
    if target == "maxtext":
        other = {"unscan_layers": True} if scan else {"scan_layers": True}
        api.reshard(tmp_path / "run", tmp_path / "other", config=qwen3, **other)
        api.convert(qwen3, tmp_path / "wanted", target=target, scan_layers=not scan)
        assert_equal(tmp_path / "other", tmp_path / "wanted")


# -- the engine -------------------------------------------------------------------------------------------------------


def test_a_killed_run_continues(qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "SLAB_BYTES", 4096)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 8192)
    api.convert(qwen3, tmp_path / "a")
    make, made = ReshardWork._make, []

    def killed(self, unit, journal, store):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(unit.uid)
        return make(self, unit, journal, store)

    monkeypatch.setattr(ReshardWork, "_make", killed)
    with pytest.raises(KeyboardInterrupt):
        api.reshard(tmp_path / "a", tmp_path / "b", mesh=MESH, jobs=1)
    assert not (tmp_path / "b").exists()
    again = []
    monkeypatch.setattr(ReshardWork, "_make", lambda *a: again.append(a[1].uid) or make(*a))
    api.reshard(tmp_path / "a", tmp_path / "b", mesh=MESH, jobs=1)
    assert not set(made) & set(again)
    assert_equal(tmp_path / "b", tmp_path / "a")
    assert api.reshard(tmp_path / "a", tmp_path / "b", mesh=MESH).already_there
    with pytest.raises(TpuconvError, match="exists"):
        api.reshard(tmp_path / "a", tmp_path / "b", mesh={"data": 4})


def test_two_processes_share_the_work(qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "UNIT_BYTES", 8192)
    api.convert(qwen3, tmp_path / "a")
    first = api.reshard(tmp_path / "a", tmp_path / "b", mesh=MESH, part=ProcessPart(0, 2))
    assert not first.published
    assert api.reshard(tmp_path / "a", tmp_path / "b", mesh=MESH, part=ProcessPart(1, 2)).published
    assert_equal(tmp_path / "b", tmp_path / "a")


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_the_output_lies_outside_of_what_is_read(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "known", target="maxtext", scan_layers=True)
    save_step(tmp_path / "run", 7, trained_tree(tmp_path / "known"))
    with pytest.raises(UsageError, match="lies in the source folder"):
        api.reshard(tmp_path / "run", qwen3 / "out", config=qwen3, mesh=MESH)
    assert not (qwen3 / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing is to be changed"),
        (("--mesh", "rows=2"), "'rows' is not the name of one axis"),
        (("--mesh", "fsdp=2,data=2"), "is not the name of one axis"),
        (("--scan-layers", "--unscan-layers"), "exclude each other"),
        (("--mesh", "data=2", "--target", "maxtext"), "needs --config"),
    ],
)
def test_mistakes_are_named(words, message, qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "a")
    done = command("reshard", tmp_path / "a", tmp_path / "b", *words, code=2)
    assert message in " ".join(done.stderr.split())


def test_the_command(qwen3, tmp_path):
    api.convert(qwen3, tmp_path / "a")
    words = ("reshard", tmp_path / "a", tmp_path / "b", "--mesh", "fsdp=2")
    plan = json.loads(command(*words, "--dry-run", "--json").stdout)
    assert not (tmp_path / "b").exists()
    assert plan["mesh"] == {"data": 2}
    done = json.loads(command(*words, "--json").stdout)
    assert {key: done[key] for key in plan} == plan
    assert "exists already" in command(*words).stdout
