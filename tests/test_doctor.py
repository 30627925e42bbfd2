"""`tpuconv doctor`: every item on a machine without problems, and with something missing or wrong."""

import json
import socket
import time
from importlib import metadata
from pathlib import Path

import pytest

from helpers.hub_server import HubServer
from helpers.times import HANG
from tpuconv import doctor
from tpuconv.doctor import Item
from tpuconv.extras import install_command
from tpuconv.location import to_location

TOKEN = "hf_secret"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that is the client's endpoint, and no token."""
    from huggingface_hub import close_session, constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()  # of an earlier test
    with HubServer({}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server
        close_session()


def examined(folder: Path, **options) -> dict[str, Item]:
    diagnosis = doctor.examine(folder, **options)
    json.dumps(diagnosis.to_json())
    assert all(item.advice for item in diagnosis.items if item.status != "ok")
    return {item.name: item for item in diagnosis.items}


def test_a_machine_as_it_should_be(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DISK_BYTES", 32_000_000)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.users[TOKEN] = "somebody"
    items = examined(tmp_path)
    assert list(items) == ["python", *doctor.PACKAGES, "images", "devices", "memory", "disk", "hub", "token"]
    others = ("memory", "disk")  # as this machine is
    assert not [item for name, item in items.items() if item.status != "ok" and name not in others]
    assert items["jax"].facts == {"version": metadata.version("jax"), "tested": "<0.13,>=0.10"}
    assert all(items[name].facts["tested"] for name in doctor.PACKAGES)
    assert items["devices"].facts["platform"] == "cpu"
    assert 0 < items["memory"].facts["available"] < items["memory"].facts["total"]
    assert min(items["disk"].facts[f"{way}_bytes_per_second"] for way in ("read", "write")) > 0
    assert items["token"].found == "account somebody"
    assert TOKEN not in repr(items)
    assert list(tmp_path.iterdir()) == []
    head, whoami = (request for request in hub.requests if request.file != "other")
    assert (head.method, head.token, whoami.token) == ("HEAD", None, f"Bearer {TOKEN}")


def test_without_network_nobody_is_asked(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "DISK_BYTES", 16_000_000)
    for name in ("_devices", "_images"):  # which start processes
        monkeypatch.setattr(doctor, name, lambda: Item("devices", "ok", "none"))
    items = examined(tmp_path, network=False)
    assert not {"hub", "token"} & items.keys()
    assert hub.requests == []


def test_nothing_is_raised(monkeypatch, tmp_path):
    def broken(*args):
        raise RuntimeError("broken\nat length")

    for name in ("_python", "_package", "_images", "_devices", "_memory", "_disk", "_hub", "_token"):
        monkeypatch.setattr(doctor, name, broken)
    diagnosis = doctor.examine(tmp_path)
    assert diagnosis.status == "fail"
    assert {item.found for item in diagnosis.items} == {"cannot be examined: broken"}


# --- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "status"), [("0.12.8", "ok"), ("0.11.9", "warn"), ("0.13.0", "warn"), (None, "fail")]
)
def test_a_package_that_is_needed(version, status, monkeypatch):
    replace_version(monkeypatch, "flax", version)
    item = doctor._package("flax")
    assert item.status == status
    assert item.facts == {"version": version, "tested": "<0.13,>=0.12"}
    if status != "ok":
        assert "pip install 'flax<0.13,>=0.12'" in item.advice


def test_a_package_that_may_be_absent(monkeypatch):
    replace_version(monkeypatch, "transformers", None)
    item = doctor._package("transformers")
    assert (item.status, item.found) == ("warn", "not installed")
    assert item.advice == f"needed for chat templates, images and comparisons with the source: {install_command('hf')}"


def replace_version(monkeypatch, package: str, version: str | None) -> None:
    known = metadata.version

    def of(name: str) -> str:
        if name != package:
            return known(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", of)


# --- devices and disk ----------------------------------------------------------------------------------------------


def test_a_device_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(doctor, "DEVICES_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "DEVICE_SECONDS", 0.2)
    start = time.monotonic()
    item = doctor._devices()
    assert time.monotonic() - start < HANG
    assert item.status == "fail"
    assert "JAX_PLATFORMS=cpu" in item.advice


def test_a_torchvision_for_another_torch_is_named(monkeypatch, tmp_path):
    """With it the import of every image processor fails, as if transformers were missing."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    item = doctor._images()
    assert item.status == "warn"
    assert "nms does not exist" in item.found
    assert "uninstall" in item.advice


def test_a_platform_that_is_not_there(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    item = doctor._devices()
    assert item.status == "fail"
    assert "nowhere" in item.found


def test_a_folder_that_is_not_there(tmp_path):
    item = doctor._disk(tmp_path / "absent")
    assert (item.status, item.found) == ("fail", f"there is no folder {tmp_path / 'absent'}")


@pytest.mark.parametrize(
    ("free", "speed", "status"),
    [(1e8, 1e9, "fail"), (1e10, 1e9, "warn"), (1e12, 1e7, "warn"), (1e12, 1e9, "ok")],
)
def test_little_space_and_a_slow_disk(free, speed, status, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": int(free)}))
    monkeypatch.setattr(doctor, "_disk_speed", lambda folder: (speed, speed))
    assert doctor._disk(tmp_path).status == status


def test_a_disk_that_refuses(monkeypatch, tmp_path):
    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "_disk_speed", refuse)
    item = doctor._disk(tmp_path)
    assert item.status == "fail"
    assert "Permission denied" in item.found


# --- the Hub -------------------------------------------------------------------------------------------------------


def test_a_hub_that_is_down(hub):
    hub.fail("home", status=503)
    assert "503" in doctor._hub().found
    hub.stop()
    item = doctor._hub()
    assert item.status == "fail"
    assert "does not answer" in item.found


def test_a_bucket_is_as_good_while_the_hub_is_down(hub, monkeypatch):
    monkeypatch.setattr(doctor, "_bucket", lambda folder: doctor.Item("bucket", "ok", str(folder)))
    hub.stop()
    found = {item.name: item.status for item in doctor.examine(to_location("s3://bucket/x")).items}
    assert (found["bucket"], found["hub"]) == ("ok", "warn")


def test_a_hub_that_is_silent(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.2)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections wait to be accepted
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert doctor._hub().status == "fail"
        assert doctor._token().status == "warn"


def test_offline_mode(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert doctor._hub().status == "warn"
    assert doctor._token().status == "ok"
    assert hub.requests == []


def test_no_token_and_one_that_is_refused(hub, monkeypatch):
    assert doctor._token().facts == {"name": None}
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    item = doctor._token()
    assert item.status == "fail"
    assert TOKEN not in repr(item)
