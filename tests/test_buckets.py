"""Places that are not local: URLs of buckets, and addresses that are refused. The bucket is one in memory."""

import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.request
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import tpuconv
from helpers.attacks import made
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, Killed, MemoryBucket, in_memory, objects
from helpers.quantizing import leaves
from tpuconv import api, buckets, doctor, object_requests
from tpuconv.bucket_errors import translated
from tpuconv.cli import tpuconv as cli
from tpuconv.credentials import CREDENTIAL_VARIABLES, ENDPOINTS
from tpuconv.errors import (
    AccessRefused,
    BucketError,
    CorruptOutput,
    OutputError,
    SourceError,
    TpuconvError,
    UsageError,
)
from tpuconv.extras import install_command
from tpuconv.location import BucketPath, to_location
from tpuconv.storage import claim as claims
from tpuconv.storage.bucket_journal import BucketJournal
from tpuconv.storage.bucket_publishing import Publication
from tpuconv.storage.sealed import seal


def test_urls():
    assert to_location("gs://b/models/out/") == BucketPath("gs", "b", "models/out")
    assert str(to_location("s3://b")) == "s3://b"
    place = to_location("az://b/models/out")
    assert (place.name, str(place.parent), str(place / "a/b")) == ("out", "az://b/models", "az://b/models/out/a/b")
    assert [str(p) for p in place.parents] == ["az://b/models", "az://b"]
    assert to_location("my-lora:0.5") == Path("my-lora:0.5")
    assert to_location(Path("a/b")) == Path("a/b")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("gs://b//out", "a folder has no name"),
        ("gs://b/../out", "'..' is no folder there"),
        ("s3://b/a?b", "'?' cannot be in a name there"),
        ("az://", "it names no bucket"),
        ("gs://-b/out", "no bucket can be named '-b'"),
    ],
)
def test_an_address_that_is_no_folder_says_why(url, why):
    with pytest.raises(UsageError, match=re.escape(f"is not the URL of a folder in a bucket: {why}")):
        to_location(url)


@pytest.mark.parametrize("address", ["hdfs://host/x", "http://host/x", "gs:/b/out", "gs://", "gs:///x", "s3://b/../x"])
def test_other_addresses_are_refused_by_name(address):
    with pytest.raises(UsageError, match=r"URL of a|scheme"):
        to_location(address)


def test_a_path_has_lost_a_slash():
    with pytest.raises(UsageError) as info:
        tpuconv.load(Path("gs://b/out"))
    assert "gs://b/out, as text" in (info.value.hint or "")


def test_no_local_folder_is_made_of_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv in (["convert", "src", "hdfs://b/out"], ["verify", "ftp://b/x"], ["export", "ckpt", "gs:/b/out"]):
        with pytest.raises(UsageError, match=re.escape(argv[-1])):
            cli.main(argv, standalone_mode=False)
    assert not os.listdir(tmp_path)


# --- errors of stores ----------------------------------------------------------------------------------------------


def answer(status: int, code: str, message: str, *, lists: bool = False) -> str:
    """The text of obstore for an answer of S3."""
    what = "Error performing list request: " if lists else ""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    url = "https://s3.amazonaws.com/b/x/tokenizer.json?X-Amz-Signature=secret"
    return (
        f"Generic S3 error: {what}Error performing GET {url} in 2ms - Server returned non-2xx status code: {status} "
        f"No: {body}\n\nDebug source:\nGeneric {{ secret }}"
    )


