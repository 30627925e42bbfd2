"""What a machine or its users may do that nobody thinks of, tried on every command that publishes, with and without an
old output, on a disk and in a bucket. The cases are made from tables, and each kind is counted under its own name."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import PermissionDeniedError

import tpuconv
from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.publishers import PUBLISHERS, Command, Publishers, publishers, small
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, MemoryBucket, in_memory, objects
from tpuconv import api, buckets
from tpuconv.bucket_errors import translated
from tpuconv.errors import AccessRefused, OutputError, TpuconvError, UsageError
from tpuconv.location import Location, to_location
from tpuconv.storage import claim as claims

SAMPLES = {"disk-convert --overwrite", "bucket-export --overwrite"}
"""Of each attack these are fast."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publishers]:
    base = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        new = made.source(base / "new")
        yield publishers(base, new, made.source(base / "other", 1, rms_norm_eps=1e-5, num_hidden_layers=2))


class Place:
    """A folder on a disk or in a bucket, in which a command writes `out`."""

    def __init__(self, name: str, folder: Path, patch: pytest.MonkeyPatch):
        self.name, self.folder = name, folder
        self.bucket = in_memory(patch) if name == "bucket" else None
        self.base: Location = to_location(f"{ROOT}/models") if self.bucket else folder
        self.out = self.base / "out"
        self.work = "out.tpuconv" if self.bucket else ".out.tpuconv"

    def put(self, name: str, data: bytes = b"mine") -> None:
        if self.bucket is not None:
            self.bucket.put(f"models/{name}", data)
        else:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        if self.bucket is not None:
            self.bucket.delete([f"models/{name}"])
            return
        (self.folder / name).unlink()
        for parent in (self.folder / name).relative_to(self.folder).parents:
            with suppress(OSError):  # it is not empty
                (self.folder / parent).rmdir()

    def files(self) -> dict[str, Any]:
        return dict(objects(str(self.base)) if self.bucket is not None else contents(self.folder))


CASES = [
    pytest.param(place, name, overwrite, id=title, marks=[pytest.mark.slow] * (title not in SAMPLES))
    for place in ("disk", "bucket")
    for name in PUBLISHERS
    for overwrite in (False, True)
    for title in [f"{place}-{name}{' --overwrite' * overwrite}"]
]
every_command = pytest.mark.parametrize(("place", "name", "overwrite"), CASES)
every_overwrite = pytest.mark.parametrize(("place", "name", "overwrite"), [case for case in CASES if case.values[2]])


def begun(place: str, name: str, overwrite: bool, sources: Publishers, base: Path, patch: Any) -> Place:
    found = Place(place, base, patch)
    if overwrite:
        sources.old[name](found.out, False)
    return found


def refused(kind: str, at: Place, name: str, run: Callable[[], object], *words: str) -> None:
    """The command ends with exit code 9 or 2 and names what is in its way; all is as it was."""
    before = at.files()
    with pytest.raises((OutputError, UsageError)) as info:
        run()
    assert all(word in str(info.value) for word in words), info.value
    assert at.files() == before
    count(kind, f"{name}, {at.name}")


STRANGE_NAMES = (
    *("thesis.tex", "tpuconv.json", "plan.done", "claim.txt", "x/y/z", "0" * 32, "source/model", "lock.1"),
)


@every_command
def test_neighbours(place, name, overwrite, sources, tmp_path, monkeypatch):
    """A folder that has the name of the work folder, and belongs to others."""
    at = begun(place, name, overwrite, sources, tmp_path, monkeypatch)
    for strange in STRANGE_NAMES:
        at.put(f"{at.work}/{strange}")
        refused("neighbours of OUT", at, name, lambda: sources.run[name](at.out, overwrite), at.work)
        at.remove(f"{at.work}/{strange}")
    sources.run[name](at.out, overwrite)
    assert not [each for each in at.files() if each.startswith(at.work)]


@every_command
def test_files_of_others_inside(place, name, overwrite, sources, tmp_path, monkeypatch):
    at = begun(place, name, overwrite, sources, tmp_path, monkeypatch)
    for strange in ("thesis.tex", "params/notes.txt", "params/step_4/c.0", "0/items/x", ".hidden", "hf/config.json"):
        at.put(f"out/{strange}")
        words = [strange] if overwrite else ["exists"]
        refused("files of others in OUT", at, name, lambda: sources.run[name](at.out, overwrite), *words)
        at.remove(f"out/{strange}")
    sources.run[name](at.out, overwrite)


