"""Uploads to a Hub on the loopback interface, by the client's HTTP protocol; and what is refused before."""

import hashlib
import json
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

import tpuconv as tpuconv_package
from helpers.buckets import ROOT, in_memory, objects
from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.commands import tpuconv
from helpers.hub_server import HubServer
from helpers.logits import forward
from tpuconv import api, buckets
from tpuconv.cli import tpuconv as group
from tpuconv.convert.export import files as export_files
from tpuconv.errors import CorruptOutput, HubError, OutputError, PushedCheckpoint, UsageError
from tpuconv.location import to_location
from tpuconv.verify.signature import check_signature, sign

REPO = "org/tiny-orbax"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    random_checkpoint(folder / "hf", qwen3_config())
    api.convert(folder / "hf", folder / "checkpoint")
    api.convert(folder / "hf", folder / "maxtext", target="maxtext")
    api.export(folder / "checkpoint", folder / "export")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export_files, "SHARD_BYTES", 6000)
        api.export(folder / "checkpoint", folder / "sharded")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    from huggingface_hub import close_session, constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet has a server and a protocol of its own
    (tmp_path / "token").write_text("hf_secret")
    with HubServer({}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
        yield server
    close_session()


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["checkpoint", "maxtext", "export"])
def test_every_file_arrives_as_it_is(kind, outputs, hub, capfd):
    done = api.push(outputs / kind, REPO)
    assert hub.pushed[REPO]["main"] == files(outputs / kind)
    assert hub.objects
    assert done.commit
    assert done.files == {name: len(data) for name, data in files(outputs / kind).items()}
    assert capfd.readouterr() == ("", "")
    ours = [r for r in hub.requests if REPO in r.path and not r.cdn]  # the client asks for more, for itself
    assert {r.token for r in ours} == {"Bearer hf_secret"}
    assert {r.token for r in hub.requests if r.cdn} == {None}
    assert api.verify(outputs / kind).passed  # the client left nothing in the folder


def test_a_branch_and_a_private_repository(outputs, hub):
    api.push(outputs / "export", REPO, private=True, revision="dev")
    assert hub.private[REPO]
    assert (hub.pushed[REPO]["dev"], hub.pushed[REPO]["main"]) == (files(outputs / "export"), {})
    api.push(outputs / "export", REPO, private=True, revision="dev")
    hub.private[REPO] = False
    with pytest.raises(UsageError, match="is public"):
        api.push(outputs / "checkpoint", REPO, private=True)
    assert hub.pushed[REPO]["main"] == {}


def test_a_second_push_sends_no_large_file_again(outputs, hub):
    api.push(outputs / "checkpoint", REPO)
    hub.forget()
    api.push(outputs / "checkpoint", REPO)
    assert not [r for r in hub.requests if r.file == "object"]


@pytest.mark.parametrize("first", ["checkpoint", "maxtext", "export", "sharded"])
@pytest.mark.parametrize("second", ["checkpoint", "export", "sharded"])
def test_an_older_output_does_not_stay_beside_a_newer_one(first, second, outputs, hub):
    """Programs take a model.safetensors for the model, whatever index lies beside it."""
    api.push(outputs / first, REPO)
    theirs = {".gitattributes": b"* lfs", "plots/[a].png": b"theirs", "model.sig": signature_of(outputs / first)}
    hub.pushed[REPO]["main"] |= theirs
    done = api.push(outputs / second, REPO)
    assert hub.pushed[REPO]["main"] == {**files(outputs / second), **dict(list(theirs.items())[:2])}
    assert set(done.deleted) == {"model.sig", *files(outputs / first).keys() - files(outputs / second).keys()}


def signature_of(output: Path) -> bytes:
    """Returns what tells the files that were signed, as model-signing lays it out."""
    digest = hashlib.sha256((output / "tpuconv.json").read_bytes()).hexdigest()
    statement = {"predicate": {"resources": [{"name": "tpuconv.json", "digest": digest}]}}
    return json.dumps({"dsseEnvelope": {"payload": b64encode(json.dumps(statement).encode()).decode()}}).encode()


@pytest.mark.parametrize("has_older", [False, True])
def test_a_signature_of_others_stays(has_older, outputs, hub):
    """Of a repository without an output of ours, and beside one that it does not sign."""
    if has_older:
        api.push(outputs / "sharded", REPO)
    for signature in (signature_of(outputs / "export"), b"theirs"):
        hub.pushed.setdefault(REPO, {}).setdefault("main", {})["model.sig"] = signature
        assert "model.sig" not in api.push(outputs / "checkpoint", REPO).deleted
        assert hub.pushed[REPO]["main"]["model.sig"] == signature