@pytest.mark.parametrize(
    ("kind", "text", "done", "error", "says", "hint"),
    [
        ("PermissionDeniedError", answer(403, "AccessDenied", "Access Denied"), "deleted", AccessRefused,
         "deleted: Amazon S3 refuses access\n  AccessDenied: Access Denied", "s3:DeleteObject"),
        ("GenericError", answer(403, "InvalidAccessKeyId", "No such key.", lists=True), "listed", AccessRefused,
         "listed: Amazon S3 refuses access\n  InvalidAccessKeyId: No such key.", "s3:ListBucket"),
        ("GenericError", answer(400, "AuthorizationHeaderMalformed", "expecting eu-west-1"), "read", BucketError,
         "another region\n  AuthorizationHeaderMalformed: expecting eu-west-1", "AWS_REGION"),
        ("GenericError", "Generic S3 error: Received redirect without LOCATION", "read", BucketError,
         "another region", "AWS_REGION"),
        ("GenericError", answer(400, "ExpiredToken", "The token has expired."), "read", BucketError,
         "credentials for Amazon S3 have expired", "log in again"),
        ("PermissionDeniedError", answer(403, "RequestTimeTooSkewed", "Too large."), "read", BucketError,
         "clock of this machine", "set the clock"),
        ("UnauthenticatedError", "lacked credentials for path External AWS credential provider: Boom: gone", "read",
         BucketError, "no credentials for Amazon S3: Boom: gone", "AWS_ACCESS_KEY_ID"),
        ("GenericError", "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 7ms - HTTP "
         "error: error sending request\n\nDebug source:\n kind: Connect,", "read", BucketError,
         "no credentials for Amazon S3 were found", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("FileNotFoundError", answer(404, "NoSuchBucket", "None."), "read", BucketError, "no bucket s3://b", "name"),
        ("GenericError", answer(503, "SlowDown", "Reduce."), "read", BucketError, "read: SlowDown: Reduce.", "network"),
        ("GenericError", "Error performing GET http://h/tokenizer.json?sig=secret in 2ms - HTTP error: error sending "
         "request\n\nDebug source:\n kind: Timeout,", "read", BucketError, r"error sending request (no answer in time)",
         "network"),
        ("InvalidPathError", 'Path "x//y" contained empty path segment', "listed", UsageError, "x//y", "rename"),
    ],
)  # fmt: skip
def test_errors_say_what_the_server_said(kind, text, done, error, says, hint):
    from obstore import exceptions

    with pytest.raises(TpuconvError) as info, translated(BucketPath("s3", "b", "x"), done):
        raise getattr(exceptions, kind, FileNotFoundError)(text)
    assert type(info.value) is error
    assert says in str(info.value)
    assert hint in (info.value.hint or "")
    assert "secret" not in str(info.value)
    assert "credentials for Amazon S3:" not in str(info.value) or "Boom" in str(info.value)


@pytest.mark.parametrize(
    ("scheme", "name", "value"),
    [("s3", "AWS_ENDPOINT_URL", ""), ("s3", "AWS_ENDPOINT", "127.0.0.1:9000"), ("gs", "GOOGLE_BASE_URL", "http://")],
)
def test_an_address_of_a_server_that_is_none(scheme, name, value, monkeypatch):
    """With it obstore panics."""
    monkeypatch.setattr(buckets, "OPEN", {})
    for others in ENDPOINTS.values():
        for other in others:
            monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} is '{value}'"):
        tpuconv.load(f"{scheme}://bkt/out")


def test_a_profile_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(buckets, "OPEN", {})
    for name in (*CREDENTIAL_VARIABLES["s3"], *ENDPOINTS["s3"]):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nope")
    with pytest.raises(BucketError, match="nope") as info:
        tpuconv.load("s3://bkt/out")
    assert info.value.hint


@pytest.mark.parametrize(
    ("answers", "deleted"),
    [
        ([200], True),
        ([404], False),
        ([412], False),
        ([403], None),
        ([503, 429, 200], True),
        ([ConnectionResetError(), 404], True),
        ([http.client.BadStatusLine(""), 412], False),
        ([503] * 9, OSError),
        ([418], OSError),
    ],
)
def test_a_delete_under_a_condition_is_repeated(answers, deleted, monkeypatch):
    """The first request may have deleted the object, and its answer was lost."""
    asked = iter(answers)

    def urlopen(request: urllib.request.Request, timeout: float) -> object:
        match next(asked):
            case 200:
                return nullcontext()
            case int(status):
                raise urllib.error.HTTPError(request.full_url, status, "no", request.headers, None)  # type: ignore[arg-type]
            case error:
                raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(object_requests, "FIRST_PAUSE", 0)
    ask = partial(object_requests.delete_if, None, "gs", "b", "x", {"version": "1"}, lambda: "t")
    if deleted is OSError:
        with pytest.raises(OSError, match="DELETE"):
            ask()
    else:
        assert ask() is deleted
    assert next(asked, None) is None


