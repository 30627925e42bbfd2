"""Equal sources give equal outputs, byte for byte, wherever they lie: no path and no time is written."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.attacks import made
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, in_memory
from helpers.trainers import save_standard, trained_tree
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import OutputError, UsageError
from tpuconv.location import Location, to_location
from tpuconv.sources import damaged
from tpuconv.storage.sealed import read_sealed, seal


def trained(base: Path) -> Path:
    """What a trainer saved of the source: its arrays, by Orbax alone."""
    api.convert(base / "model", base / "nnx", target="nnx", jobs=1)
    return save_standard(base / "run", trained_tree(base / "nnx"))


def adapter(base: Path, name: str) -> str:
    return str(made.adapter(base / name, base / "model"))


OUTPUTS: dict[str, Callable[[Location, Path, int], object]] = {
    "orbax": lambda base, out, jobs: api.convert(base / "model", out, jobs=jobs),
    "compressed": lambda base, out, jobs: api.convert(base / "model", out, jobs=jobs, compress=True),
    "a part": lambda base, out, jobs: api.convert(base / "model", out, jobs=jobs, layers=range(0, 1)),
    "with an adapter": lambda base, out, jobs: api.convert(
        base / "model", out, jobs=jobs, adapter=[adapter(out.parent, f"adapter-{jobs}")]
    ),
    "quantized": lambda base, out, jobs: api.convert(base / "model", out, jobs=jobs, quantize="int8_weight_only"),
    "safetensors": lambda base, out, jobs: api.convert(base / "model", out, jobs=jobs, target="huggingface"),
    "quantized after": lambda base, out, jobs: api.quantize(
        api.convert(base / "model", base / f"q{jobs}").out, out, config="int8_weight_only", jobs=jobs
    ),
    "exported": lambda base, out, jobs: api.export(api.convert(base / "model", base / f"e{jobs}").out, out),
}


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    """Two copies of one source in folders of other names and depths, with other times."""
    first, second = tmp_path / "one", tmp_path / "an/other"
    made.source(first / "a" / "a-model", shards=2)
    shutil.copytree(first / "a" / "a-model", second / "copied")
    for path in (second / "copied").iterdir():
        os.utime(path, (1, 1))
    (first / "model").symlink_to(first / "a" / "a-model")
    (second / "model").symlink_to(second / "copied")
    return first, second


@pytest.mark.parametrize("kind", OUTPUTS)
def test_copies_of_a_source_give_the_same_bytes(kind, copies):
    first, second = copies
    OUTPUTS[kind](first, first / "x", 1)
    OUTPUTS[kind](second, second / "y", 3)
    written = contents(first / "x")
    assert written == contents(second / "y")
    for name, data in written.items():
        for word in (b"a-model", b"copied", str(first.parent).encode()):
            assert word not in (data or b""), name


@pytest.mark.parametrize(
    "kind", [kind if kind == "orbax" else pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(OUTPUTS)]
)
def test_a_copy_in_a_bucket_gives_the_same_bytes(kind, copies, monkeypatch):
    first, second = copies
    bucket, there = in_memory(monkeypatch), to_location(f"{ROOT}/far/away")
    for name, data in contents(second / "copied").items():
        bucket.put(f"far/away/model/{name}", data)
    OUTPUTS[kind](first, first / "x", 1)
    OUTPUTS[kind](there, first / "y", 3)
    assert contents(first / "x") == contents(first / "y")


EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-qwen3"
INNER = r"layers/\d+/(attn|mlp)/.*"
CALIBRATIONS = {
    "gptq": ("weight_qtype: int4, tile_size: 32", "gptq"),
    "awq": ("weight_qtype: int4, tile_size: 32", "awq"),
    "smooth_quant": ("weight_qtype: int8, act_qtype: int8", "smooth_quant"),
    "static": ("weight_qtype: int8, act_qtype: int8, act_static_scale: true, act_batch_axes: [0, 1]", "gptq"),
}
CALIBRATE = """
import sys
from pathlib import Path
from tpuconv import api
api.quantize(*sys.argv[1:3], config=Path(sys.argv[3]), samples=16, length=256)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
@pytest.mark.parametrize("method", CALIBRATIONS)
def test_a_calibration_does_not_depend_on_the_number_of_processors(method, tmp_path):
    """A model that was trained: of random weights rounded values seldom change."""
    api.convert(EXAMPLE, tmp_path / "ckpt")
    rule, name = CALIBRATIONS[method]
    rules = f"qwix: {{rules: [{{module_path: '{INNER}', {rule}}}]}}\ncalibration: {{method: {name}}}\n"
    (tmp_path / "config.yaml").write_text(rules)
    given = list(map(str, sorted(os.sched_getaffinity(0))))
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # tests set it to one
    for out, processors in (("one", given[:1]), ("all", given)):
        child = [sys.executable, "-c", CALIBRATE, tmp_path / "ckpt", tmp_path / out, tmp_path / "config.yaml"]
        subprocess.run(["taskset", "-c", ",".join(processors), *child], env=own, check=True)
    assert contents(tmp_path / "one") == contents(tmp_path / "all")


