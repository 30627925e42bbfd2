"""Whole commands against servers that speak the protocols of the clouds: moto (S3), a small GCS, Azurite (Azure)."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import tpuconv
from helpers.attacks import made
from helpers.attacks.counts import count
from helpers.attacks.processes import started
from helpers.attacks.processes import tpuconv as attacked
from helpers.attacks.simulated import contents
from helpers.azurite import PROGRAM, azurite
from helpers.buckets import objects
from helpers.commands import tpuconv as command
from helpers.fake_gcs import Objects, environment, fake_gcs
from helpers.quantizing import leaves
from helpers.times import wait_for
from helpers.trainers import save_pytree, save_step, trained_tree
from tpuconv import api, buckets
from tpuconv.errors import BucketError, OutputError, SourceError, TpuconvError, UsageError
from tpuconv.location import BucketPath, to_location

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


MILLISECOND = timedelta(milliseconds=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.source(tmp_path_factory.mktemp("source") / "src", shards=2)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    with fake_gcs() as (url, held):
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(buckets, "OPEN", {})
        monkeypatch.setattr(buckets, "BUCKET_RETRIES", {"max_retries": 3, "backoff": {"init_backoff": MILLISECOND}})
        yield held


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": moto, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "OPEN", {})
    client = boto3.client("s3", endpoint_url=moto, region_name="us-east-1")
    client.create_bucket(Bucket="bkt")
    return moto


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with azurite(tmp_path_factory.mktemp("azurite"), "bkt") as variables:
        yield variables


@pytest.fixture
def az(azure: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in azure.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(buckets, "OPEN", {})


SCHEMES = [
    "gs",
    "s3",
    pytest.param("az", marks=pytest.mark.skipif(not PROGRAM, reason="needs Azurite: npm install --global azurite")),
]
SERVERS = {"gs": "gcs", "s3": "s3", "az": "az"}
"""The fixture of each scheme's server."""


@pytest.fixture(params=SCHEMES)
def root(request: pytest.FixtureRequest) -> str:
    """The URL of a folder in a bucket of each cloud, which no other test uses."""
    request.getfixturevalue(SERVERS[request.param])
    return f"{request.param}://bkt/a b%20ü/{request.node.originalname}"


def test_every_command_there_and_back(root, source, tmp_path):
    """A source in a bucket, outputs in a bucket, equal to the local ones."""
    command("convert", source, tmp_path / "ckpt")
    done = json.loads(command("convert", source, f"{root}/ckpt", "--json").stdout)
    assert done["out"] == f"{root}/ckpt"
    assert objects(f"{root}/ckpt") == contents(tmp_path / "ckpt")
    command("export", f"{root}/ckpt", f"{root}/hf")
    command("export", tmp_path / "ckpt", tmp_path / "hf")
    assert objects(f"{root}/hf") == contents(tmp_path / "hf")
    command("convert", f"{root}/hf", f"{root}/again")
    params = {name: data for name, data in objects(f"{root}/ckpt").items() if name.startswith("params/")}
    assert {n: d for n, d in objects(f"{root}/again").items() if n.startswith("params/")} == params
    command("quantize", f"{root}/ckpt", f"{root}/again", "--config", "int8_weight_only", "--overwrite")
    command("quantize", tmp_path / "ckpt", tmp_path / "int8", "--config", "int8_weight_only")
    assert objects(f"{root}/again").keys() == contents(tmp_path / "int8").keys()
    for place in (f"{root}/ckpt", f"{root}/again", f"{root}/hf"):
        assert "all checksums match" in command("verify", place).stdout
    command("inspect", f"{root}/ckpt", "--mesh", "tensor=2")
    command("inspect", f"{root}/hf")
    assert not [name for name in objects(root) if name.split("/")[0] not in ("ckpt", "hf", "again")]
    model, local = tpuconv.load(f"{root}/ckpt"), tpuconv.load(tmp_path / "ckpt")
    assert {n: x.tobytes() for n, x in leaves(model).items()} == {n: x.tobytes() for n, x in leaves(local).items()}
    tpuconv.save(model, f"{root}/saved", f"{root}/ckpt")
    assert api.verify(f"{root}/saved").passed


