"""Two sources never count as one, two writers never share an output, and what is not tpuconv's is left alone."""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.processes import started
from helpers.attacks.simulated import contents, copy_tree, simulated
from helpers.times import HANG
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import OutputError, TpuconvError, UsageError
from tpuconv.sources import shard
from tpuconv.storage.journal import WORK
from tpuconv.storage.sealed import STAGED
from tpuconv.verify.checksums import check_checkpoint


def without_times(folder: Path) -> Path:
    """As archives, images and stores with fixed times have it."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (0, 0))
    return folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with made.folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def alike(tmp_path_factory) -> Iterator[dict[str, Path]]:
    """Sources of the same name with the same names of files, sizes and times, and other values; and what comes of
    each. Samples of values, which tell such small ones apart, are not taken, as if they had met what is the same."""
    base = tmp_path_factory.mktemp("alike")
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "SAMPLE_BYTES", 0)
        for i, name in enumerate("AB"):
            folder = made.source(base / name / "model", i, shards=2)
            for companion in made.COMPANIONS:  # which are hashed as they are found
                shutil.copyfile(folders.get("A", folder) / companion, base / "same")
                shutil.copyfile(base / "same", folder / companion)
            folders[name] = without_times(folder)
            made.convert(folders[name], base / f"out-{name}")
            folders[f"out-{name}"] = base / f"out-{name}"
        files = {p.name: p.stat().st_size for p in folders["A"].iterdir()}
        assert files == {p.name: p.stat().st_size for p in folders["B"].iterdir()}
        assert made.plan_of(folders["A"]).fingerprint == made.plan_of(folders["B"]).fingerprint
        yield folders


def arrays(out: Path) -> dict[str, bytes | None]:
    """What an output holds of the weights."""
    return {name: data for name, data in contents(out).items() if name.startswith("params/")}


def is_whole(out: Path) -> bool:
    return not [checked for checked in check_checkpoint(read_manifest(out)) if checked.fault]


def changed_source(alike: dict[str, Path], folder: Path, change: str, rng: random.Random) -> Path:
    """In the place of A: B, by a copy over its files or a new folder, or A with a flipped bit; with the same times."""
    if change == "another's values":
        for path in alike["B"].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    elif change == "another folder":
        shutil.rmtree(folder)
        shutil.copytree(alike["B"], folder)
    else:
        path = folder / rng.choice(sorted(p.name for p in folder.glob("*.safetensors")))
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        at = rng.randrange(start, len(data))
        data[at] ^= 1 << rng.choice((0, 1, 2))
        path.write_bytes(data)
    return without_times(folder)


CHANGES = ("another's values", "another folder", *["a flipped byte"] * 4)


@pytest.mark.parametrize("change", CHANGES[:3])
def test_after_a_finished_conversion(change, alike, tmp_path):
    after_a_finished_conversion(change, alike, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES[:3])
def test_after_a_finished_conversion_often(change, alike, tmp_path):
    after_a_finished_conversion(change, alike, tmp_path, 100)


def after_a_finished_conversion(change: str, alike: dict[str, Path], base: Path, times: int) -> None:
    """Another source is refused, or its output is right."""
    rng, src, out = random.Random(change), base / "model", base / "out"
    for _ in range(times):
        shutil.rmtree(src, ignore_errors=True)
        shutil.copytree(alike["A"], src)
        made.convert(without_times(src), out)
        before = contents(out)
        changed_source(alike, src, change, rng)
        with pytest.raises(OutputError, match="exists already"):
            made.convert(src, out)
        assert contents(out) == before
        made.convert(src, out, overwrite=True)
        assert arrays(out) != arrays(alike["out-A"])
        assert is_whole(out)
        shutil.rmtree(out)
        count("source changed after its conversion", change)


def resumed_with_another(change: str, alike: dict[str, Path], base: Path, step: int) -> None:
    """A conversion that was killed before any call goes on with a source that changed: the output is that of the source
    as it is now."""
    src, out = base / "model", base / "out"
    shutil.copytree(alike["A"], src)
    with simulated() as whole:
        made.convert(without_times(src), out)
    calls = len(whole.calls)
    for at in range(1, calls, step):
        rng = random.Random(at)
        shutil.rmtree(src)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(base / ".out.tpuconv", ignore_errors=True)
        shutil.copytree(alike["A"], src)
        without_times(src)
        with simulated(at) as it:
            made.convert(src, out)
        assert it.is_dead
        changed_source(alike, src, change, rng)
        shutil.rmtree(base / "right", ignore_errors=True)
        made.convert(src, base / "right")
        where = f"killed before {whole.calls[at]}"
        refused = False
        try:
            made.convert(src, out)
        except OutputError:
            refused = True
        if refused:
            made.convert(src, out, overwrite=True)
        assert arrays(out) == arrays(base / "right"), where
        assert contents(out).keys() == contents(base / "right").keys(), where
        assert is_whole(out), where
        count("source changed in a killed conversion", f"{change}: {'refused' if refused else 'right'}")


@pytest.mark.parametrize("change", ["another's values", "a flipped byte"])
def test_resumed_with_another_source_a_few(change, alike, tmp_path):
    resumed_with_another(change, alike, tmp_path, 19)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES[:3])
def test_resumed_with_another_source(change, alike, tmp_path):
    resumed_with_another(change, alike, tmp_path, 1)


def test_resumed_just_before_it_is_published(alike, tmp_path):
    """All is done then, and the output is complete: it is still not that of the new source."""
    src, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(alike["A"], src)
    with simulated() as whole:
        made.convert(without_times(src), out)
    published = next(i for i, (name, path) in enumerate(whole.calls) if name == "rename" and path.endswith("/out"))
    for change in CHANGES[:3]:
        shutil.rmtree(out)
        shutil.rmtree(src)
        shutil.copytree(alike["A"], without_times(src) if src.exists() else src)
        with simulated(published):
            made.convert(without_times(src), out)
        assert not out.exists()
        assert (tmp_path / ".out.tpuconv/complete.done").exists()
        changed_source(alike, src, change, random.Random(1))
        (src / "LICENSE").unlink()
        made.convert(src, tmp_path / "right", overwrite=True)
        try:
            made.convert(src, out)
        except OutputError:
            made.convert(src, out, overwrite=True)
        assert arrays(out) == arrays(tmp_path / "right")
        assert is_whole(out)
        count("source changed in a killed conversion", f"{change}: complete, not yet published")


def test_the_same_source_elsewhere_is_the_same(alike, tmp_path, monkeypatch):
    """Moved or copied, it is told by its sha256; a single byte in it that differs is found by that."""
    out, moved = tmp_path / "out", tmp_path / "elsewhere" / "model"
    shutil.copytree(alike["A"], tmp_path / "model")
    made.convert(tmp_path / "model", out)
    before = contents(out)
    shutil.copytree(tmp_path / "model", moved)
    made.convert(moved, out)
    shutil.rmtree(moved)
    (tmp_path / "model").rename(moved)
    made.convert(moved, out)
    without_times(moved)
    made.convert(moved, out)
    assert contents(out) == before
    count("the same source", "moved, copied, with other times", 3)


def test_of_the_hub_the_promised_hash_decides(alike, tmp_path):
    """Another commit is another source, even of the same sizes; the same commit in another cache is the same."""
    import hashlib

    def origin(name: str) -> dict[str, object]:
        hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in alike[name].glob("*.safetensors")}
        return {"repo": "org/model", "commit": "c" * 40, "sha256": hashes}

    out = tmp_path / "out"
    made.convert(alike["A"], out, **origin("A"))
    made.convert(shutil.copytree(alike["A"], tmp_path / "cache"), out, **origin("A"))
    with pytest.raises(OutputError, match="exists already"):
        made.convert(alike["B"], out, **origin("B"))
    with pytest.raises(TpuconvError) as info:  # what is there is not what was promised
        made.convert(alike["B"], tmp_path / "other", **origin("A"))
    assert info.value.exit_code in (4, 7)
    assert not (tmp_path / "other").exists()
    with simulated() as whole:
        made.convert(alike["A"], tmp_path / "killed", **origin("A"))
    for at in range(5, len(whole.calls) - 10, 16):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        shutil.rmtree(tmp_path / ".killed.tpuconv", ignore_errors=True)
        with simulated(at):
            made.convert(alike["A"], tmp_path / "killed", **origin("A"))
        try:
            made.convert(alike["B"], tmp_path / "killed", **origin("B"))
        except OutputError:
            made.convert(alike["B"], tmp_path / "killed", overwrite=True, **origin("B"))
        assert arrays(tmp_path / "killed") == arrays(alike["out-B"])
        count("source of the Hub", "killed, resumed with another")


# -- two writers ------------------------------------------------------------------------------------------------------


def two_at_once(base: Path, sources: tuple[Path, Path], options: list[str], delay: float) -> list[str]:
    """Two processes write one output; one wins. How each ended."""
    out = base / "out"
    with ExitStack() as running:
        processes = []
        for source in sources:
            words = ("convert", source, out, *options)
            process = running.enter_context(started(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
            processes.append(process)
            time.sleep(delay)
        ends = [process.communicate(timeout=HANG)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 9}, ends
    assert 0 in codes, ends
    for code, error in zip(codes, ends, strict=True):
        assert not code or "is being written by another process" in error or "exists already" in error, error
    assert is_whole(out)
    assert sorted(path.name for path in base.iterdir()) == ["out"]
    return [str(code) for code in codes]


def race(alike: dict[str, Path], base: Path, rounds: int) -> None:
    rng = random.Random(0)
    results = {name: arrays(alike[f"out-{name}"]) for name in "AB"}
    for i in range(rounds):
        which, options = ("AA", "AB")[i % 2], ["--overwrite"] * (i % 4 > 1)
        ends = two_at_once(base, (alike[which[0]], alike[which[1]]), options, rng.choice((0, 0.02, 0.1, 0.3)))
        assert arrays(base / "out") in [results[name] for name in which]
        count("two writers", f"{'same' if which == 'AA' else 'other'} plan, exits {' and '.join(sorted(ends))}")
        if i % 8 != 6:  # which the next two replace
            shutil.rmtree(base / "out")


def test_two_writers_a_few_times(alike, tmp_path):
    race(alike, tmp_path, 2)


@pytest.mark.slow
def test_two_writers(alike, tmp_path):
    race(alike, tmp_path, 80)


def test_a_second_writer_is_refused_at_once(alike, tmp_path):
    from tpuconv.storage.journal import Journal

    with Journal(tmp_path / "out", "x") as journal:
        journal.begin()
        before = contents(journal.folder)
        for overwrite in (False, True):
            began = time.monotonic()
            with pytest.raises(OutputError, match="is being written by another process"):
                made.convert(alike["A"], tmp_path / "out", overwrite=overwrite)
            assert time.monotonic() - began < HANG
        assert contents(journal.folder) == before


def test_a_lock_of_the_dead_is_taken_over(alike, tmp_path):
    (tmp_path / ".out.tpuconv").mkdir()
    for mark in (b"", b"work folder", b"work folder of tpuconv\n"):
        (tmp_path / ".out.tpuconv" / WORK).parent.mkdir(exist_ok=True)
        (tmp_path / ".out.tpuconv" / WORK).write_bytes(mark)
        made.convert(alike["A"], tmp_path / "out", overwrite=True)
        assert os.listdir(tmp_path) == ["out"]
        shutil.rmtree(tmp_path / "out")
        count("work folder", "a stale lock")


# -- what is not ours -------------------------------------------------------------------------------------------------


def strangers_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def older_version(folder: Path) -> None:
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    (folder / "journal").mkdir()
    (folder / "journal" / "u00000.json").write_text("{}")


def link_to_anothers(folder: Path) -> None:
    own = folder.parent / "mine"
    own.mkdir()
    (own / WORK).write_bytes(b"work folder of tpuconv\n")
    (own / "thesis.txt").write_text("years of work")
    folder.symlink_to(own)


def strangers_lock(folder: Path) -> None:
    folder.mkdir()
    (folder / WORK).write_text("pid 17")


def linked_lock(folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "secret").write_text("mine")
    (folder / WORK).symlink_to(folder.parent / "secret")


def a_file(folder: Path) -> None:
    folder.write_text("mine")


def dangling_link(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


def file_beside_a_forged_mark(folder: Path) -> None:
    folder.mkdir()
    (folder / WORK).write_text("work folder")
    (folder / "notes.txt").write_text("mine")


WORK_FOLDERS = (strangers_file, older_version, link_to_anothers, strangers_lock, linked_lock, a_file, dangling_link,
                file_beside_a_forged_mark)  # fmt: skip


def tree(folder: Path) -> dict[str, object]:
    """Everything under a folder, links as links."""
    out: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        link = os.readlink(path) if path.is_symlink() else None
        out[name] = link or (path.read_bytes() if path.is_file() else None)
    return out


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", WORK_FOLDERS)
def test_a_work_folder_of_somebody_else_is_left_alone(make, overwrite, alike, tmp_path):
    make(tmp_path / ".out.tpuconv")
    before = tree(tmp_path)
    with pytest.raises(TpuconvError) as info:
        made.convert(alike["A"], tmp_path / "out", overwrite=overwrite)
    assert info.value.exit_code == (2 if make is linked_lock else 9)
    assert str(tmp_path) in str(info.value)
    assert tree(tmp_path) == before
    count("work folder", make.__name__.replace("_", " "))


def empty_manifest(out: Path, alike: dict[str, Path]) -> None:
    out.mkdir()
    (out / "tpuconv.json").write_bytes(b"")
    (out / "data.db").write_text("mine")


def only_an_empty_manifest(out: Path, alike: dict[str, Path]) -> None:
    out.mkdir()
    (out / "tpuconv.json").write_text("{}")


def own_file_beside_a_manifest(out: Path, alike: dict[str, Path]) -> None:
    shutil.copytree(alike["out-A"], out)
    (out / "notes.txt").write_text("mine")


def own_folder_beside_a_manifest(out: Path, alike: dict[str, Path]) -> None:
    shutil.copytree(alike["out-A"], out)
    (out / "experiments").mkdir()
    (out / "experiments" / "1.txt").write_text("mine")


def anothers_folder(out: Path, alike: dict[str, Path]) -> None:
    out.mkdir()
    (out / "main.py").write_text("print()")


def file_of_the_user(out: Path, alike: dict[str, Path]) -> None:
    out.write_text("mine")


def manifest_of_another_program(out: Path, alike: dict[str, Path]) -> None:
    out.mkdir()
    (out / "tpuconv.json").write_text('{"format": 2, "fingerprint": 5, "mine": true}')
    (out / "x").write_text("mine")


def cut_manifest(out: Path, alike: dict[str, Path]) -> None:
    shutil.copytree(alike["out-A"], out)
    data = (out / "tpuconv.json").read_bytes()
    (out / "tpuconv.json").write_bytes(data[: len(data) // 2])


OUTS = (empty_manifest, only_an_empty_manifest, own_file_beside_a_manifest, own_folder_beside_a_manifest,
        anothers_folder, file_of_the_user, manifest_of_another_program, cut_manifest)  # fmt: skip


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", OUTS)
def test_what_tpuconv_did_not_make_is_not_deleted(make, overwrite, alike, tmp_path):
    """And the error says what is in it."""
    make(tmp_path / "out", alike)
    before = tree(tmp_path)
    with pytest.raises(OutputError) as info:
        made.convert(alike["B"], tmp_path / "out", overwrite=overwrite)
    assert tree(tmp_path) == before
    if overwrite:
        names = {name.removeprefix("out/").partition("/")[0] for name in before if name != "out"}
        assert any(name in str(info.value) for name in names) or "it is not a folder" in str(info.value)
    count("overwriting what is not ours", make.__name__.replace("_", " "))


def test_an_empty_folder_and_our_own_outputs_are_replaced(alike, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    made.convert(alike["A"], out, overwrite=True)
    made.convert(alike["B"], out, overwrite=True)
    assert arrays(out) == arrays(alike["out-B"])
    (out / STAGED).touch()
    made.convert(alike["A"], out, overwrite=True)
    assert contents(out) == contents(alike["out-A"])


# -- OUT as a link ----------------------------------------------------------------------------------------------------


def test_what_out_links_to_is_written(alike, tmp_path):
    """The link stays, and the work lies beside what it leads to."""
    real, link = tmp_path / "disk" / "real", tmp_path / "out"
    real.parent.mkdir()
    copy_tree(alike["out-A"], real)
    link.symlink_to(real)
    with pytest.raises(OutputError):
        made.convert(alike["B"], link)
    made.convert(alike["B"], link, overwrite=True)
    assert os.readlink(link) == str(real)
    assert contents(real) == contents(alike["out-B"])
    made.convert(alike["B"], link)
    assert sorted(os.listdir(tmp_path)) == ["disk", "out"]
    assert os.listdir(real.parent) == ["real"]
    count("OUT is a link", "to an output")


def test_out_goes_up_from_a_link(alike, tmp_path, monkeypatch):
    """The system follows the link first: `..` is the folder in which its target lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/deep")
    made.convert(alike["A"], Path("link/../out"))
    assert contents(tmp_path / "disk" / "out") == contents(alike["out-A"])
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
    with pytest.raises(UsageError, match="leads through a folder that does not exist"):
        made.convert(alike["A"], Path("nothing/../out"))
    made.convert(alike["A"], Path("disk/../new/out"))
    assert contents(tmp_path / "new" / "out") == contents(alike["out-A"])
    count("OUT is a link", "before ..")


def test_out_is_a_dangling_link(alike, tmp_path):
    link = tmp_path / "out"
    link.symlink_to("later/there")
    made.convert(alike["A"], link)
    assert link.is_symlink()
    assert arrays(tmp_path / "later/there") == arrays(alike["out-A"])
    assert os.listdir(tmp_path / "later") == ["there"]
    count("OUT is a link", "to nothing")


@pytest.mark.parametrize("overwrite", [False, True])
def test_out_is_a_link_to_itself_or_to_a_strangers(overwrite, alike, tmp_path):
    loop, stranger, link = tmp_path / "loop", tmp_path / "stranger", tmp_path / "link"
    loop.symlink_to(loop)
    stranger.mkdir()
    (stranger / "mine.txt").write_text("mine")
    link.symlink_to(stranger)
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="leads to itself"):
        made.convert(alike["A"], loop, overwrite=overwrite)
    with pytest.raises(OutputError):
        made.convert(alike["A"], link, overwrite=overwrite)
    assert tree(tmp_path) == before
    count("OUT is a link", "to itself or to a stranger's folder", 2)
