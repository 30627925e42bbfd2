"""A checkpoint that is replaced while it is read: the result is of one version, or an error says what happened.

The reader is stopped before each of its calls that open, look at or read a file of the checkpoint, and there, once, the
other version is published in its place, as `convert --overwrite` does it.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuconv
from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.simulated import contents, copy_tree
from tpuconv import api
from tpuconv.checkpoint import reader as checkpoint_module
from tpuconv.checkpoint.contents import contents_of
from tpuconv.errors import CorruptOutput, SourceError, TpuconvError
from tpuconv.storage.journal import Journal
from tpuconv.storage.sealed import STAGED, identity
from tpuconv.verify import checksums as weights_module

pytestmark = [
    pytest.mark.usefixtures("collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with made.folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> dict[str, Path]:
    """Two checkpoints of the same architecture, with other values, another config.json and other companions."""
    base = tmp_path_factory.mktemp("versions")
    for i, name in enumerate(("old", "new")):
        made.source(base / f"source-{name}", i, rms_norm_eps=1e-6 * (i + 1))
        made.convert(base / f"source-{name}", base / name)
    return {name: base / name for name in ("old", "new")}


def publish(version: Path, out: Path) -> None:
    """Replaces an output, in the steps of every command that does."""
    own = identity(version)
    names = contents(version)
    with Journal(out, str(own), {}, names, overwrite=True, contents_of=contents_of) as journal:
        journal.begin()
        shutil.copytree(version, journal.staging, dirs_exist_ok=True)
        (journal.staging / STAGED).touch()
        journal.publish()


class Moments:
    """Counts the calls on files of a folder; at the call with the number `at` it does something first."""

    def __init__(self, folder: Path, at: int | None, act: Callable[[], None]):
        self.folder, self.at, self.act, self.calls = f"{folder}{os.sep}", at, act, 0
        self._lock, self._acting = threading.RLock(), False

    def before(self, path: Any) -> None:
        if not isinstance(path, str | Path) or not str(path).startswith(self.folder):
            return
        with self._lock:
            if self._acting:
                return
            self.calls += 1
            if self.calls - 1 == self.at:
                self._acting = True
                try:
                    self.act()
                finally:
                    self._acting = False


@contextmanager
def watched(folder: Path, at: int | None, act: Callable[[], None]) -> Iterator[Moments]:
    """Within it `act` happens before a call."""
    it = Moments(folder, at, act)
    real = {name: getattr(os, name) for name in ("open", "stat", "lstat", "listdir", "scandir", "preadv", "pread")}
    names: dict[int, str] = {}

    def by_path(name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            it.before(path)
            got = real[name](path, *args, **kwargs)
            if name == "open":
                # A file is opened once more, by its descriptor, to be read around the page cache.
                names[got] = os.readlink(path) if str(path).startswith("/proc/self/fd/") else str(path)
            return got

        return call

    def by_descriptor(name: str) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            it.before(names.get(fd))
            return real[name](fd, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, (by_descriptor if name.startswith("pread") else by_path)(name))
        patch.setattr(checkpoint_module, "CHECKERS", 1)
        patch.setattr(weights_module.os, "sched_getaffinity", lambda _: {0})
        yield it


def load(ckpt: Path, _: Path) -> dict[str, Any]:
    from flax import nnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tpuconv.load(ckpt)
    leaves = {".".join(map(str, p)): np.asarray(x[...]).tobytes() for p, x in nnx.to_flat_state(nnx.state(model))}
    return leaves | {"eps": model.config.rms_norm_eps}


def verify(ckpt: Path, _: Path) -> dict[str, Any]:
    if faults := api.verify(ckpt).faults:
        raise CorruptOutput(f"a false alarm: {faults}")
    return {}


def written(write: Callable[[Path, Path], None]) -> Callable[[Path, Path], dict[str, Any]]:
    def read(ckpt: Path, out: Path) -> dict[str, Any]:
        try:
            write(ckpt, out)
            return contents(out)
        finally:
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(out.parent / f".{out.name}.tpuconv", ignore_errors=True)

    return read


READERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "verify": verify,
    "export": written(made.export),
    "quantize": written(made.quantize),
    "load": load,
}


def replace_while(name: str, versions: dict[str, Path], base: Path, moments: Callable[[int], range]) -> None:
    ckpt, out, read = base / "ckpt", base / "out", READERS[name]
    right = []
    for version in versions.values():
        copy_tree(version, ckpt)
        right.append(read(ckpt, out))
    assert name == "verify" or right[0] != right[1]
    copy_tree(versions["old"], ckpt)
    with watched(ckpt, None, lambda: None) as it:
        read(ckpt, out)
    assert it.calls > 20
    for at in moments(it.calls):
        copy_tree(versions["old"], ckpt)
        end, found = "all of one version", None
        with watched(ckpt, at, lambda: publish(versions["new"], ckpt)) as it:
            try:
                found = read(ckpt, out)
            except TpuconvError as error:
                assert isinstance(error, SourceError), f"replaced at {at} of {it.calls}: {error!r}"  # noqa: PT017
                assert "was replaced or changed while it was read" in error.message, at  # noqa: PT017
                end = "an error that says so"
        assert it.calls > at
        assert contents(ckpt) == contents(versions["new"])
        assert found is None or found in right, f"replaced at {at}: a mixture"
        assert os.listdir(base) == ["ckpt"], at
        count(f"replaced while read: {name}", end)


@pytest.mark.parametrize("name", READERS)
def test_replaced_at_a_few_moments(name, versions, tmp_path):
    steps = {"verify": 6, "export": 6, "quantize": 3, "load": 5}[name]
    replace_while(name, versions, tmp_path, lambda n: range(0, n, max(1, n // steps)))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_replaced_at_every_moment(name, versions, tmp_path):
    replace_while(name, versions, tmp_path, range)