def test_weights_of_others_are_not_mixed_with_ours(outputs, hub):
    api.push(outputs / "sharded", REPO)
    hub.pushed[REPO]["main"]["model.safetensors"] = b"theirs"
    before = dict(hub.pushed[REPO]["main"])
    with pytest.raises(UsageError, match="holds weights that no manifest of tpuconv names") as info:
        api.push(outputs / "checkpoint", REPO)
    assert info.value.details == ("model.safetensors",)
    assert hub.pushed[REPO]["main"] == before
    api.push(outputs / "checkpoint", REPO, revision="dev")


@pytest.mark.parametrize(
    ("file", "status", "message"),
    [
        ("upload", 401, "does not accept your token"),
        ("upload", 403, "denies access"),
        ("object", 403, "denies access"),
    ],
)
def test_errors_of_the_hub_are_ours(file, status, message, outputs, hub):
    hub.fail(file, status=status)
    with pytest.raises(HubError, match=message) as error:
        api.push(outputs / "checkpoint", REPO)
    assert status == 401 or "permission to write" in error.value.hint
    hub.mend()
    api.push(outputs / "checkpoint", REPO)
    assert hub.pushed[REPO]["main"] == files(outputs / "checkpoint")


def test_a_repository_to_push_to_is_not_looked_for_on_the_disk(outputs, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HubError, match="cannot be reached") as error:
        api.push(outputs / "checkpoint", REPO)
    assert "folder" not in str(error.value)
    assert "resume the upload" in error.value.hint


def test_what_is_not_complete_is_refused(outputs, hub, tmp_path):
    for kind in ("checkpoint", "export"):
        shutil.copytree(outputs / kind, tmp_path / kind)
        largest = max(
            (
                path
                for path in (tmp_path / kind).rglob("*")
                if path.suffix in ("", ".0", ".safetensors") and path.is_file()
            ),
            key=lambda p: p.stat().st_size,
        )
        (tmp_path / kind / "notes.txt").write_text("secret")
        with pytest.raises(UsageError, match="did not write") as error:
            api.push(tmp_path / kind, REPO)
        assert error.value.details == ("notes.txt",)
        (tmp_path / kind / "notes.txt").unlink()
        largest.write_bytes(largest.read_bytes()[:-1])
        with pytest.raises(CorruptOutput, match="not complete"):
            api.push(tmp_path / kind, REPO)
        largest.unlink()
        with pytest.raises(CorruptOutput, match="not complete"):
            api.push(tmp_path / kind, REPO)
    with pytest.raises(UsageError, match="is not a checkpoint made by tpuconv"):
        api.push(outputs / "hf", REPO)
    for name in ("tiny", "org/tiny/orbax", "org/ti ny", "../tiny"):
        with pytest.raises(UsageError, match="is not a Hub id"):
            api.push(outputs / "export", name)
    assert not hub.requests


def test_a_dry_run_lists_the_files(outputs):
    facts = api.push(outputs / "export", REPO, dry_run=True).to_json()
    assert facts["files"] == {name: len(data) for name, data in files(outputs / "export").items()}
    assert (facts["repo"], facts["revision"], facts["commit"]) == (REPO, "main", None)
    said = tpuconv("push", outputs / "export", REPO, "--dry-run").stdout
    assert "model.safetensors" in said
    assert "would be uploaded" in said


def test_what_was_pushed_is_loaded_by_its_id(outputs, serve_hub):
    """A checkpoint, also one for another program; other commands say how it is downloaded."""
    ids = np.array([[3, 1, 4, 1, 5]])
    server = serve_hub({"org/orbax": outputs / "checkpoint", "org/maxtext": outputs / "maxtext"})
    for repo, folder in (("org/orbax", "checkpoint"), ("org/maxtext", "maxtext")):
        models = (tpuconv_package.load(place) for place in (repo, outputs / folder))
        assert np.array_equal(*(forward(model, ids) for model in models))
        server.forget()
        tpuconv_package.load(repo)
        assert not [request for request in server.requests if request.cdn]  # it is in the cache
    with pytest.raises(PushedCheckpoint, match="holds a checkpoint of tpuconv, not a release") as error:
        api.plan("org/orbax")
    assert "`hf download org/orbax --local-dir orbax` downloads it" in error.value.hint
    with pytest.raises(UsageError, match="has the form that it was written in"):
        tpuconv_package.load("org/orbax", scan_layers=True)


