"""Sources that are fetched while they are converted: from the Hub, and from buckets."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.attacks import made
from helpers.attacks.processes import UNHURRIED, small_disk, started, tpuconv
from helpers.attacks.simulated import contents
from helpers.buckets import MemoryBucket, in_memory, objects
from helpers.checkpoints import (
    INDEX,
    qwen3_config,
    random_tensor,
    read_tensors,
    source_shapes,
    write_safetensors,
)
from helpers.conversions import same_bits
from helpers.hub_server import HubServer, Request
from helpers.quantizing import ONE_OF_EACH
from helpers.schemes import modelopt
from helpers.times import wait_for
from tpuconv import api, buckets
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.export import files as export_files
from tpuconv.convert.plan import sizes
from tpuconv.convert.run.workers import Workers
from tpuconv.errors import SourceError, TpuconvError, UsageError
from tpuconv.hosts import ProcessPart
from tpuconv.location import BucketPath
from tpuconv.sources import download, remote, schedule, workspace
from tpuconv.sources.hub import resolve
from tpuconv.sources.stream import StreamReader
from tpuconv.sources.workspace import PART, WIDE
from tpuconv.storage import disk
from tpuconv.storage.journal import Journal

SLOW = pytest.mark.slow
REPO = "org/tiny"
SHARDS = 8
CONFIG = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scanned": {"scan_layers": True},
    "quantized": {"quantize": "int8_weight_only"},
    "maxtext": {"target": "maxtext"},
    "a part": {"layers": range(1, 3)},
    "safetensors": {"target": "huggingface"},
    "quantized safetensors": {"target": "huggingface", "quantize": "int8_weight_only"},
}


R1_SCALED = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 12, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def in_order(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], shards: int) -> Path:
    """A source whose tensors lie in its files in the order of the model, as those of releases do."""

    def place(name: str) -> int:
        parts = name.split(".")
        return int(parts[2]) if parts[1] == "layers" else (-1 if "embed" in name else 99)

    names, weight_map = sorted(tensors, key=place), {}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        inside = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        write_safetensors(folder / file, {name: tensors[name] for name in inside})
        weight_map |= dict.fromkeys(inside, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tiny(folder: Path) -> Path:
    """A small model in order, with its companions."""
    config, rng = qwen3_config(**CONFIG), np.random.default_rng(0)
    tensors = {name: random_tensor(rng, shape, "bfloat16") for name, shape in source_shapes(config).items()}
    in_order(folder, config, tensors, SHARDS)
    for name, text in made.COMPANIONS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("streamed") / "tiny")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that are small beside the source, and requests beside an object."""
    monkeypatch.setattr(sizes, "UNIT_BYTES", 8 << 10)
    monkeypatch.setattr(sizes, "SLAB_BYTES", 4 << 10)
    monkeypatch.setattr(remote, "RANGE_BYTES", 3000)
    monkeypatch.setattr(export_files, "SHARD_BYTES", 20_000)


@pytest.fixture
def hub(serve_hub: Callable[..., HubServer], checkpoint: Path, small: None) -> HubServer:
    return serve_hub({REPO: checkpoint})


def outputs(folder: Path) -> dict[str, bytes]:
    """The files of an output, without what says where the source was."""
    said = ("tpuconv.json", "README.md", "quantization.html")
    return {name: data for name, data in contents(folder).items() if name not in said}


def of_weights(hub: HubServer) -> list[Request]:
    return [r for r in hub.requests if r.cdn and r.method == "GET" and r.file.endswith(".safetensors")]


def fetches(hub: HubServer) -> list[Request]:
    """The requests for whole shards. Headers are asked for by ranges."""
    return [request for request in of_weights(hub) if request.range is None]


def weights_sent(hub: HubServer) -> int:
    """Bytes of shards that were sent, without those of headers."""
    return sum(request.sent for request in fetches(hub))


@pytest.mark.parametrize("form", FORMS)
def test_the_output_is_that_of_a_local_source(
    form: str, hub: HubServer, hub_cache: Path, checkpoint: Path, tmp_path: Path
) -> None:
    api.convert(checkpoint, tmp_path / "local", **FORMS[form])
    done = api.convert(REPO, tmp_path / "out", **FORMS[form])
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    assert done.source_verified == (form != "a part")
    assert api.verify(tmp_path / "out").passed
    assert not [path for path in hub_cache.rglob("*.safetensors")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf-home", "local", "out"]
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    fetched = weights_sent(hub)
    assert fetched == total if form != "a part" else fetched < total


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, small: None) -> MemoryBucket:
    held = in_memory(monkeypatch)
    for path in checkpoint.iterdir():
        held.store.put(f"src/{path.name}", path.read_bytes())
    return held