def test_copies_of_what_a_trainer_saved(copies):
    first, second = copies
    run = trained(first)
    shutil.copytree(run, second / "run-2")
    api.export(run, first / "x", config=first / "model")
    api.export(second / "run-2", second / "y", config=second / "model")
    assert contents(first / "x") == contents(second / "y")
    assert api.export(run, first / "x", config=first / "model").already_there
    array = next(path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size > 4096)
    os.utime(array, (2, 2))
    with pytest.raises(OutputError, match="may have changed since it was made"):
        api.export(run, first / "x", config=first / "model")


def test_a_rerun_reads_no_weights_where_the_source_is_known(copies, monkeypatch):
    """Where it is not, hashes are compared, once."""
    first, second = copies
    read: list[Path] = []
    hashed = damaged.hash_of
    for module in ("tpuconv.convert.run.conversion", "tpuconv.sources.shard"):
        monkeypatch.setattr(f"{module}.hash_of", lambda path, name: read.append(path) or hashed(path, name))
    api.convert(first / "model", first / "out")
    assert api.convert(first / "model", first / "out").already_there
    assert not read
    assert api.convert(second / "model", first / "out").already_there
    assert len(read) == 2
    assert api.convert(second / "model", first / "out").already_there
    assert len(read) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # it cannot be written: all works, and files are read
    assert api.convert(first / "model", first / "out").already_there
    assert api.convert(first / "model", first / "out").already_there
    assert len(read) == 6


def test_a_part_is_compared_by_stamps_alone(copies):
    """Of a trial of some layers no file was hashed: another copy may have other values."""
    first, second = copies
    api.convert(first / "model", first / "out", layers=range(0, 1))
    assert api.convert(first / "model", first / "out", layers=range(0, 1)).already_there
    with pytest.raises(OutputError, match="only a part of the file was read"):
        api.convert(second / "model", first / "out", layers=range(0, 1))


def test_the_source_of_a_checkpoint_is_found(copies, monkeypatch):
    """Of a quantized one, and of one that was sealed again, too. On another machine it is asked for."""
    from tpuconv.verify.preparation import find_source_folder

    first, _ = copies
    monkeypatch.setenv("XDG_CACHE_HOME", str(first / "cache"))  # other tests convert the same bytes in other folders
    out = api.convert(first / "model", first / "out").out
    quantized = api.quantize(out, first / "int8", config="int8_weight_only").out
    (out / "LICENSE").write_text("another one")
    api.verify(out, update=True)
    for folder in (out, quantized):
        assert find_source_folder(read_manifest(folder)) == (first / "model").resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(first / "empty"))
    shutil.copytree(first / "a" / "a-model", first / "beside")
    assert find_source_folder(read_manifest(quantized)) in (first / "beside", first / "model")
    moved = first / "moved" / "out"
    moved.parent.mkdir()
    out = out.rename(moved)
    monkeypatch.chdir(moved.parent)
    with pytest.raises(UsageError, match="a local folder, which a checkpoint does not name") as info:
        find_source_folder(read_manifest(out))
    assert "`source=FOLDER`" in str(info.value.hint)


def test_outputs_of_older_versions(copies):
    """Format 2 named the folder and had stamps. It is read as before, and what is made of it names none."""
    from tpuconv.verify.preparation import find_source_folder

    first, _ = copies
    out = api.convert(first / "model", first / "out").out
    raw = dict(read_sealed(out).raw)
    shards = {name: facts | {"stamp": "0" * 16} for name, facts in raw["source"]["shards"].items()}
    source = raw["source"] | {"folder": str(first / "a" / "a-model"), "shards": shards}
    (out / "tpuconv.json").write_bytes(seal(raw | {"format": 2, "source": source}))
    assert api.verify(out).passed
    assert find_source_folder(read_manifest(out)) is not None
    for made_of in (
        api.quantize(out, first / "int8", config="int8_weight_only").out,
        api.export(out, first / "again").out,
    ):
        text = (made_of / "tpuconv.json").read_text()
        assert "a-model" not in text
        assert '"stamp"' not in text