def test_an_upload_in_parts_appears_at_its_end(root, monkeypatch):
    place = to_location(f"{root}/x")
    assert isinstance(place, BucketPath)
    monkeypatch.setattr(buckets, "PART_BYTES_OF_UPLOADS", 5 << 20)
    data = np.random.default_rng(0).integers(0, 256, 12 << 20, np.uint8).tobytes()

    def write(end: Exception | None) -> None:
        with buckets.upload(place) as append:
            for start in range(0, len(data), 1_000_000):
                append(memoryview(data)[start : start + 1_000_000])
            assert buckets.facts(place) is None
            if end:
                raise end

    with pytest.raises(ZeroDivisionError):
        write(ZeroDivisionError())
    assert buckets.facts(place) is None
    write(None)
    assert bytes(buckets.read(place)) == data


def test_orbax_restores_from_gcs(gcs, source, tmp_path):
    """Unmodified, and only what is complete."""
    made.convert(source, tmp_path / "ckpt")
    api.convert(source, "gs://bkt/ckpt")
    program = """
import sys
import orbax.checkpoint as ocp
from helpers.conversions import flatten, assert_same
restored = [dict(flatten(ocp.StandardCheckpointer().restore(path))) for path in sys.argv[1:3]]
assert_same(*restored)
try:
    ocp.StandardCheckpointer().restore(sys.argv[3])
except ValueError as e:
    print(e)
"""
    for key in list(gcs.contents):
        if "/params/" in key and not key.endswith("commit_success.txt"):
            gcs.contents[key.replace("/ckpt/", "/half/")] = gcs.contents[key]
    places = ("gs://bkt/ckpt/params", tmp_path / "ckpt/params", "gs://bkt/half/params")
    done = subprocess.run([sys.executable, "-c", program, *map(str, places)], capture_output=True, text=True,
                          check=False, cwd=Path(__file__).parent)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "incomplete" in done.stdout


@pytest.mark.parametrize("root", ["gs", "s3"], indirect=True)  # TensorStore reads no Azure: refused
def test_what_a_trainer_saved_is_read_from_a_bucket(root, source, tmp_path):
    """With OCDBT and without; the latest step of a run. The output is that of the same files on a disk."""
    api.convert(source, tmp_path / "ckpt", target="nnx")
    tree = trained_tree(tmp_path / "ckpt")
    save_pytree(tmp_path / "plain", tree, use_ocdbt=False)
    save_step(tmp_path / "run", 2, tree, "items")
    save_step(tmp_path / "run", 10, tree, "items")
    for name in ("plain", "run"):
        for key, data in contents(tmp_path / name).items():
            place = to_location(f"{root}/{name}/{key}")
            assert isinstance(place, BucketPath)
            buckets.put_object(place, data)
        near = api.export(tmp_path / name, tmp_path / f"{name}-near", config=source)
        far = api.export(f"{root}/{name}", tmp_path / f"{name}-far", config=source)
        assert str(far.arrays) == str(near.arrays).replace(str(tmp_path), root)
        assert contents(tmp_path / f"{name}-far") == contents(tmp_path / f"{name}-near")
    with pytest.raises(UsageError, match="is a checkpoint of Orbax without"):
        api.export(f"{root}/run", tmp_path / "out")


@pytest.mark.parametrize("status", [403, 503])
def test_a_trainers_bucket_that_refuses_a_chunk_is_exit_code_7(status, gcs, source, tmp_path):
    """TensorStore's requests are its own; a chunk that is missing is damage."""
    api.convert(source, tmp_path / "ckpt", target="nnx")
    save_pytree(tmp_path / "run", trained_tree(tmp_path / "ckpt"), use_ocdbt=False)
    for key, data in contents(tmp_path / "run").items():
        buckets.put_object(BucketPath("gs", "bkt", f"run/{key}"), data)
    gcs.fault = lambda method, key: status if "norm.scale" in key else None
    with pytest.raises(BucketError) as error:
        api.export("gs://bkt/run", tmp_path / "out", config=source)
    assert error.value.hint
    gcs.fault = lambda method, key: None
    chunk = next(key for key in gcs.contents if "norm.scale" in key and not key.rpartition("/")[2].startswith("."))
    del gcs.contents[chunk]
    with pytest.raises(SourceError, match=r"norm\.scale"):
        api.export("gs://bkt/run", tmp_path / "out", config=source)