class Fetched:
    """The ranges of shards in buckets that were streamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.spans: list[tuple[str, int, int]] = []
        real = buckets.stream

        def stream(path: BucketPath, block: int, span: Any = None, version: Any = buckets.ABSENT_OBJECT) -> Any:
            if span:
                self.spans.append((path.name, *span))
            return real(path, block, span, version)

        monkeypatch.setattr(buckets, "stream", stream)


@pytest.mark.parametrize("form", ["plain", "scanned", "safetensors"])
def test_a_bucket_is_streamed_into_a_bucket(
    form: str, bucket: MemoryBucket, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.convert(checkpoint, tmp_path / "local", **FORMS[form])
    fetched = Fetched(monkeypatch)
    (tmp_path / "ws").mkdir()
    api.convert("gs://bkt/src", "gs://bkt/out", workspace=tmp_path / "ws", **FORMS[form])
    assert objects("gs://bkt/out") == contents(tmp_path / "local")
    assert not list((tmp_path / "ws").iterdir())
    assert len(fetched.spans) == len(set(fetched.spans))
    for name in {name for name, _, _ in fetched.spans}:
        ranges = sorted((start, stop) for each, start, stop in fetched.spans if each == name)
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))


@pytest.mark.parametrize("place", [REPO, "gs://bkt/src"], ids=["", "bucket"])
@pytest.mark.parametrize("form", ["plain", "scanned", "safetensors"])
def test_the_workspace_holds_no_more_than_was_planned(
    form: str, place: str, hub: HubServer, bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at whenever a file has come; those that are being fetched count as complete."""
    planned = api.plan(place, **FORMS[form]).workspace_bytes
    seen: list[int] = []
    real = StreamReader._arrived

    def arrived(self: StreamReader, name: str) -> None:
        assert self._workspace is not None
        with self._changed:
            there = {path.name.removesuffix(PART) for path in self._workspace.folder.iterdir() if path.suffix != WIDE}
            seen.append(sum(self._shards[each].size for each in there))
        real(self, name)

    monkeypatch.setattr(StreamReader, "_arrived", arrived)
    api.convert(place, tmp_path / "out", **FORMS[form])
    source = sum(path.stat().st_size for path in hub.repos[REPO].commits[hub.commit(REPO)].glob("*.safetensors"))
    assert seen
    assert max(seen) <= planned
    assert form != "plain" or planned < 0.6 * source


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 503},
        {"status": 429},
        {"break_after": 1000},
        {"break_after": 1000, "reset": True},
        {"no_ranges": True},
    ],
    ids=str,
)
def test_faults_that_pass(fault: dict[str, Any], hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    api.convert(checkpoint, tmp_path / "local")
    with resolve(REPO, weights=False):  # the headers come without a fault
        pass
    hub.fail("*-00002-of-*.safetensors", times=3, **fault)
    api.convert(REPO, tmp_path / "out")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")


def test_a_server_that_ignores_ranges(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    """Some proxies do. Headers are the start of what they send."""
    hub.fail("*.safetensors", no_ranges=True)
    api.convert(REPO, tmp_path / "out")
    api.convert(checkpoint, tmp_path / "local")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")


@pytest.mark.parametrize(
    ("fault", "code"),
    [({"status": 503}, 7), ({"status": 403}, 7), ({"break_after": 0}, 7), ({"corrupt": True}, 4)],
    ids=str,
)
def test_faults_that_stay(
    fault: dict[str, Any], code: int, hub: HubServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run goes on, and fetches nothing again that is done."""
    monkeypatch.setattr(download, "RETRIES", 1)
    real = Workers.run

    def run(self: Workers, *args: Any) -> Any:  # the headers come without a fault
        hub.fail("*-00004-of-*.safetensors", **fault)
        yield from real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Workers, "run", run)
        with pytest.raises(TpuconvError) as info:
            api.convert(REPO, tmp_path / "out")
    assert info.value.exit_code == code
    assert info.value.hint
    assert not (tmp_path / "out").exists()
    hub.mend()
    hub.forget()
    api.convert(REPO, tmp_path / "out")
    api.convert(checkpoint, tmp_path / "local")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    assert not [request for request in fetches(hub) if "00001-of" in request.file]


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        pytest.param("plain", 1, marks=pytest.mark.slow),
        ("plain", 3),
        pytest.param("safetensors", 1, marks=pytest.mark.slow),
    ],
)
def test_wrong_bytes_are_fetched_once_again(
    form: str, parts: int, hub: HubServer, checkpoint: Path, tmp_path: Path
) -> None:
    """Nothing that was made of them counts. The first of three processes reads a half of the second shard, whose hash
    another one records."""
    with resolve(REPO, weights=False):
        pass
    hub.fail("*-00002-of-*.safetensors", times=2, corrupt=True)
    said: list[str] = []
    for index in range(parts):
        part = ProcessPart(index, parts) if parts > 1 else None
        told = lambda p: said.append(p.message or "")  # noqa: E731
        api.convert(REPO, tmp_path / "out", allow_nonfinite=True, part=part, progress=told, **FORMS[form])
        assert any("is not the file that the Hub promises" in text for text in said)
    api.convert(checkpoint, tmp_path / "local", allow_nonfinite=True, **FORMS[form])
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")


def dealt(source: Path, folder: Path, shards: int, **more: np.ndarray) -> Path:
    """A copy of a source with its tensors, and `more` of them, in the opposite order in this many files."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = read_tensors(source) | more
    names, weight_map = sorted(tensors, reverse=True), {}
    for i in range(shards):
        inside = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in inside})
        weight_map |= dict.fromkeys(inside, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["dequantize", "keep"])
@pytest.mark.parametrize("form", ["bitsandbytes/nf4_nested", "bitsandbytes/int8", "modelopt/w4a8", "NVFP4"])
def test_encoded_matrices_whose_parts_are_in_several_shards(
    form: str, encoding: str, serve_hub: Callable[..., HubServer], small: None, tmp_path: Path
) -> None:
    """They are small and read for each slab, and every byte is fetched once all the same."""
    if (form, encoding) == ("modelopt/w4a8", "keep"):
        pytest.skip("no array holds its scales of inputs")
    whole = Path(__file__).parent / "data" / form
    if form == "NVFP4":
        whole = tmp_path / "whole"
        modelopt("NVFP4", whole)
    source = dealt(whole, tmp_path / "src", 3)
    hub = serve_hub({REPO: source})
    api.convert(source, tmp_path / "local", encoding=encoding)
    api.convert(REPO, tmp_path / "out", encoding=encoding)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    assert read_manifest(tmp_path / "out").quantization == read_manifest(tmp_path / "local").quantization
    assert weights_sent(hub) == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if (form, encoding) == ("NVFP4", "keep"):
        api.convert(REPO, tmp_path / "back", encoding=encoding, target="huggingface")
        back, want = read_tensors(tmp_path / "back"), read_tensors(source)
        assert back.keys() == want.keys()
        assert all(same_bits(back[name], want[name]) for name in want)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_safetensors_of_shards_in_another_order(
    family: str, checkpoint: Path, hf: Any, serve_hub: Callable[..., HubServer], small: None, tmp_path: Path
) -> None:
    """Also with a copy of the embedding, which is left out, and with a tower that is carried along."""
    source, name = checkpoint, "model.embed_tokens.weight"
    if family == "qwen3":
        source = dealt(checkpoint, tmp_path / "src", 6, **{"lm_head.weight": read_tensors(checkpoint)[name]})
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        assert api.plan(source).plan.copies
    else:
        source = dealt(hf(ONE_OF_EACH[family], "bfloat16"), tmp_path / "src", 6)
    hub = serve_hub({REPO: source})
    planned = api.plan(REPO, target="huggingface")
    assert planned.workspace_bytes > 0
    api.convert(source, tmp_path / "local", target="huggingface")
    api.convert(REPO, tmp_path / "out", target="huggingface")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    assert weights_sent(hub) == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert read_tensors(tmp_path / "out").keys() == read_tensors(source).keys() - planned.plan.copies.keys()


@pytest.mark.parametrize("form", ["plain", "safetensors"])
def test_values_that_are_not_finite_end_the_run(
    form: str, serve_hub: Callable[..., HubServer], small: None, tmp_path: Path
) -> None:
    """While threads wait for bytes that do not come before the work goes on."""
    source = tiny(tmp_path / "src")
    tensors, places = read_tensors(source), json.loads((source / INDEX).read_text())["weight_map"]
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.inf)
    write_safetensors(source / places[name], {n: tensors[n] for n in places if places[n] == places[name]})
    serve_hub({REPO: source})
    with pytest.raises(SourceError, match="not finite"):
        api.convert(REPO, tmp_path / "out", jobs=32, **FORMS[form])


