"""Uploads to a Hub on the loopback interface, by the client's HTTP protocol; and what is refused before."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.commands import tpuconv
from helpers.hub_server import HubServer
from tpuconv import api
from tpuconv.errors import CorruptOutput, HubError, UsageError

REPO = "org/tiny-orbax"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    random_checkpoint(folder / "hf", qwen3_config())
    api.convert(folder / "hf", folder / "checkpoint")
    api.convert(folder / "hf", folder / "maxtext", target="maxtext")
    api.export(folder / "checkpoint", folder / "export")
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
        with pytest.raises(UsageError, match="no Hub id"):
            api.push(outputs / "export", name)
    assert not hub.requests


def test_a_dry_run_lists_the_files(outputs):
    facts = json.loads(tpuconv("push", outputs / "export", REPO, "--dry-run", "--json").stdout)
    assert facts["files"] == {name: len(data) for name, data in files(outputs / "export").items()}
    assert (facts["repo"], facts["revision"], facts["commit"]) == (REPO, "main", None)
    said = tpuconv("push", outputs / "export", REPO, "--dry-run").stdout
    assert "model.safetensors" in said
    assert "would be uploaded" in said