# -- hf://ORG/NAME as OUT ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capsys) -> Callable[..., dict[str, Any]]:
    """Runs a command in this process, with `--json`, on this Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    hub.users["hf_secret"] = "org"

    def run(*args: object) -> dict[str, Any]:
        group.main([*map(str, args), "--json"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    return run


OUTPUTS = {
    "convert": ("convert", "hf", []),
    "quantize": ("quantize", "checkpoint", ["--config", "int8_weight_only"]),
    "export": ("export", "checkpoint", []),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_made_and_pushed(name, run, outputs, hub, tmp_path):
    command, source, options = OUTPUTS[name]
    run(command, outputs / source, tmp_path / "there", *options)
    done = run(command, outputs / source, f"hf://{REPO}", *options)
    assert (done["out"], done["already_there"]) == (f"hf://{REPO}", False)
    pushed, expected = hub.pushed[REPO]["main"], files(tmp_path / "there")
    assert pushed.keys() == expected.keys()
    assert json.loads(pushed["tpuconv.json"])["files"].keys() == json.loads(expected["tpuconv.json"])["files"].keys()
    assert not files(tmp_path / "home")


def test_an_output_that_was_not_pushed_is_pushed_by_the_same_command(run, outputs, hub, tmp_path):
    hub.fail("object", status=403)
    command = ("convert", outputs / "hf", f"hf://{REPO}", "--workspace", tmp_path / "work")
    with pytest.raises(HubError, match="denies access"):
        run(*command)
    made = files(tmp_path / "work" / "tpuconv" / REPO)
    assert made
    others = tmp_path / "work" / "tpuconv" / "others.txt"
    others.write_text("mine")
    hub.mend()
    run(*command)
    assert hub.pushed[REPO]["main"] == made
    assert list(files(tmp_path / "work")) == ["tpuconv/others.txt"]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_on_the_hub_is_not_made_again(name, run, outputs, hub, tmp_path, monkeypatch):
    command, source, options = OUTPUTS[name]
    command = (command, outputs / source, f"hf://{REPO}", *options)
    first = run(*command)
    pushed = dict(hub.pushed[REPO]["main"])
    hub.forget()
    again = run(*command)
    assert again["already_there"]
    same = set(first) - {"already_there", "seconds", "peak_memory_bytes", "resumed_bytes", "serve"}
    assert {key: first[key] for key in same} == {key: again[key] for key in same}
    assert not [request for request in hub.requests if request.method in ("POST", "PUT")]
    assert not files(tmp_path / "home")
    for force in ("--overwrite", "--check"):
        assert not run(*command, force)["already_there"]
    assert hub.pushed[REPO]["main"] == pushed


@pytest.mark.parametrize("fault", ["size", "missing", "seal", "options", "source"])
def test_what_is_not_this_output_on_the_hub_is_made_and_pushed(fault, run, outputs, hub, tmp_path):
    source = shutil.copytree(outputs / "hf", tmp_path / "hf")
    run("convert", source, f"hf://{REPO}")
    there = hub.pushed[REPO]["main"]
    expected, options = dict(there), []
    if fault == "size":
        there["params/norm.scale/c.0"] += b"0"
    elif fault == "missing":
        del there["params/norm.scale/c.0"]
    elif fault == "seal":
        there["tpuconv.json"] = there["tpuconv.json"].replace(b"qwen3", b"qwen4")
    elif fault == "options":
        options = ["--dtype", "float32"]
    else:
        weights = source / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-2:] = bytes(2)
        weights.write_bytes(data)
    assert not run("convert", source, f"hf://{REPO}", *options)["already_there"]
    assert (hub.pushed[REPO]["main"] == expected) == (fault not in ("options", "source"))
    assert run("convert", source, f"hf://{REPO}", *options)["already_there"]


def test_an_output_with_other_options_that_was_not_pushed_is_not_pushed_by_this_command(run, outputs, hub, tmp_path):
    """It stays, for the command that made it."""
    command, place = ("convert", outputs / "hf", f"hf://{REPO}"), tmp_path / "home" / "tpuconv" / REPO
    first = run(*command, "--quantize", "int8_weight_only")
    pushed = dict(hub.pushed[REPO]["main"])
    api.convert(outputs / "hf", place)
    again = run(*command, "--quantize", "int8_weight_only")
    assert again["already_there"]
    assert again["quantization"] == first["quantization"]
    assert hub.pushed[REPO]["main"] == pushed
    assert files(place)
    assert not run(*command)["already_there"]
    assert not files(place)
    assert hub.pushed[REPO]["main"] != pushed


def test_files_of_a_run_that_was_killed_before_they_were_removed(run, outputs, hub, tmp_path):
    place = tmp_path / "work" / "tpuconv" / REPO
    command = ("convert", outputs / "hf", f"hf://{REPO}", "--workspace", tmp_path / "work")
    run(*command)
    api.convert(outputs / "hf", place)
    assert run(*command)["already_there"]
    assert not files(place)


REFUSED = {
    "no token": ({"token": None}, [], HubError, "needs a token"),
    "an old token": ({"users": {}}, [], HubError, "does not accept your token"),
    "another account": ({"users": {"hf_secret": "me"}}, [], HubError, "not of an account that you may write to"),
    "weights of others": ({"pushed": {REPO: {"main": {"a.bin": b""}}}}, [], UsageError, "no manifest of tpuconv names"),
    "several processes": ({}, ["--process-index", "0", "--process-count", "2"], UsageError, "by one process"),
    "no name": ({"repo": "org"}, [], UsageError, "is not a Hub id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_repository_is_refused_before_the_work(name, run, outputs, hub, tmp_path, monkeypatch):
    facts, options, error, message = REFUSED[name]
    hub.users = facts.get("users", hub.users)
    hub.pushed |= facts.get("pushed", {})
    hub.private[REPO] = False
    if "token" in facts:
        (tmp_path / "token").unlink()
    with pytest.raises(error, match=message):
        run("convert", outputs / "hf", f"hf://{facts.get('repo', REPO)}", *options)
    assert not files(tmp_path / "home")


def test_a_pushed_model_is_served_by_its_name(run, outputs, hub):
    options = ("--target", "huggingface", "--quantize", "int8_default")
    assert run("convert", outputs / "hf", f"hf://{REPO}", *options)["serve"][0] == f"vllm serve {REPO}"


def test_a_plan_asks_no_hub(run, outputs, hub):
    for command, source, options in OUTPUTS.values():
        for scheme in ("hf", "HF"):  # as of buckets
            run(command, outputs / source, f"{scheme}://{REPO}", *options, "--dry-run")
    assert not hub.requests


def test_elsewhere_the_address_of_the_hub_is_told(outputs):
    with pytest.raises(UsageError, match="the Hub is no file system") as error:
        api.convert(outputs / "hf", f"hf://{REPO}")
    assert "`tpuconv push FOLDER ORG/NAME`" in error.value.hint


# -- signatures: OpenSSF's model signing, beside its own command -----------------------------------------------------


def make_key(folder: Path, name: str, private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Path:
    """Writes `<name>.pem` and `<name>.pub`."""
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / f"{name}.pem").write_bytes(pem)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_key(folder, "key", ec.generate_private_key(ec.SECP256R1()))
    make_key(folder, "other", ec.generate_private_key(ec.SECP384R1()))
    make_key(folder, "rsa", rsa.generate_private_key(65537, 2048))
    (folder / "text.pem").write_text("no key")
    return folder


@pytest.mark.parametrize("name", ["checkpoint", "export"])
def test_what_is_pushed_is_signed_and_what_is_downloaded_is_checked(name, outputs, keys, tmp_path, hub):
    out = shutil.copytree(outputs / name, tmp_path / "out")
    done = api.push(out, REPO, sign=keys / "key.pem")
    assert "model.sig" in done.files
    for path, data in hub.pushed[REPO]["main"].items():
        (tmp_path / "again" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "again" / path).write_bytes(data)
    (tmp_path / "again" / ".gitattributes").write_text("*.safetensors filter=lfs")
    (tmp_path / "again" / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "again" / ".cache" / "huggingface" / "CACHEDIR.TAG").write_text("")
    for folder in (out, tmp_path / "again"):
        assert api.verify(folder, key=keys / "key.pub").passed
    command = ["verify", "key", tmp_path / "again", "--signature", tmp_path / "again" / "model.sig"]
    ours = ["--public_key", keys / "key.pub", "--ignore-paths", tmp_path / "again" / ".cache"]
    ignored = ["--ignore-paths", tmp_path / "again" / ".gitattributes"]
    checked = subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, [*command, *ours, *ignored])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    api.push(out, REPO)  # a signature that is there goes along
    assert "model.sig" in hub.pushed[REPO]["main"]


def test_what_was_not_signed_is_no_more_what_it_was(outputs, keys, tmp_path):
    out = shutil.copytree(outputs / "checkpoint", tmp_path / "out")
    with pytest.raises(UsageError, match=r"has no model\.sig"):
        check_signature(out, keys / "key.pub")
    sign(out, keys / "key.pem")
    check_signature(out, keys / "key.pub")
    with pytest.raises(CorruptOutput, match="is not what the owner of"):
        check_signature(out, keys / "other.pub")
    config = (out / "config.json").read_bytes()
    for change in (config + b"\n", None):
        (out / "config.json").unlink() if change is None else (out / "config.json").write_bytes(change)
        with pytest.raises(CorruptOutput) as error:
            check_signature(out, keys / "key.pub")
        assert "config.json" in str(error.value)
        assert "Digest" not in str(error.value)
    assert error.value.details == ("Missing files in model 'out': config.json",)
    (out / "config.json").write_bytes(config)
    (out / "stranger").write_text("")
    with pytest.raises(CorruptOutput, match="is not what the owner of"):
        check_signature(out, keys / "key.pub")
    (out / "stranger").unlink()
    before = (out / "model.sig").read_bytes()
    sign(out, keys / "key.pem")  # as when a push is repeated
    assert (out / "model.sig").read_bytes() == before
    with pytest.raises(OutputError, match="is not the signature of these files by"):
        sign(out, keys / "other.pem")
    assert (out / "model.sig").read_bytes() == before
    (out / "model.sig").write_text("{}")
    with pytest.raises(CorruptOutput, match="is not what the owner of"):
        check_signature(out, keys / "key.pub")
    with pytest.raises(OutputError, match="is not the signature of these files by"):
        sign(out, keys / "key.pem")
    assert (out / "model.sig").read_text() == "{}"


def test_a_signed_output_is_replaced_with_its_signature(outputs, keys, tmp_path):
    """A signature of other files, or one that its owner rewrote, is of others."""
    out = shutil.copytree(outputs / "checkpoint", tmp_path / "out")
    sign(out, keys / "key.pem")
    shutil.copytree(out, tmp_path / "other")
    api.export(outputs / "checkpoint", out, overwrite=True)
    assert files(out) == files(outputs / "export")
    assert not list(tmp_path.glob(".out*"))
    for signature in ((tmp_path / "other" / "model.sig").read_bytes(), b"{}", b"[]", b"\xff"):
        (out / "model.sig").write_bytes(signature)
        with pytest.raises(OutputError, match=r"model\.sig, which tpuconv did not write"):
            api.convert(outputs / "hf", out, overwrite=True)
        assert (out / "model.sig").read_bytes() == signature


def test_a_signed_output_in_a_bucket_is_replaced_too(outputs, keys, tmp_path, monkeypatch):
    in_memory(monkeypatch)
    out = shutil.copytree(outputs / "checkpoint", tmp_path / "out")
    sign(out, keys / "key.pem")
    api.convert(outputs / "hf", f"{ROOT}/out")
    buckets.put_object(to_location(f"{ROOT}/out") / "model.sig", (out / "model.sig").read_bytes())
    api.export(outputs / "checkpoint", f"{ROOT}/out", overwrite=True)
    assert objects(f"{ROOT}/out") == files(outputs / "export")


@pytest.mark.parametrize("name", ["rsa.pem", "text.pem", "none.pem"])
def test_a_key_that_cannot_sign_is_named(name, outputs, keys, tmp_path):
    out = shutil.copytree(outputs / "checkpoint", tmp_path / "out")
    with pytest.raises(UsageError, match="cannot be used as a private key"):
        api.push(out, REPO, sign=keys / name)
    assert not (out / "model.sig").exists()


def test_the_command_checks_a_signature(outputs, keys, tmp_path):
    out = shutil.copytree(outputs / "checkpoint", tmp_path / "out")
    sign(out, keys / "key.pem")
    assert "as the owner of the key signed them" in tpuconv("verify", out, "--key", keys / "key.pub").stdout
    assert "is not what the owner of" in tpuconv("verify", out, "--key", keys / "other.pub", code=10).stderr
    for other in ("--compare-hf", "--update"):
        assert "--key is for" in tpuconv("verify", out, "--key", keys / "key.pub", other, code=2).stderr