def test_the_token_is_sent_to_the_hub_alone(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    api.convert(REPO, tmp_path / "out")
    assert {r.token for r in hub.requests if r.cdn} == {None}
    assert {r.token for r in hub.requests if not r.cdn and r.file.endswith(".safetensors")} == {"Bearer hf_secret"}


@pytest.mark.parametrize("form", ["plain", "scanned", "safetensors"])
def test_a_run_that_ends_anywhere_goes_on(
    form: str, hub: HubServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each entry of the journal. No file that was fetched completely is fetched again."""
    api.convert(checkpoint, tmp_path / "local", **FORMS[form])
    real = Journal.record
    left = 0

    class Ended(BaseException):
        pass

    def record(self: Journal, *entry: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Ended
        real(self, *entry)

    monkeypatch.setattr(Journal, "record", record)
    ended = 0
    for stop in (2, 3, 4, 6, 8, 12):
        left = stop
        try:
            api.convert(REPO, tmp_path / "out", **FORMS[form])
            break
        except Ended:
            ended += 1
    left = 0
    api.convert(REPO, tmp_path / "out", **FORMS[form])
    assert ended >= 2
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    whole = [r.file for r in fetches(hub) if r.sent == (checkpoint / r.file).stat().st_size]
    assert len(whole) <= len(set(whole)) + ended * schedule.AHEAD_FILES  # those on the way at an end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf-home", "local", "out"]


@pytest.mark.parametrize("form", ["plain", *(pytest.param(form, marks=SLOW) for form in ("scanned", "safetensors"))])
def test_a_source_in_a_bucket_is_hashed_wherever_the_run_ends(
    form: str, bucket: MemoryBucket, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody promises a hash. What is done stays done; all bytes come again of a file alone that was not hashed yet."""
    api.convert(checkpoint, tmp_path / "local", **FORMS[form])
    fetched, record = Fetched(monkeypatch), Journal.record
    recorded: list[tuple[str, int]] = []
    stop = 0

    class Ended(BaseException):
        pass

    def recording(self: Journal, *entry: Any) -> None:
        if len(recorded) == stop:
            raise Ended
        record(self, *entry)
        recorded.append((entry[0], len(fetched.spans)))

    monkeypatch.setattr(Journal, "record", recording)
    for stop in (2, 5, 8, 13, 21, -1):  # noqa: B007
        with suppress(Ended):
            api.convert("gs://bkt/src", tmp_path / "out", **FORMS[form])
    assert contents(tmp_path / "out") == contents(tmp_path / "local")
    done = dict(each for each in recorded if each[0].startswith(("unit", "file", "hash")))
    assert len(done) == sum(name in done for name, _ in recorded)
    for number, name in enumerate(sorted(path.name for path in checkpoint.glob("*.safetensors"))):
        assert name not in {each for each, *_ in fetched.spans[done[f"hash-{number:05d}"] :]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "out"]


def test_a_small_workspace_is_refused_before_weights_are_fetched(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=10_000)))
    with pytest.raises(TpuconvError, match="the workspace") as info:
        api.convert(REPO, tmp_path / "out", workspace=tmp_path / "ws")
    assert info.value.exit_code == 8
    assert not fetches(hub)
    assert not list((tmp_path / "ws").iterdir())


