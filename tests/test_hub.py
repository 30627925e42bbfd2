"""The Hub path, against a Hub on the loopback interface."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.hub_server import HubServer, commit_of, is_lfs, sha256_of
from helpers.times import HANG, wait_for
from tpuconv.errors import HubError, ResourceError, SourceError, UsageError
from tpuconv.sources import download, repository
from tpuconv.sources.adapter import read_adapter
from tpuconv.sources.companions import OTHER_WEIGHTS
from tpuconv.sources.damaged import DamagedDownload, wrong_hash
from tpuconv.sources.hub import fetch_config, resolve
from tpuconv.sources.source import open_source

REPO = "org/tiny"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
COMPANIONS = (
    "LICENSE",
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
IGNORED = ("pytorch_model.bin", "modeling_tiny.py", "tokenizer.py", "tiny.gguf", "original/consolidated.safetensors",
           "original/tokenizer.model",
           "consolidated.safetensors", "consolidated.safetensors.index.json", "onnx/model.onnx")  # fmt: skip
INDEX = "model.safetensors.index.json"
SIZE = 1 << 20  # bytes of weights of a shard


def make_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Two shards and an index, what goes with them, and what a conversion never uses."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    weight_map = {}
    for i, shard in enumerate(SHARDS):
        save_file({f"w{i}": rng.integers(1, 255, SIZE, np.uint8)}, folder / shard)
        weight_map[f"w{i}"] = shard
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 2 * SIZE}, "weight_map": weight_map}))
    for name in COMPANIONS + IGNORED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name, "seed": seed}))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def cache(hub_cache: Path) -> Path:
    return hub_cache


@pytest.fixture
def serve(serve_hub: Callable[..., HubServer]) -> Callable[..., HubServer]:
    return serve_hub


@pytest.fixture
def hub(serve: Callable[..., HubServer], checkpoint: Path) -> HubServer:
    return serve({REPO: checkpoint})


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def assert_same(folder: Path, original: Path) -> None:
    for name in (*SHARDS, INDEX, *COMPANIONS):
        assert (folder / name).read_bytes() == (original / name).read_bytes(), name


# --- downloads -----------------------------------------------------------------------------------------------------


def test_downloads_what_a_conversion_uses(hub: HubServer, checkpoint: Path) -> None:
    got = resolve(REPO)
    assert_same(got.folder, checkpoint)
    assert {p.name for p in got.folder.rglob("*") if p.is_file()} == {*SHARDS, INDEX, *COMPANIONS}
    assert hub.files() == {*SHARDS, INDEX, *COMPANIONS}
    assert (got.repo, got.commit, got.headers_only) == (REPO, commit_of(checkpoint), False)
    assert got.sha256 == {name: sha256_of(checkpoint / name) for name in SHARDS}
    open_source(got.folder, repo=got.repo, commit=got.commit, sha256=got.sha256)


def test_the_client_finds_what_we_fetched(hub: HubServer, cache: Path) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    got = resolve(REPO)
    hub.forget()
    assert hf_hub_download(REPO, SHARDS[0], revision=got.commit) == str(got.folder / SHARDS[0])
    assert not hub.requests
    report = scan_cache_dir(cache)
    assert not report.warnings
    assert [r.repo_id for r in report.repos] == [REPO]
    assert not list(cache.rglob("*.incomplete"))


def test_second_call_uses_the_cache(hub: HubServer) -> None:
    first = resolve(REPO)
    hub.forget()
    assert resolve(REPO) == first
    assert hub.files() == set()
    assert [r.file for r in hub.requests] == ["api"]


def test_a_single_file_goes_before_an_index(serve: Callable[..., HubServer], tmp_path: Path) -> None:
    """As in transformers. The other weights are named."""
    folder = make_checkpoint(tmp_path / "tiny")
    save_file({"whole": np.zeros(8)}, folder / "model.safetensors")
    hub = serve({REPO: folder})
    got = resolve(REPO)
    assert hub.files() == {"model.safetensors", INDEX, *COMPANIONS}
    for source in (open_source(got.folder, repo=REPO, listed=got.listed), open_source(folder)):
        assert list(source.tensors) == ["whole"]
        assert {*SHARDS, INDEX} <= {each.name for each in source.left_out if each.reason == OTHER_WEIGHTS}
    for shard in SHARDS:
        (folder / shard).unlink()
    assert list(open_source(folder).tensors) == ["whole"]  # the index was left behind


@pytest.mark.parametrize("lfs", [True, False], ids=["lfs", "git"])
def test_single_file(
    serve: Callable[..., HubServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lfs: bool
) -> None:
    monkeypatch.setattr("helpers.hub_server.is_lfs", lambda name: lfs and is_lfs(name))
    save_file({"w": np.arange(9)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "repo"
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).rename(folder / name)
    serve({"tiny": folder})
    got = resolve("tiny")
    assert (got.folder / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert got.sha256 == ({"model.safetensors": sha256_of(folder / "model.safetensors")} if lfs else {})


def test_progress_runs_to_the_whole(hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TICK_SECONDS", 0.0)
    total = sum((checkpoint / name).stat().st_size for name in (*SHARDS, INDEX, *COMPANIONS))
    for _ in ("download", "cached"):
        seen: list[tuple[int, int]] = []
        resolve(REPO, progress=lambda *p, seen=seen: seen.append(p))  # type: ignore[misc]
        assert {t for _, t in seen} == {total}
        assert [d for d, _ in seen] == sorted(d for d, _ in seen)
        assert seen[-1] == (total, total)
        assert len(seen) > 8
        assert seen[0][0] < total


def test_prints_nothing(hub: HubServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # the client's bars, also where there is no terminal
    resolve(REPO)
    assert capfd.readouterr() == ("", "")


def test_token_stays_at_the_hub(hub: HubServer, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    (cache.parent / "token").write_text("hf_secret")
    resolve(REPO)
    ours = [r for r in hub.requests if REPO in r.path and not r.cdn]  # the client may ask for more, for itself
    assert {r.token for r in ours} == {"Bearer hf_secret"}
    assert {r.token for r in hub.requests if r.cdn} == {None}


def test_environment_is_the_clients(hub: HubServer, tmp_path: Path, checkpoint: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN, as a process of its own reads them."""
    home = tmp_path / "elsewhere"
    code = f"from tpuconv.sources.hub import resolve; print(resolve({REPO!r}).folder)"
    env = _environment(hub, home) | {"HF_TOKEN": "hf_other"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stderr == ""
    assert_same(Path(out.stdout.strip()), checkpoint)
    assert home in Path(out.stdout).parents
    ours = [r for r in hub.requests if REPO in r.path and not r.cdn]  # the client may ask for more, for itself
    assert {r.token for r in ours} == {"Bearer hf_other"}


def _environment(hub: HubServer, home: Path) -> dict[str, str]:
    return dict(os.environ) | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


def test_what_says_how_weights_are_encoded_comes_with_the_config(
    serve: Callable[..., HubServer], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a config.json that does not say it, as older releases of ModelOpt have it."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "fp8"))
    told = {"quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    hub = serve({REPO: folder})
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "modelopt", **told}
    }
    assert fetch_config(REPO) == fetch_config(str(folder)) == config
    with resolve(REPO, weights=False) as got:
        assert open_source(got.folder, repo=got.repo).config == config
    hub.stop()
    assert fetch_config(REPO) == config


def test_files_too_large_for_http_go_through_the_client(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", SIZE)
    with pytest.raises(HubError, match="too large") as error:  # it needs Xet for them, which this Hub does not speak
        resolve(REPO)
    assert "hf_xet" in str(error.value)


def test_import_is_light() -> None:
    code = (
        "import sys, tpuconv.sources.hub; print([m for m in ('jax', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_without_symlinks_there_is_one_copy(
    hub: HubServer, cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    got = resolve(REPO)
    assert_same(got.folder, checkpoint)
    assert sum(p.stat().st_size for p in cache.rglob("*") if p.is_file() and not p.is_symlink()) < 2.1 * SIZE


# --- revisions -----------------------------------------------------------------------------------------------------


def test_revisions_are_pinned(serve: Callable[..., HubServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, dev = make_checkpoint(tmp_path / "main", 1), make_checkpoint(tmp_path / "dev", 2)
    hub = serve({REPO: {"main": main, "dev": dev}})
    got = resolve(REPO, revision="dev")
    assert got.commit == hub.commit(REPO, "dev")
    assert_same(got.folder, dev)
    by_commit = resolve(REPO, revision=hub.commit(REPO, "main"))
    assert by_commit.commit == hub.commit(REPO, "main")
    assert_same(by_commit.folder, main)
    ours = [r for r in hub.requests if REPO in r.path and r.file != "api"]  # the client may ask for more, for itself
    assert ours
    assert all(hub.commit(REPO, "dev") in r.path or hub.commit(REPO) in r.path for r in ours)
    hub.stop()
    assert resolve(REPO, revision="dev") == got
    assert resolve(REPO, revision=by_commit.commit) == by_commit
    with pytest.raises(HubError, match="nothing of it at revision main"):  # only its commit was asked for
        resolve(REPO)


@pytest.mark.parametrize("revision", ["", "../x", "a..b", "/main", "-x", "a b"])
def test_bad_revisions(hub: HubServer, revision: str) -> None:
    with pytest.raises(UsageError, match="not a branch, tag or commit"):
        resolve(REPO, revision=revision)
    assert not hub.requests


# --- interruptions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_dropped_connection_is_resumed(hub: HubServer, checkpoint: Path, reset: bool) -> None:
    hub.fail(SHARDS[1], break_after=SIZE // 2, times=1, reset=reset)
    got = resolve(REPO)
    assert_same(got.folder, checkpoint)
    again = [r for r in hub.requests if r.file == SHARDS[1] and r.cdn and r.method == "GET"]
    assert len(again) == 2


def test_the_next_call_goes_on(hub: HubServer, cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", 0)
    monkeypatch.setattr(repository, "WORKERS", 1)
    hub.fail(SHARDS[1], break_after=0)
    with pytest.raises(HubError, match="cannot be reached") as error:
        resolve(REPO)
    assert "run again to resume the download" in str(error.value)
    hub.mend()
    assert_same(resolve(REPO).folder, checkpoint)
    assert hub.sent(SHARDS[0]) == (checkpoint / SHARDS[0]).stat().st_size
    assert hub.sent(SHARDS[1]) == (checkpoint / SHARDS[1]).stat().st_size
    assert not list(cache.rglob("*.incomplete"))


@pytest.fixture
def spawn(hub: HubServer, cache: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that resolves REPO with the test's Hub and cache. It says when its connections are to stop."""
    code = f"""if True:
        import threading
        from tpuconv.sources import download, repository
        from tpuconv.sources.hub import resolve
        class Stopped(threading.Event):
            def set(self):
                super().set()
                print("stopping", flush=True)
        class Meter(download.Meter):
            def __init__(self, *args):
                super().__init__(*args)
                self.stopped = Stopped()
        repository.Meter = Meter
        try:
            resolve({REPO!r})
            print("done")
        except KeyboardInterrupt:
            print("stopped")"""
    env = _environment(hub, cache.parent) | {"HF_HUB_DOWNLOAD_TIMEOUT": f"{5 * HANG:.0f}"}  # no test waits so long
    children: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        children.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def _wait_for_half(hub: HubServer, child: "subprocess.Popen[str]", *shards: str) -> None:
    """Waits until the half of each of the shards was sent, after which the Hub is silent."""
    wait_for(lambda: all(hub.sent(shard) >= SIZE // 2 for shard in shards), child)


def test_a_killed_download_goes_on(
    hub: HubServer, checkpoint: Path, spawn: Callable[[], subprocess.Popen[str]]
) -> None:
    """The client begins the file again that was on the way."""
    hub.fail(SHARDS[1], break_after=SIZE // 2, hang=True)
    child = spawn()
    _wait_for_half(hub, child, *SHARDS)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    hub.mend()
    hub.forget()
    assert_same(resolve(REPO).folder, checkpoint)
    assert hub.sent(SHARDS[1]) == (checkpoint / SHARDS[1]).stat().st_size


def test_interrupt_stops_at_once(hub: HubServer, checkpoint: Path, spawn: Callable[[], subprocess.Popen[str]]) -> None:
    """Ctrl-C does not wait for silent connections."""
    hub.fail("model-*", break_after=SIZE // 2, hang=True)
    child = spawn()
    _wait_for_half(hub, child, *SHARDS)
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None
    assert child.stdout.readline() == "stopping\n"
    assert child.communicate(timeout=HANG)[0] == "stopped\n"
    hub.mend()
    assert_same(resolve(REPO).folder, checkpoint)


def test_two_processes_fetch_once(
    hub: HubServer, cache: Path, checkpoint: Path, spawn: Callable[[], subprocess.Popen[str]]
) -> None:
    hub.fail(SHARDS[1], break_after=SIZE // 2, hang=True, times=1)
    children = [spawn(), spawn()]
    _wait_for_half(hub, children[0], SHARDS[1])
    wait_for(lambda: len([r for r in hub.requests if r.file == "api"]) == 2)
    hub.mend()
    assert [child.communicate(timeout=HANG)[0] for child in children] == ["done\n", "done\n"]
    assert hub.sent("model-*.safetensors") == sum((checkpoint / name).stat().st_size for name in SHARDS) + SIZE // 2
    assert_same(resolve(REPO).folder, checkpoint)
    assert not list(cache.rglob("*.incomplete"))


def test_a_server_error_among_many_files_is_retried(hub: HubServer, checkpoint: Path) -> None:
    hub.fail(SHARDS[0], break_after=SIZE // 4, times=1)
    hub.fail(SHARDS[0], status=503, times=2)
    assert_same(resolve(REPO).folder, checkpoint)


def test_a_server_without_ranges(hub: HubServer, checkpoint: Path) -> None:
    hub.fail(SHARDS[0], break_after=SIZE // 2, times=1)
    hub.fail(SHARDS[0], no_ranges=True)
    assert_same(resolve(REPO).folder, checkpoint)


def test_wrong_bytes_of_the_right_size(hub: HubServer, checkpoint: Path) -> None:
    hub.fail(SHARDS[0], corrupt=True)
    got = resolve(REPO)
    path = got.folder / SHARDS[0]
    promised, found = got.sha256[SHARDS[0]], sha256_of(path)
    assert promised == sha256_of(checkpoint / SHARDS[0]) != found
    error = wrong_hash(path, promised, found)
    assert isinstance(error, SourceError)
    assert promised in str(error)
    assert found in str(error)
    command = str(error).splitlines()[-1].strip()
    assert command == f"rm {path.resolve()}"
    subprocess.run(command, shell=True, check=True)
    hub.mend()
    hub.forget()
    assert_same(resolve(REPO).folder, checkpoint)
    assert hub.files() == {SHARDS[0]}


@pytest.mark.parametrize("lfs", [True, False], ids=["lfs", "git"])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "LICENSE", INDEX])
def test_files_beside_the_weights_are_those_that_the_hub_promises(
    hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, lfs: bool
) -> None:
    """One that differs is fetched again. If it differs again, or cannot be fetched, it is named."""
    monkeypatch.setattr("helpers.hub_server.is_lfs", lambda file: is_lfs(file) or (lfs and file == name))
    hub.fail(name, corrupt=True, corrupt_header=True, times=1)
    got = resolve(REPO)
    assert_same(got.folder, checkpoint)
    assert got.unproved == ()
    assert len([r for r in hub.requests if r.file == name and r.sent]) == 2
    blob = (got.folder / name).resolve()
    data = bytearray(blob.read_bytes())
    data[-2] ^= 1
    blob.write_bytes(data)  # on the disk
    assert_same(resolve(REPO, weights=False).folder, checkpoint)
    blob.write_bytes(data)
    hub.fail(name, corrupt=True, corrupt_header=True)
    with pytest.raises(DamagedDownload, match=f"{name} is not the file that the Hub promises") as error:
        resolve(REPO)
    assert error.value.exit_code == 4
    blob.write_bytes(data)
    offline(monkeypatch)
    with pytest.raises(DamagedDownload, match=f"{name} is not the file that the Hub promises"):
        resolve(REPO)


def test_a_hub_without_hashes_proves_nothing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.hub_server.git_id", lambda data: "none")
    with resolve(REPO, weights=False) as got:
        assert got.unproved == tuple(sorted((*COMPANIONS, INDEX)))
        source = open_source(got.folder, repo=REPO, commit=got.commit, sha256=got.sha256, unproved=got.unproved)
    assert source.origin(got.sha256)["verified"].startswith("unverified")


def test_an_adapter_is_the_one_that_the_hub_promises(serve: Callable[..., HubServer], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    pair = {f"base_model.model.q.lora_{x}.weight": np.ones((1, 1), np.float32) for x in "AB"}
    save_file(pair, tmp_path / "a/adapter_model.safetensors")
    hub = serve({"org/lora": tmp_path / "a"})
    hub.fail("adapter_model.safetensors", corrupt=True, times=1)
    hub.fail("adapter_config.json", corrupt=True, corrupt_header=True, times=1)
    assert list(read_adapter("org/lora").changes) == ["q.weight"]
    (cached,) = (tmp_path / "hf-home").rglob("adapter_config.json")
    os.truncate(cached.resolve(), 5)
    assert list(read_adapter("org/lora").changes) == ["q.weight"]  # fetched again
    shutil.rmtree(tmp_path / "hf-home")
    hub.fail("adapter_model.safetensors", corrupt=True)
    with pytest.raises(DamagedDownload, match="is not the file that the Hub promises"):
        read_adapter("org/lora")


def test_wrong_hash_names_a_blob_that_repositories_share(tmp_path: Path) -> None:
    """The client may keep a blob in a store for all repositories: deleting the link to it alone would bring it back."""
    for folder in ("models--a/snapshots/c", "models--a/blobs", "blobs/ab"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs/ab/store").write_text("x")
    (tmp_path / "models--a/blobs/sha").symlink_to("../../blobs/ab/store")
    (tmp_path / "models--a/snapshots/c/m.safetensors").symlink_to("../../blobs/sha")
    error = wrong_hash(tmp_path / "models--a/snapshots/c/m.safetensors", "a", "b")
    assert str(error).endswith(f"rm {tmp_path}/models--a/blobs/sha {tmp_path}/blobs/ab/store")
    assert str(wrong_hash(tmp_path / "a file", "a", "b")).endswith(f"rm '{tmp_path}/a file'")


def test_a_cached_file_of_the_wrong_size(hub: HubServer) -> None:
    path = (resolve(REPO).folder / SHARDS[0]).resolve()
    os.truncate(path, 100)
    with pytest.raises(SourceError, match="not the file that the Hub promises") as error:
        resolve(REPO)
    assert str(error.value).endswith(f"rm {path}")


# --- without network -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["offline", "down", "503"])
@pytest.mark.parametrize("weights", [True, False])
def test_a_complete_cache_is_enough(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str, weights: bool, checkpoint: Path
) -> None:
    first = resolve(REPO)
    _cut(hub, way, monkeypatch)
    got = resolve(REPO, weights=weights)
    assert got == first
    assert got.sha256 == {name: sha256_of(checkpoint / name) for name in SHARDS}
    assert not got.headers_only


@pytest.mark.parametrize("way", ["offline", "down", "503"])
def test_an_incomplete_cache_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    got = resolve(REPO)
    (got.folder / SHARDS[1]).unlink()
    _cut(hub, way, monkeypatch)
    with pytest.raises(HubError, match="the cache has 3 of the 4 files needed, without " + SHARDS[1]) as error:
        resolve(REPO)
    assert ("unset HF_HUB_OFFLINE" if way == "offline" else "check the network") in str(error.value)
    (got.folder / INDEX).unlink()
    with pytest.raises(HubError, match="1 of the 2 files needed, without " + INDEX):
        resolve(REPO)


@pytest.mark.parametrize("way", ["offline", "down", "503", "timeout"])
def test_an_empty_cache(hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    _cut(hub, way, monkeypatch)
    start = time.monotonic()
    with pytest.raises(HubError, match="nothing of it at revision main") as error:
        resolve(REPO)
    assert error.value.exit_code == 7
    assert way == "offline" or f"there is no folder {REPO} here either" in error.value.details
    assert time.monotonic() - start < HANG


@pytest.mark.parametrize("way", ["offline", "down", "503", "timeout"])
def test_a_config_alone_is_asked_for_once_and_in_silence(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _cut(hub, way, monkeypatch)
    start = time.monotonic()
    with pytest.raises(HubError):
        fetch_config(REPO)
    assert time.monotonic() - start < HANG
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("way", ["offline", "down", "503"])
def test_a_config_in_the_cache_is_enough(hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    config = fetch_config(REPO)
    hub.forget()
    _cut(hub, way, monkeypatch)
    assert fetch_config(REPO) == config


def test_the_server_goes_away_in_between(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", 1)
    hub.fail("model-*", status=503)
    with pytest.raises(HubError, match="cannot be reached") as error:
        resolve(REPO)
    assert "503" in str(error.value)


def test_the_promised_hash_is_not_that_of_a_shared_blob(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared blob is called by its xet hash, which also has 64 digits."""
    first = resolve(REPO)
    blob = (first.folder / SHARDS[0]).resolve()
    store = cache / "blobs" / ("ab" * 32)
    store.parent.mkdir()
    blob.rename(store)
    blob.symlink_to(store)
    offline(monkeypatch)
    assert resolve(REPO).sha256 == first.sha256


def _cut(hub: HubServer, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    if way == "offline":
        offline(monkeypatch)
    elif way == "down":
        hub.stop()
    elif way == "503":
        hub.fail("api", status=503)
    else:
        hub.fail("api", silent=True)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_401_without_a_token(hub: HubServer) -> None:
    hub.fail("api", status=401)
    with pytest.raises(HubError, match="needs a token, or does not exist") as error:
        resolve(REPO)
    assert "hf auth login" in str(error.value)
    assert "HF_TOKEN" in str(error.value)


def test_401_with_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    hub.fail("api", status=401)
    with pytest.raises(HubError, match="does not accept your token"):
        resolve(REPO)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("file", ["*", "*.safetensors"])  # the API answers for gated repositories, the files do not
@pytest.mark.parametrize("weights", [True, False])
def test_gated(hub: HubServer, status: int, file: str, weights: bool) -> None:
    hub.fail(file, status=status, code="GatedRepo")
    with pytest.raises(HubError, match="gated") as error:
        resolve(REPO, weights=weights)
    assert f"ask at {hub.url}/{REPO}" in str(error.value)
    assert "hf auth login" in str(error.value)


def test_403_otherwise(hub: HubServer) -> None:
    hub.fail("config.json", status=403)
    with pytest.raises(HubError, match="denies access"):
        resolve(REPO)


def test_404_repository(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match="org/nothing does not exist on the Hub"):
        resolve("org/nothing")
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match="did you mean the folder mymodel"):
        resolve("mymodl")


def test_404_revision(hub: HubServer) -> None:
    with pytest.raises(HubError, match="org/tiny has no revision mian") as error:
        resolve(REPO, revision="mian")
    assert "did you mean main?" in str(error.value)
    with pytest.raises(HubError, match="no revision " + "0" * 40):
        resolve(REPO, revision="0" * 40)


@pytest.mark.parametrize("code", ["EntryNotFound", ""])  # the host of large files names no code
@pytest.mark.parametrize("weights", [True, False])
def test_404_file(hub: HubServer, code: str, weights: bool) -> None:
    hub.fail(SHARDS[0], status=404, code=code)
    with pytest.raises(HubError, match=f"lists {SHARDS[0]} but does not serve it"):
        resolve(REPO, weights=weights)


def test_429_is_explained(hub: HubServer) -> None:
    hub.fail("api", status=429)
    with pytest.raises(HubError, match="limits the rate"):
        resolve(REPO)


def test_an_endpoint_that_is_no_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.hub_server._Handler._api", lambda self, path: self._json(["hello"]))
    with pytest.raises(HubError, match="the download of org/tiny failed") as error:
        resolve(REPO)
    assert "HF_ENDPOINT" in str(error.value)


def test_the_disk_is_too_small(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SIZE, total=SIZE, used=0))
    with pytest.raises(ResourceError, match=r"2\.1 MB more, and"):
        resolve(REPO)
    assert not hub.sent("*.safetensors")


def test_the_disk_fills_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(ResourceError, match="the disk is full") as error:
        resolve(REPO)
    assert error.value.exit_code == 8


def test_a_complete_cache_need_not_be_writable(hub: HubServer) -> None:
    got = resolve(REPO)
    refs = got.folder.parents[1] / "refs"
    (refs / "main").unlink()
    refs.rmdir()
    refs.write_text("")  # a note of the revision can be written here no more, not even by root
    for shard in SHARDS:  # nor a partial file
        blob = (got.folder / shard).resolve()
        blob.with_name(f"{blob.name}.tpuconv.incomplete").mkdir()
    assert resolve(REPO) == got


def test_the_cache_is_no_folder(hub: HubServer, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("")
    with pytest.raises(ResourceError, match="cannot be used"):
        resolve(REPO)


# --- repositories that cannot be converted -------------------------------------------------------------------------


def test_no_safetensors(serve: Callable[..., HubServer], tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    for name in ("pytorch_model-1.bin", "pytorch_model-2.bin", "config.json"):
        (tmp_path / "repo" / name).write_text("{}")
    hub = serve({REPO: tmp_path / "repo"})
    with pytest.raises(SourceError, match=r"no safetensors") as error:
        resolve(REPO)
    assert "it has 2 x .bin, 1 x .json" in str(error.value)
    assert hub.files() == set()


def test_no_model_among_the_safetensors(serve: Callable[..., HubServer], tmp_path: Path) -> None:
    (tmp_path / "repo/unet").mkdir(parents=True)
    for name in ("adapter_model.safetensors", "unet/x.safetensors"):
        (tmp_path / "repo" / name).write_text("x")
    hub = serve({REPO: tmp_path / "repo"})
    with pytest.raises(SourceError, match=r"neither model\.safetensors nor") as error:
        resolve(REPO)
    assert "adapter_model.safetensors, unet/x.safetensors" in str(error.value)
    assert hub.files() == set()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "model-3.safetensors"}, "names 1 file that it does not have"),
        ({"w": "../model.safetensors"}, "not safetensors files in its folder"),
        ({"w": ["x"]}, "not safetensors files in its folder"),
        ({}, "names no shards"),
        ("x", "names no shards"),
    ],
)
def test_bad_index(serve: Callable[..., HubServer], tmp_path: Path, weight_map: object, message: str) -> None:
    folder = make_checkpoint(tmp_path / "repo")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    hub = serve({REPO: folder})
    with pytest.raises(SourceError, match=message):
        resolve(REPO)
    assert hub.files() == {INDEX}


# --- headers alone -------------------------------------------------------------------------------------------------


def test_headers_alone(serve: Callable[..., HubServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "HEADER_PEEK", 4096)
    checkpoint = make_checkpoint(tmp_path / "repo")
    many = {f"w{i}": np.zeros(100, np.float32) for i in range(400)}  # a header longer than the first request
    save_file(many, checkpoint / "long.safetensors")
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(many, "long.safetensors")
    del index["weight_map"]["w0"], index["weight_map"]["w1"]
    index["weight_map"] |= {"w0": SHARDS[0], "w1": SHARDS[1]}
    many.pop("w0")
    many.pop("w1")
    save_file(many, checkpoint / "long.safetensors")
    (checkpoint / INDEX).write_text(json.dumps(index))
    shards = (*SHARDS, "long.safetensors")
    hub = serve({REPO: checkpoint})
    progress: list[tuple[int, int]] = []

    with resolve(REPO, weights=False, progress=lambda *p: progress.append(p)) as got:
        assert got.headers_only
        assert (got.repo, got.commit) == (REPO, commit_of(checkpoint))
        assert got.sha256 == {name: sha256_of(checkpoint / name) for name in shards}
        for name in shards:
            copy, original = got.folder / name, checkpoint / name
            end = 8 + int.from_bytes(original.read_bytes()[:8], "little")
            assert copy.stat().st_size == original.stat().st_size
            assert copy.read_bytes()[:end] == original.read_bytes()[:end]
            assert not any(copy.read_bytes()[end:])
            assert copy.stat().st_blocks * 512 < end + 8192
        for name in (INDEX, *COMPANIONS):
            assert (got.folder / name).read_bytes() == (checkpoint / name).read_bytes()
        ours = open_source(got.folder, repo=got.repo, commit=got.commit, sha256=got.sha256)
        assert ours.tensors == open_source(checkpoint).tensors
        assert progress[-1][0] == progress[-1][1]
    assert not got.folder.exists()
    long_header = 8 + int.from_bytes((checkpoint / "long.safetensors").read_bytes()[:8], "little")
    assert long_header > 4096
    assert hub.sent("*.safetensors") == 3 * 4096 + long_header


def test_headers_of_a_complete_cache_are_the_cache(hub: HubServer) -> None:
    whole = resolve(REPO)
    with resolve(REPO, weights=False) as got:
        assert got == whole
    assert got.folder.exists()


def test_headers_beside_cached_shards(hub: HubServer) -> None:
    whole = resolve(REPO)
    (whole.folder / SHARDS[1]).unlink()
    hub.forget()
    with resolve(REPO, weights=False) as got:
        assert (got.folder / SHARDS[0]).resolve() == (whole.folder / SHARDS[0]).resolve()
        assert (got.folder / SHARDS[1]).stat().st_size > SIZE
    assert hub.files() == {SHARDS[1]}


def test_a_header_that_is_none(serve: Callable[..., HubServer], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "repo")
    (folder / SHARDS[0]).write_bytes(b"<html>" + b"x" * 500)
    serve({REPO: folder})
    with resolve(REPO, weights=False) as got, pytest.raises(SourceError, match="web page"):
        open_source(got.folder, repo=got.repo)


def test_failure_leaves_no_folder(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    hub.fail(SHARDS[1], status=404, code="EntryNotFound")
    with pytest.raises(HubError):
        resolve(REPO, weights=False)
    assert not list((tmp_path / "temporary").iterdir())


# --- what the user types -------------------------------------------------------------------------------------------


def test_a_folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = resolve(str(checkpoint))
    assert (got.folder, got.repo, got.commit, got.sha256) == (checkpoint, None, None, {})
    got.close()
    monkeypatch.chdir(checkpoint.parent)
    assert resolve("tiny").folder == Path("tiny")
    with pytest.raises(UsageError, match="needs a Hub id"):
        resolve("tiny", revision="main")


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ("./tinny", r"no folder './tinny'\n.*did you mean the folder tiny\?"),
        ("~/nowhere/x", "there is no folder '.*nowhere' either"),
        ("a/b/tiny", "there is no folder 'a/b' either"),
        ("", "no folder ''"),
        ("tinny/", r"did you mean the folder tiny\?"),
        ("tiny/config.json", "is a file\n.*the folder of the checkpoint: tiny"),
        ("https://huggingface.co/org/name/tree/main", "give the id alone: org/name"),
        ("hf://org/name@main", "give the id alone: org/name"),
        ("org/tiny/", "if it is on the Hub, give the id alone: org/tiny"),
        ("org/tiny/model.safetensors", "if it is on the Hub, give the id alone: org/tiny"),
        ("org/tiny@v2", "if it is on the Hub, give the id alone: org/tiny, and `revision='v2'`"),
        ("org/tiny:refs/pr/1", "if it is on the Hub, give the id alone: org/tiny, and `revision='refs/pr/1'`"),
        ("bad name", "is neither a folder nor a Hub id"),
        ("org/na--me", "is neither a folder nor a Hub id"),
        ("tin+y", r"did you mean the folder tiny\?"),
    ],
)
def test_bad_ids_and_paths(
    hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, src: str, message: str
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    with pytest.raises(UsageError, match=message):
        resolve(src)
    assert not hub.requests