FAULTS = {500: 7, 503: 7, 429: 7, 401: 7, 403: 7, -1: 7}


@pytest.mark.parametrize("status", FAULTS)
def test_faults_end_with_their_exit_code_and_a_rerun_finishes(status, gcs, source, tmp_path):
    """A store that fails for good, in the middle of the work: exit 7, and the rerun ends as if nothing was."""
    api.convert(source, "gs://bkt/right")
    right = objects("gs://bkt/right")
    gcs.fault = lambda method, key: status if method == "PUT" and "out/params" in key and "up.kernel" in key else None
    if status != -1:
        with pytest.raises(TpuconvError) as info:
            api.convert(source, "gs://bkt/out")
        assert info.value.exit_code == FAULTS[status], info.value
        assert "out" in info.value.message
        assert info.value.hint
    assert "tpuconv.json" not in objects("gs://bkt/out")
    gcs.fault = lambda method, key: None
    api.convert(source, "gs://bkt/out")
    assert objects("gs://bkt/out") == right
    gcs.fault = lambda method, key: status if method == "GET" and "c.0" in key else None
    with pytest.raises(TpuconvError) as info:
        api.verify("gs://bkt/out")
    assert info.value.exit_code == FAULTS[status], info.value


@pytest.mark.parametrize("status", [500, 503, 429, -1])
def test_faults_that_pass_are_retried(status, gcs, source):
    """Each request to an object fails once."""
    seen: set[tuple[str, str]] = set()

    def once(method: str, key: str) -> int | None:
        if method == "PUT" and key.endswith("claim"):  # a create that is repeated finds its own object
            return None
        new = (method, key) not in seen
        seen.add((method, key))
        return status if new and method in ("GET", "PUT", "DELETE") and (status != -1 or method == "GET") else None

    gcs.fault = once
    api.convert(source, "gs://bkt/out")
    api.convert(source, "gs://bkt/out", dtype="float32", overwrite=True)
    assert api.verify("gs://bkt/out").passed
    assert np.isfinite(next(iter(leaves(tpuconv.load("gs://bkt/out")).values())).astype("float32")).all()


def test_a_request_without_an_answer_is_repeated(gcs, source, monkeypatch):
    """Of requests that read."""
    monkeypatch.setattr(buckets, "SILENCE", {"read_timeout": "500ms"})
    asked: set[tuple[str, str]] = set()
    ended = threading.Event()

    def silent(method: str, key: str) -> int | None:
        is_first = (method, key) not in asked
        asked.add((method, key))
        if not (is_first and method == "GET" and key.endswith(("/config.json", "/norm.scale/c.0"))):
            return None
        ended.wait(30)
        return 503

    gcs.fault = silent
    began = time.monotonic()
    try:
        api.convert(source, "gs://bkt/out")
        assert api.verify("gs://bkt/out").passed
    finally:
        ended.set()
    assert time.monotonic() - began < 30


class Silence:
    """A server that answers no request from its nth write on; they are refused when it ends.

    Args:
        writes: how many requests that write come before it, and 1.
    """

    def __init__(self, writes: int) -> None:
        self.left, self.began, self.ended = writes, threading.Event(), threading.Event()

    def __call__(self, method: str, key: str) -> int | None:
        self.left -= method != "GET"
        if self.left > 0:
            return None
        self.began.set()
        self.ended.wait()
        return 503


@pytest.mark.parametrize("overwrite", [False, True])
def test_real_processes_killed_at_random_requests(overwrite, gcs, source, tmp_path):
    """Complete or absent after each kill; the rerun ends with the same bytes and no other object. A process gets no
    answers from one of its writes on until it is killed, and these writes are lost."""
    other = made.source(tmp_path / "other", 1, shards=2)
    api.convert(source, "gs://bkt/out")
    right = objects("gs://bkt/out")
    api.convert(other, "gs://bkt/old")
    before = {k.replace("/old/", "/out/"): v for k, v in gcs.contents.items() if "/old/" in k} if overwrite else {}
    argv = [sys.executable, "-m", "tpuconv", "convert", str(source), "gs://bkt/out", *["--overwrite"] * overwrite]
    rng, killed = random.Random(overwrite), 0
    for _ in range(60):
        gcs.contents.clear()
        gcs.contents.update(before)
        gcs.fault = silence = Silence(rng.randrange(1, 80))
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_for(lambda: silence.began.is_set() or process.poll() is not None)  # noqa: B023
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        gcs.fault = lambda *_: None
        silence.ended.set()
        if gcs.contents.get("bkt/out/tpuconv.json", (0, 0, b""))[2].startswith(b"{"):
            assert api.verify("gs://bkt/out").passed
        else:
            assert not overwrite or b'"publishing"' in gcs.contents["bkt/out.tpuconv/claim"][2]
        api.convert(source, "gs://bkt/out", overwrite=overwrite)
        assert objects("gs://bkt/out") == right
        assert {key.split("/")[1] for key in gcs.contents} == {"out"}
        if killed == 20:
            return
    raise AssertionError(f"only {killed} of 60 kills met the work")