# --- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    return in_memory(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.source(tmp_path_factory.mktemp("source") / "src", shards=2)


def upload(bucket: MemoryBucket, folder: Path, key: str) -> str:
    for name, data in contents(folder).items():
        bucket.put(f"{key}/{name}", data)
    return f"{ROOT}/{key}"


def test_outputs_are_those_of_a_local_disk(bucket, source, tmp_path):
    api.convert(source, tmp_path / "ckpt")
    done = api.convert(source, f"{ROOT}/ckpt")
    assert str(done.out) == f"{ROOT}/ckpt"
    assert objects(f"{ROOT}/ckpt") == contents(tmp_path / "ckpt")
    assert api.convert(source, f"{ROOT}/ckpt", check=True).already_there
    api.export(f"{ROOT}/ckpt", f"{ROOT}/hf")
    api.export(tmp_path / "ckpt", tmp_path / "hf")
    assert objects(f"{ROOT}/hf") == contents(tmp_path / "hf")
    for place in ("ckpt", "hf"):
        assert api.verify(f"{ROOT}/{place}").passed
    assert api.inspect(f"{ROOT}/ckpt", mesh={"tensor": 2}).format == "tpuconv"
    assert api.inspect(f"{ROOT}/hf").format == "safetensors"
    assert {name.split("/")[0] for name in objects(ROOT)} == {"ckpt", "hf"}


def test_load_and_save(bucket, source, tmp_path):
    api.convert(source, f"{ROOT}/ckpt")
    api.convert(source, tmp_path / "ckpt")
    model, local = tpuconv.load(f"{ROOT}/ckpt"), tpuconv.load(tmp_path / "ckpt")
    assert {n: x.tobytes() for n, x in leaves(model).items()} == {n: x.tobytes() for n, x in leaves(local).items()}
    tpuconv.save(model, f"{ROOT}/saved", f"{ROOT}/ckpt")
    params = {name: data for name, data in objects(f"{ROOT}/ckpt").items() if "/c." in name}
    assert {name: data for name, data in objects(f"{ROOT}/saved").items() if "/c." in name} == params