def test_keep_source_fills_the_cache_and_what_is_there_is_used(hub: HubServer, hub_cache: Path, tmp_path: Path) -> None:
    api.convert(REPO, tmp_path / "out", keep_source=True)
    (snapshot,) = hub_cache.glob("*/snapshots/*")
    assert len(list(snapshot.glob("*.safetensors"))) == SHARDS
    (snapshot / "model-00003-of-00008.safetensors").unlink()
    hub.forget()
    api.convert(REPO, tmp_path / "again")
    assert outputs(tmp_path / "again") == outputs(tmp_path / "out")
    assert {request.file for request in of_weights(hub)} == {"model-00003-of-00008.safetensors"}
    with pytest.raises(UsageError, match="needs a Hub id"):
        api.convert(snapshot, tmp_path / "x", keep_source=True)


@pytest.mark.parametrize("before", ["it is looked at", "it is locked"])
def test_a_workspace_that_its_owner_removes_meanwhile_is_left(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of several processes that have little to fetch does when it has ended."""
    root = tmp_path / "source"
    if before == "it is looked at":
        root.mkdir()
    target, name = (Path, "lstat") if root.exists() else (disk, "open_lock")
    real = getattr(target, name)

    def late(path: Path) -> Any:
        if root in (path, path.parent) and root.exists():
            root.rmdir()
        return real(path)

    monkeypatch.setattr(target, name, late)
    found, lock = workspace.claim(tmp_path, "source")
    assert found == tmp_path / "source-1"
    workspace.release(found, lock)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("form", "at_once"),
    [
        ("plain", False),
        ("scanned", False),
        ("plain", True),
        pytest.param("safetensors", True, marks=pytest.mark.slow),
    ],
)
def test_three_processes_fetch_their_parts(
    form: str, at_once: bool, hub: HubServer, hub_cache: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """A file at the end of a part is fetched and hashed by both its neighbours; of the others each byte comes once."""
    api.convert(checkpoint, tmp_path / "local", **FORMS[form])

    def convert(index: int) -> api.Conversion:
        return api.convert(REPO, tmp_path / "out", part=ProcessPart(index, 3), **FORMS[form])

    with ThreadPoolExecutor(3 if at_once else 1) as pool:
        done = list(pool.map(convert, range(3)))
    assert any(each.published for each in done)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    assert next(each for each in done if each.published).source_verified
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf-home", "local", "out"]
    files = [path.stat().st_size for path in checkpoint.glob("*.safetensors")]
    if form == "plain":
        assert weights_sent(hub) <= sum(files) + 2.2 * max(files)


@pytest.mark.slow
def test_a_source_larger_than_the_disk_goes_from_bucket_to_bucket(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The structure of DeepSeek-R1, scaled, its values zeros; the disk of the workspace holds what was planned."""
    zeros = {name: ("BF16", shape) for name, shape in source_shapes(R1_SCALED).items()}
    folder = in_order(tmp_path / "ghost", R1_SCALED, zeros, 40)
    for path in folder.iterdir():
        bucket.store.put(f"ghost/{path.name}", path.read_bytes())
    planned = api.plan("gs://bkt/ghost").workspace_bytes
    source = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 4 * planned < source
    with small_disk(tmp_path / "disk", f"size={planned + (256 << 10)}") as disk:
        api.convert("gs://bkt/ghost", "gs://bkt/out", workspace=disk)
    assert api.verify("gs://bkt/out").passed


@pytest.mark.slow  # it waits for processes, which a loaded machine delays
@pytest.mark.parametrize(("file", "after"), [("tokenizer*", 0), ("model-*", 3500)], ids=["before", "while"])
def test_an_interrupt_does_not_wait_for_a_silent_server(
    file: str, after: int, hub: HubServer, hub_cache: Path, tmp_path: Path
) -> None:
    """Before weights are fetched, and meanwhile. The client's timeout is 10 s, and it tries five times."""
    hub.fail(file, **({"break_after": after, "hang": True} if after else {"silent": True}))
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub_cache.parent), "HF_HUB_DISABLE_XET": "1"}
    patch = "from tpuconv.sources import repository; repository.HEADER_PEEK = 3000"
    with started("convert", REPO, tmp_path / "out", patch=patch, env=os.environ | own, stderr=DEVNULL) as child:
        gets = lambda: [r for r in hub.requests if r.method == "GET" and fnmatchcase(r.file, file)]  # noqa: E731
        wait_for(lambda: any(r.sent == after and r.cdn == bool(after) for r in gets()), child)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=5) == 130
    assert not (tmp_path / "out").exists()