def test_a_missing_bucket_and_a_lost_claim(s3, source):
    with pytest.raises(TpuconvError, match=r"no bucket|cannot be written") as info:
        api.convert(source, "s3://nobody/out")
    assert info.value.exit_code == 7
    with pytest.raises(BucketError, match="no bucket"):
        api.verify("s3://nobody/out")


def test_three_processes_of_the_command_equal_one(root, source, tmp_path):
    """At once, and then one of them killed at work and started again."""
    small = "from tpuconv.convert.plan import sizes; sizes.UNIT_BYTES = 1500; sizes.SLAB_BYTES = 1000\n"
    attacked("convert", source, tmp_path / "alone", patch=small)
    right = contents(tmp_path / "alone")

    def words(out: str, index: int) -> list[object]:
        return ["convert", source, out, "--process-index", index, "--process-count", 3]

    with ExitStack() as stack:
        together = [stack.enter_context(started(*words(f"{root}/out", i), patch=small)) for i in range(3)]
        assert [process.wait(600) for process in together] == [0, 0, 0]
    assert objects(f"{root}/out") == right
    dies = """
import os, threading
from tpuconv.storage.bucket_journal import BucketJournal as journal
record, alone = journal.record, threading.Lock()
def last(self, *entry):
    with alone:  # no other thread records its entry meanwhile
        record(self, *entry)
        os._exit(9)
journal.record = last
"""
    for index, patch in ((1, ""), (0, dies), (2, ""), (0, "")):
        attacked(*words(f"{root}/again", index), patch=small + patch, code=9 if patch else 0)
        assert "tpuconv.json" not in objects(f"{root}/again") or (index, patch) == (0, "")
    assert objects(f"{root}/again") == right
    assert {name.split("/")[0] for name in objects(root)} == {"out", "again"}


SLOW = """
import time
from tpuconv.storage import sinks
write, wait = sinks.StagedSink.write, {seconds}
def unhurried(self, name, data):
    time.sleep(wait)
    write(self, name, data)
sinks.StagedSink.write = unhurried
"""
"""Code with which each object of an output takes a while."""
BRIEF = "from tpuconv.storage import claim; claim.LAPSED_SECONDS, claim.this_machine = 1, lambda: ''\n"
"""Code of a process that takes a claim over after a second: as on another machine, five minutes later."""
FENCED = {
    True: "from tpuconv.storage import claim; claim.FENCE_SECONDS, claim.HEARTBEAT_SECONDS = 1.5, 0.5\n",
    False: "from tpuconv.storage import claim; claim.FENCE_SECONDS = 10**6\n",
}
"""Code of a process that stops by its own clock, and of one on a machine whose clock stood still."""


@pytest.mark.parametrize("fenced", FENCED)
@pytest.mark.parametrize("moment", [0.3, 0.8, 1.5])
def test_a_suspended_writer_changes_nothing(moment, fenced, root, source, tmp_path):
    """It stands still, at work or while it publishes. Another plan replaces its work and is published; then it goes
    on: it ends with exit code 9, and the other output is as it was."""
    root = f"{root}/{moment}-{fenced}"  # servers outlive a test
    other = made.source(tmp_path / "other", 1, shards=2)
    # The first process cannot be found dead: its claim says nothing of a machine.
    work = to_location(f"{root}/out.tpuconv")
    assert isinstance(work, BucketPath)
    slow = FENCED[fenced] + SLOW.format(seconds=0.02) + "claim.this_machine = lambda: ''\n"
    with started("convert", source, f"{root}/out", patch=slow, stderr=subprocess.PIPE) as first:
        wait_for(lambda: buckets.listing(work), first)
        time.sleep(moment)
        first.send_signal(signal.SIGSTOP)
        is_published = buckets.facts(work.parent / "out/tpuconv.json") is not None
        time.sleep(2)
        attacked("convert", other, f"{root}/out", "--overwrite", patch=BRIEF)
        right = objects(f"{root}/out")
        first.send_signal(signal.SIGCONT)
        assert first.wait(120) == (0 if is_published else 9), first.stderr.read()
    assert objects(f"{root}/out") == right
    assert api.verify(f"{root}/out").passed
    api.convert(other, f"{root}/out")
    assert {name.split("/")[0] for name in objects(root)} <= {"out", "out.tpuconv"}
    count("suspended writers", f"a process, {root.partition(':')[0]}")