@every_command
def test_nested_outputs(place, name, overwrite, sources, tmp_path, monkeypatch):
    """OUT in an output, and an output in OUT, one or two folders deep."""
    at = begun(place, name, overwrite, sources, tmp_path, monkeypatch)
    for inner in ("llama", "a/b"):
        for of_other in (False, True):
            command = (sources.old if of_other else sources.run)[name]
            sources.old["export"](at.base / "apart", False)
            for file, data in list(at.files().items()):
                if file.startswith("apart/") and data is not None:
                    at.put(f"out/{inner}/{file.removeprefix('apart/')}", data)
                    at.remove(file)
            refused("nested outputs", at, name, lambda c=command: c(at.out, overwrite), *[inner] * overwrite)
            for file, data in list(at.files().items()):
                if file.startswith(f"out/{inner}/") and data is not None:
                    at.remove(file)
    if not overwrite:
        sources.run[name](at.out, False)
    refused("nested outputs", at, name, lambda: sources.run[name](at.out / "inner", overwrite), "another output")


@every_overwrite
def test_rewritten_files(place, name, overwrite, sources, tmp_path, monkeypatch):
    """Files of an output that their owner wrote again, of the same size or another, are named and stay."""
    at = begun(place, name, overwrite, sources, tmp_path, monkeypatch)
    was = {file: data for file, data in at.files().items() if data and file != "out/tpuconv.json"}
    for file in sorted(was)[:: max(1, len(was) // 12)]:
        for data in (was[file] + b"1", bytes([was[file][0] ^ 1]) + was[file][1:]):
            at.put(file, data)
            run, word = lambda: sources.run[name](at.out, True), file.removeprefix("out/")
            refused("rewritten files", at, name, run, word, "was changed since tpuconv wrote it")
        at.put(file, was[file])
    sources.run[name](at.out, True)


# --- what happens while a command runs -------------------------------------------------------------------------------


class Meanwhile(MemoryBucket):
    """A bucket in which, before the request with the number `moment`, all threads of the command stand still until
    something else is done."""

    def __init__(self) -> None:
        super().__init__()
        self.moment, self.act = -1, lambda: None
        self._stopped: set[threading.Thread] = set()
        self._going_on = threading.Event()
        self._going_on.set()
        self._looking = threading.Lock()

    def _request(self, what: str, act: Callable[[], Any]) -> Any:
        with self._looking:
            is_now = len(self.log) == self.moment and not self._stopped
            if is_now:
                self._going_on.clear()
                self._stopped = set(threading.enumerate())
        if is_now:
            other = threading.Thread(target=self.act)
            other.start()
            other.join()
            self._going_on.set()
        elif threading.current_thread() in self._stopped:
            self._going_on.wait()
        return super()._request(what, act)


def ended(codes: dict[str, int], who: str, run: Command, *arguments: Any) -> None:
    """Runs a command, and notes its exit code."""
    codes[who] = 0
    try:
        run(*arguments)
    except TpuconvError as e:
        codes[who] = e.exit_code


def lapsed_unless(is_same: bool, run: Callable[[], object]) -> None:
    """Runs a command as on another machine, after five minutes, unless it is the same command at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_same:
            patch.setattr(claims, "LAPSED_SECONDS", -1)
        run()


def moments(requests: int, is_slow: bool) -> Sequence[int]:
    return (
        range(1, requests) if is_slow else range(3, requests, max(1, requests // 3))
    )  # 3: what a store can do is tried


@pytest.mark.parametrize("kind", ["suspended writers", "duplicates of a command"])
@pytest.mark.parametrize(
    ("name", "overwrite", "is_slow"),
    [
        pytest.param(name, o, slow, id=f"{name}{' --overwrite' * o}-{slow}", marks=[pytest.mark.slow] * slow)
        for slow in (False, True)
        for name in PUBLISHERS
        for o in (False, True)
        if slow or (name, o) == ("convert", True)
    ],
)
def test_another_command_at_every_request(kind, name, overwrite, is_slow, sources, monkeypatch):
    """Another plan that takes the claim over and is published, while the first command stands still: nothing of it is
    changed when that goes on. Or the same command again: one of them finishes."""
    monkeypatch.setattr("tpuconv.buckets.REQUESTS", 1)
    is_same = kind.startswith("duplicates")
    if not is_same:
        monkeypatch.setattr(claims, "this_machine", lambda: "")
    out = to_location(f"{ROOT}/out")
    first, second = sources.run[name], (sources.run if is_same else sources.old)[name]
    right: dict[str, dict[str, bytes]] = {}
    requests: dict[str, int] = {}
    for who, run in (("first", first), ("second", second)):
        monkeypatch.setitem(buckets.OPEN, ROOT, bucket := Meanwhile())
        if overwrite:
            sources.old[name](out, False)
        start = len(bucket.log)
        run(out, overwrite)
        right[who], requests[who] = objects(f"{ROOT}/out"), len(bucket.log) - start
    for at in moments(requests["first"], is_slow):
        monkeypatch.setitem(buckets.OPEN, ROOT, bucket := Meanwhile())
        if overwrite:
            sources.old[name](out, False)
        bucket.moment = len(bucket.log) + at
        codes: dict[str, int] = {}
        bucket.act = partial(
            lapsed_unless, is_same, partial(ended, codes, "second", second, out, overwrite or not is_same)
        )
        ended(codes, "first", first, out, overwrite)
        assert set(codes.values()) <= {0, 9}, (at, codes)
        if is_same:
            assert 0 in codes.values(), at
        else:
            assert codes["second"] == 0, at
        assert objects(f"{ROOT}/out") == right["first" if is_same else "second"], (at, codes)
        rest = {each for each in objects(ROOT) if not each.startswith("out/")}
        assert all(re.match(r"out\.tpuconv/[0-9a-f]{32}/", each) for each in rest), at
        count(kind, f"{name}{' --overwrite' * overwrite}, bucket")


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """GetObject without ListBucket."""

    def listed(folder: Any) -> Any:
        with translated(folder, "listed"):
            raise PermissionDeniedError("403 Forbidden")

    monkeypatch.setattr(buckets, "listing_facts", listed)
    monkeypatch.setattr(buckets, "names", listed)


@pytest.mark.parametrize(
    "name", [name if name == "convert" else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHERS]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_rights_that_lack_a_list(name, overwrite, sources, monkeypatch, request):
    """Reading needs none. Writing is refused before anything is sent, and the error names the right."""
    bucket, out = in_memory(monkeypatch), to_location(f"{ROOT}/out")
    if overwrite:
        sources.run[name](out, False)
    before = objects(ROOT)
    bucket.log.clear()
    request.getfixturevalue("no_list")
    for target in (out, out.parent / "another"):
        with pytest.raises(AccessRefused) as info:
            sources.old[name](target, overwrite)
        assert "ask for the right (storage.objects.list)" in str(info.value.hint)
        assert info.value.exit_code == 7
        count("rights that lack a list", f"{name}, writes")
    assert not bucket.log
    if overwrite and name in ("convert", "quantize", "convert --quantize", "save"):
        tpuconv.load(out)
        count("rights that lack a list", f"{name}, reads")
    monkeypatch.undo()
    monkeypatch.setitem(buckets.OPEN, ROOT, bucket)
    assert objects(ROOT) == before


# --- sources whose files are pointers of Git LFS ---------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 123\n" % (b"0" * 64)
POINTERS = (
    *(*made.COMPANIONS, "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.model"),
    *("chat_template.jinja", "vocab.txt", "preprocessor_config.json", "special_tokens_map.json"),
    "additional_chat_templates/tool.jinja",
)
FROM_SOURCE = {
    "plan": lambda src, out: api.plan(src),
    "convert": lambda src, out: api.convert(src, out),
    "convert --quantize": lambda src, out: api.convert(src, out, quantize="int8_weight_only"),
    "convert --target huggingface": lambda src, out: api.convert(src, out, target="huggingface"),
}


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize(
    "name", [name if name == "convert" else pytest.param(name, marks=pytest.mark.slow) for name in FROM_SOURCE]
)
def test_pointers_of_lfs(name, place, sources, tmp_path, monkeypatch):
    """Of any file that is read or copied: refused before anything is written."""
    at = Place(place, tmp_path / "models", monkeypatch)
    for file, data in contents(sources.new_source).items():
        at.put(f"src/{file}", data or b"")
    for file in POINTERS:
        was = at.files().get(f"src/{file}")
        at.put(f"src/{file}", POINTER)
        before = at.files()
        with pytest.raises(TpuconvError) as info:
            FROM_SOURCE[name](str(at.base / "src"), str(at.out))
        assert file.rpartition("/")[2] in str(info.value), file
        assert "Git LFS" in str(info.value), file
        assert at.files() == before
        count("pointers of Git LFS", f"{name}, {place}")
        if was is None:
            at.remove(f"src/{file}")
        else:
            at.put(f"src/{file}", was)
    FROM_SOURCE[name](str(at.base / "src"), str(at.out))