SMALL = """
from tpuconv.convert.plan import sizes
sizes.UNIT_BYTES, sizes.SLAB_BYTES = 8 << 10, 4 << 10
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["beside the output", "a workspace"])
def test_a_killed_process_goes_on(
    place: str, hub: HubServer, hub_cache: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """After each kill less is left to be fetched; what is fetched again was on the way, or not looked at yet."""
    api.convert(checkpoint, tmp_path / "local")
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub_cache.parent), "HF_HUB_DISABLE_XET": "1"}
    more = ["--workspace", str(tmp_path / "ws")] if place == "a workspace" else []
    killed = 0
    for _ in range(20):
        before = len(fetches(hub))
        with started(
            "convert", REPO, tmp_path / "out", *more, patch=UNHURRIED + SMALL, env=os.environ | own, stderr=DEVNULL
        ) as child:
            wait_for(lambda: child.poll() is not None or len(fetches(hub)) > before + 2)  # noqa: B023
            child.kill()
            killed += child.wait() == -signal.SIGKILL
        if (tmp_path / "out").exists():
            break
    tpuconv("convert", REPO, tmp_path / "out", *more, env=os.environ | own, patch=SMALL)
    assert killed > 1
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "ws") == ["hf-home", "local", "out"]
    assert not (tmp_path / "ws").exists() or not list((tmp_path / "ws").iterdir())