def same_command_twice(root: str, source: Path, out: str, *options: str, delay: float) -> None:
    """`delay`: seconds between the starts."""
    with ExitStack() as stack:
        first = stack.enter_context(started("convert", source, f"{root}/{out}", *options))
        time.sleep(delay)
        second = stack.enter_context(started("convert", source, f"{root}/{out}", *options))
        codes = sorted(process.wait(300) for process in (first, second))
    assert codes in ([0, 9], [0, 0]), codes  # both end well if the second one finds what the first one published
    assert api.verify(f"{root}/{out}").passed
    assert {name.split("/")[0] for name in objects(root)} == {out}
    count("duplicates of a command", f"two processes, {root.partition(':')[0]}")


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_command_twice_at_once(overwrite, root, source, tmp_path):
    """One finishes; the other finds its output, or leaves with exit code 9. A hundred times each in the campaign."""
    root = f"{root}/{overwrite}"
    if overwrite:
        api.convert(made.source(tmp_path / "other", 1, shards=2), f"{root}/out")
    for times in range(DUPLICATES):  # each over another output than its own, which it would find and leave
        options = ("--overwrite", "--dtype", ("float32", "bfloat16")[times % 2])
        delay = random.Random(times).uniform(0, 1) * (times % 2)
        same_command_twice(root, source, "out", *options[: 4 * overwrite], delay=delay)
        if not overwrite:
            place = to_location(f"{root}/out")
            assert isinstance(place, BucketPath)
            buckets.remove_objects(place, buckets.listing(place).keys())


DUPLICATES = int(os.environ.get("TPUCONV_DUPLICATES", "3"))
"""How often."""


@pytest.mark.parametrize("root", ["gs", "s3"], indirect=True)
def test_markers_of_folders_are_neither_ours_nor_anybodys(root, source, request):
    """Consoles of clouds create objects without bytes, of the name of a folder."""
    place = f"{root.partition('://')[2].partition('/')[2]}"
    for name in ("out/", "out/params/", "out.tpuconv/"):
        if root.startswith("s3"):
            import boto3

            client = boto3.client("s3", endpoint_url=request.getfixturevalue("s3"), region_name="us-east-1")
            client.put_object(Bucket="bkt", Key=f"{place}/{name}", Body=b"")
        else:
            request.getfixturevalue("gcs").contents[f"bkt/{place}/{name}"] = (1, 0.0, b"")
    api.convert(source, f"{root}/out")
    assert api.verify(f"{root}/out").passed
    api.convert(source, f"{root}/out", overwrite=True, dtype="float32")
    assert api.verify(f"{root}/out").passed
    count("folder markers", f"convert, {root.partition(':')[0]}", 3)


def test_an_upload_that_fails_leaves_no_parts(s3, monkeypatch):
    import boto3

    monkeypatch.setattr(buckets, "PART_BYTES_OF_UPLOADS", 5 << 20)
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")

    def interrupted() -> None:
        with buckets.upload(BucketPath("s3", "bkt", "x")) as append:
            for _ in range(4):
                append(bytes(6 << 20))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not client.list_multipart_uploads(Bucket="bkt").get("Uploads")


def test_an_empty_object_of_the_name_of_a_file_is_somebodys(root, source):
    with buckets.upload(to_location(f"{root}/out/config.json")):
        pass
    with pytest.raises(OutputError, match=r"it holds config\.json"):
        api.convert(source, f"{root}/out", overwrite=True)
    assert objects(f"{root}/out") == {"config.json": b""}