def test_a_source_in_a_bucket(bucket, source, tmp_path):
    """Ranges are read, nothing is copied to a disk; a source that changes is found."""
    place = upload(bucket, source, "src")
    api.convert(place, tmp_path / "far")
    api.convert(source, tmp_path / "near")
    assert contents(tmp_path / "far") == contents(tmp_path / "near")
    assert api.convert(place, tmp_path / "near").already_there
    with pytest.raises(UsageError, match="lies in the source"):
        api.convert(place, f"{place}/out")
    shard = next(name for name in objects(place) if name.endswith(".safetensors"))
    data = objects(place)[shard]
    bucket.put(f"src/{shard}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(OutputError, match="exists already"):
        api.convert(place, tmp_path / "far")
    bucket.put(f"src/{shard}", data[:-1])
    with pytest.raises(SourceError, match="truncated"):
        api.convert(place, tmp_path / "other")


def test_a_source_that_changes_while_it_is_read(bucket, source, tmp_path, monkeypatch):
    place = upload(bucket, source, "src")
    name = next(name for name in objects(place) if name.endswith(".safetensors"))
    read, changed = buckets.read, []

    def once(path, start=0, stop=None):
        if path.name == name and start > 0 and not changed:
            changed.append(bucket.put(f"src/{name}", objects(place)[name]))
        return read(path, start, stop)

    plan = made.plan_of(to_location(place))
    monkeypatch.setattr(buckets, "read", once)
    with pytest.raises(SourceError, match="changed while it was converted"):
        made.drain(made.run(plan, tmp_path / "out", made.LIMITS))
    assert changed
    assert not (tmp_path / "out").exists()


def test_update_and_damage(bucket, source):
    api.convert(source, f"{ROOT}/ckpt")
    bucket.put("ckpt/generation_config.json", b'{"eos_token_id": 5}')
    bucket.put("ckpt/params/extra/c.0", b"x")
    found = api.verify(f"{ROOT}/ckpt")
    assert {each.name for each in found.faults} == {"generation_config.json", "params/extra"}
    bucket.delete(["ckpt/params/extra/c.0"])
    assert api.verify(f"{ROOT}/ckpt", update=True).passed
    shard = next(name for name in objects(ROOT) if "/c." in name)
    bucket.delete([shard])
    with pytest.raises(CorruptOutput, match="does not hold the arrays"):
        tpuconv.load(f"{ROOT}/ckpt")


def test_no_checkpoint(bucket):
    for place in ("none", "ckpt"):
        with pytest.raises(UsageError, match=r"no tpuconv\.json"):
            tpuconv.load(f"{ROOT}/{place}")
    with pytest.raises(UsageError, match="push uploads local folders"):
        api.push(f"{ROOT}/ckpt", "a/b")


def test_a_quantization_config_in_a_bucket(bucket):
    from tpuconv.quantize.config import find_config

    text = (Path(tpuconv.__file__).parent / "quant_configs" / "int8_weight_only.yaml").read_bytes()
    bucket.put("rules.yaml", text)
    assert find_config(f"{ROOT}/rules.yaml").rules == find_config("int8_weight_only").rules


def test_without_obstore(monkeypatch):
    monkeypatch.setattr(buckets, "OPEN", {})
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(buckets, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as info:
        tpuconv.load("gs://bkt/out")
    assert info.value.hint == install_command("cloud")


def test_doctor(bucket, monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "very secret")
    item = doctor._bucket(to_location(f"{ROOT}/models"))
    assert item.status == "ok"
    assert "the environment (GOOGLE_BEARER_TOKEN)" in item.found
    assert "secret" not in str(item)
    assert objects(ROOT) == {}
    bucket.at, bucket.error = len(bucket.log), BucketError("refused", hint="ask")
    item = doctor._bucket(to_location(f"{ROOT}/models"))
    assert (item.status, item.found, item.advice) == ("fail", "refused", "ask")


def test_doctor_names_unfinished_work(bucket, source, monkeypatch):
    """What a killed process and a late one left, and not what is being written."""
    out = to_location(f"{ROOT}/models/out")
    bucket.at = 9
    with pytest.raises(Killed):
        made.convert(source, out)
    bucket.at = None
    bucket.put(f"models/deep/other.tpuconv/{'a' * 32}/{'b' * 32}/config.json", b"late")
    bucket.put("models/thesis.tpuconv/claims.tex", b"theirs")
    with BucketJournal(to_location(f"{ROOT}/models/written"), "f"):
        item = doctor._bucket(to_location(f"{ROOT}/models"))
    assert item.status == "warn"
    assert item.facts["stopped"] == ["out"]
    assert item.facts["left_over"] == [f"deep/other.tpuconv/{'a' * 32}"]
    assert f"run the command for {out} again" in item.advice
    made.convert(source, out)
    bucket.delete([f"models/deep/other.tpuconv/{'a' * 32}/{'b' * 32}/config.json"])
    assert doctor._bucket(to_location(f"{ROOT}/models")).status == "ok"


def test_a_heartbeat_keeps_the_claim_and_finds_that_it_is_lost(bucket, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.02)
    with BucketJournal(to_location(f"{ROOT}/out"), "f") as journal:
        journal.begin()
        first = journal.claim.held.number
        while journal.claim.held.number == first:
            pass
        bucket.put(
            "out.tpuconv/claim", journal.claim.held.to_bytes().replace(journal.claim.process.encode(), b"0" * 32)
        )
        assert journal.claim._lost.wait(10)
        with pytest.raises(OutputError, match="another process writes"):
            journal.record("u", {})
        work = journal.claim.held.work
    assert set(objects(ROOT)) == {"out.tpuconv/claim", f"out.tpuconv/{work}/plan.done"}


@pytest.mark.parametrize("at", ["entry", "publishing"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, BucketError], ids=["interrupted", "failed"])
def test_another_machine_goes_on_at_once_with_work_that_was_left(at, error, bucket, source, tmp_path, monkeypatch):
    """Not after the 300 s in which the claim of a killed process lapses."""
    record = BucketJournal.record

    def left(self, *args):
        if isinstance(self, BucketJournal):
            record(self, *args)
        raise error("no more")

    with monkeypatch.context() as patch:
        patch.setattr(*((BucketJournal, "record") if at == "entry" else (Publication, "publish")), left)
        with pytest.raises(error):
            made.convert(source, to_location(f"{ROOT}/out"))
    monkeypatch.setattr(claims, "this_machine", lambda: "another/space/1/1")
    made.convert(source, to_location(f"{ROOT}/out"))
    made.convert(source, tmp_path / "right")
    assert objects(f"{ROOT}/out") == contents(tmp_path / "right")
    assert {name.split("/")[0] for name in objects(ROOT)} == {"out"}


def test_a_writer_that_cannot_renew_its_claim_stops(bucket, monkeypatch):
    """By its own clocks, without asking the store: no object is written after the time is over."""
    with BucketJournal(to_location(f"{ROOT}/out"), "f", names=["x"]) as journal:
        journal.begin()
        journal.sink.write("x", b"1")
        began, was = claims._clocks, len(bucket.log)
        for late in ((claims.FENCE_SECONDS + 1, 0), (0, claims.FENCE_SECONDS + 1)):  # suspended; its clock was set
            monkeypatch.setattr(
                claims, "_clocks", lambda late=late: tuple(a + b for a, b in zip(began(), late, strict=True))
            )
            for act in (lambda: journal.sink.write("x", b"2"), lambda: journal.record("u", {}, ["x"]), journal.publish):
                with pytest.raises(OutputError, match="could not be renewed for 200 s"):
                    act()
        assert len(bucket.log) == was
    assert bytes(buckets.read(journal._folder / journal.claim.process / "x")) == b"1"


def test_a_clock_that_another_process_cleared_is_written_again(bucket, monkeypatch):
    """As the process that publishes does it."""
    cleared, facts = [], buckets.facts

    def cleared_once(path):
        if path.name == "clock" and not cleared:
            cleared.append(path)
            bucket.delete([path.key])
        return facts(path)

    with BucketJournal(to_location(f"{ROOT}/out"), "f") as journal:
        monkeypatch.setattr(buckets, "facts", cleared_once)
        assert -1 < journal.claim.age(*journal.claim.read()) < 60
        assert cleared
    assert not [name for name in objects(ROOT) if "clock" in name]


def test_an_entry_of_other_keys_is_refused(bucket):
    journal = BucketJournal(to_location(f"{ROOT}/out"), "f")
    with journal:
        journal.begin()
        journal._has_staged = True
    place = f"out.tpuconv/{journal.claim.held.work}/plan.done"
    facts = json.loads(bytes(objects(ROOT)[place]))
    del facts["old"]
    bucket.put(place, seal(facts))
    with (
        pytest.raises(OutputError, match="old") as e,
        BucketJournal(to_location(f"{ROOT}/out"), "f") as journal,
    ):
        journal.begin()
    assert "to begin anew" in e.value.hint


def test_compressed_arrays(bucket, source, tmp_path):
    """Their files have sizes that the manifest knows."""
    api.convert(source, f"{ROOT}/ckpt", compress=True)
    api.convert(source, tmp_path / "ckpt", compress=True)
    assert objects(f"{ROOT}/ckpt") == contents(tmp_path / "ckpt")
    assert api.verify(f"{ROOT}/ckpt").passed
    model, local = tpuconv.load(f"{ROOT}/ckpt"), tpuconv.load(tmp_path / "ckpt")
    assert {n: x.tobytes() for n, x in leaves(model).items()} == {n: x.tobytes() for n, x in leaves(local).items()}


def test_a_renewal_whose_answer_was_lost(bucket):
    """The request is made again by the client, and its condition does not hold any more: by our own hand."""
    with BucketJournal(to_location(f"{ROOT}/out"), "f") as journal:
        journal.begin()
        bucket.at, bucket.late, bucket.error = len(bucket.log), True, buckets.ConditionLost()
        journal.claim._renew(journal.claim.held)
        bucket.at = None
        journal.claim._renew(journal.claim.held)
        journal.record("u", {})
