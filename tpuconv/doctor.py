"""Examines this machine: versions, devices, memory, disk and the Hub; with advice on what is missing or wrong."""

import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tpuconv import buckets
from tpuconv.bucket_errors import ConditionLost
from tpuconv.credentials import credentials
from tpuconv.errors import TpuconvError
from tpuconv.extras import EXTRAS, install_command
from tpuconv.location import SCHEMES, BucketPath, Location
from tpuconv.memory import available_memory
from tpuconv.storage.claim import LAPSED_SECONDS, Claim, ClaimState, has_stopped
from tpuconv.text import format_size

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Status = Literal["ok", "warn", "fail"]
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail")
"""The states, from best to worst."""

PACKAGES: Mapping[str, str] = {
    "jax": "",
    "jaxlib": "",
    "libtpu": "needed on a TPU, and to compile for one",
    "flax": "",
    "orbax-checkpoint": "",
    "qwix": "",
    "transformers": "needed for chat templates, images and comparisons with the source",
    "torch": "needed for comparisons with the source",
    "pillow": "needed for images",
    "huggingface_hub": "",
}
"""The packages whose versions are checked. Those with a text are optional; it says what they are for."""

DEVICE_SECONDS = 60.0
"""Time limit for jax to list its devices. It waits without end for a TPU that another process uses."""
HUB_SECONDS = 5.0
"""Time limit for the Hub to answer."""
DISK_BYTES = 256_000_000
"""Size of the file that is written and read."""
BLOCK_BYTES = 16_000_000
"""Size of one write or read."""
LOW_DISK = 20_000_000_000
"""Free bytes below which a warning is given: a model of 8 billion parameters in bfloat16 takes 16 GB."""
SLOW_DISK = 100_000_000
"""Bytes per second below which a warning is given: a terabyte would take three hours."""
LOW_MEMORY = 4_000_000_000
"""Available bytes below which a warning is given: a conversion takes up to 1 GB, and quantizing with jax more."""


@dataclass(frozen=True)
class Item:
    """The result for one thing that was examined.

    Attributes:
        name: what was examined.
        status: "ok", "warn" or "fail".
        found: what was found, for people.
        advice: what to do; empty if the status is "ok".
        facts: what was found, for JSON.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`: its items, in the order of the examination."""

    items: tuple[Item, ...]

    @property
    def status(self) -> Status:
        """The worst status of all items."""
        return max((item.status for item in self.items), key=STATUSES.index)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"status": self.status, "items": [asdict(item) for item in self.items]}


def examine(folder: Location, *, network: bool = True) -> Diagnosis:
    """Examines this machine. Takes seconds, or up to a minute if a device does not answer.

    Args:
        folder: the folder to write checkpoints in, on a disk or in a bucket. A file is written there, and removed.
        network: if false, the Hub is not asked.

    Returns:
        One item for each thing examined. What cannot be examined is an item with status `fail`; nothing is raised.
    """
    items = [_checked("python", _python), *(_checked(name, _package, name) for name in PACKAGES)]
    items += [_checked("images", _images), _checked("devices", _devices), _checked("memory", _memory)]
    if isinstance(folder, BucketPath):
        items.append(_checked("bucket", _bucket, folder))
    else:
        items.append(_checked("disk", _disk, folder))
    if network:
        hub = [_checked("hub", _hub), _checked("token", _token)]
        most: Status = "warn" if isinstance(folder, BucketPath) else "fail"  # of a bucket the Hub tells nothing
        items += [replace(item, status=min(item.status, most, key=STATUSES.index)) for item in hub]
    return Diagnosis(tuple(items))


def _checked(name: str, check: Callable[..., Item], *args: Any) -> Item:
    """Returns the item that a check returns, or one with status "fail" if the check raises."""
    try:
        return check(*args)
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        return Item(name, "fail", f"cannot be examined: {reason}", "report this with the output of `tpuconv doctor`")


# --- versions ------------------------------------------------------------------------------------------------------


def _python() -> Item:
    from packaging.specifiers import SpecifierSet

    version, where = platform.python_version(), {"version": platform.python_version(), "executable": sys.executable}
    tested = metadata.metadata("tpuconv")["Requires-Python"]
    if version in SpecifierSet(tested):
        return Item("python", "ok", version, facts={**where, "tested": tested})
    return Item("python", "warn", f"{version}, tested {tested}", "use a tested version", {**where, "tested": tested})


def _package(name: str) -> Item:
    """Compares the installed version with the range in the package metadata."""
    wanted = _requirement(name)
    tested = str(wanted.specifier) if wanted else ""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        advice = f"install it: pip install '{name}{tested}'"
        if PACKAGES[name]:
            advice = f"{PACKAGES[name]}: {install_command(EXTRAS[name])}"
        facts = {"version": None, "tested": tested}
        return Item(name, "warn" if PACKAGES[name] else "fail", "not installed", advice, facts)
    facts = {"version": version, "tested": tested}
    if wanted is None:
        return Item(name, "warn", f"{version}, tested versions unknown", "install tpuconv and jax with pip", facts)
    if wanted.specifier.contains(version, prereleases=True):
        return Item(name, "ok", version, facts=facts)
    advice = f"install a tested version: pip install '{name}{tested}'"
    return Item(name, "warn", f"{version}, tested {tested}", advice, facts)


def _requirement(name: str) -> "Requirement | None":
    """Returns the requirement for a package in the metadata of tpuconv or of jax, extras included; None if there is
    none."""
    for owner in ("tpuconv", "jax"):
        for extra in ("", "hf", "tpu"):
            for wanted in _requirements(owner):
                if wanted.name == name and (wanted.marker is None or wanted.marker.evaluate({"extra": extra})):
                    return wanted
    return None


def _requirements(owner: str) -> Iterable["Requirement"]:
    from packaging.requirements import Requirement

    with suppress(metadata.PackageNotFoundError):
        return map(Requirement, metadata.requires(owner) or ())
    return ()


IMAGES_PROGRAM = """
import gc, importlib.util, sys
gc.disable()  # a quarter of the time of these imports
if importlib.util.find_spec("torchvision"):
    import torchvision
from transformers import AutoImageProcessor
import PIL.Image
print("with" if "torchvision" in sys.modules else "without")
"""
"""Imports what prepares images. In a child process, since it takes seconds and a faulty package may end the process."""


def _images() -> Item:
    """Tries the imports of image processors. A torchvision that was built for another torch breaks all of them."""
    if not all(map(find_spec, ("transformers", "torch", "PIL"))):
        return Item("images", "warn", "not read: a package is missing", f"for images: {install_command('hf')}")
    command = [sys.executable, "-P", "-c", IMAGES_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "install the torchvision that was built for the installed torch, or uninstall it"
        return Item("images", "warn", f"the processors of images cannot be imported: {last[:300]}", advice)
    has_torchvision = done.stdout.strip() == "with"
    found = "read, with torchvision" if has_torchvision else "read; a few processors need torchvision, which is missing"
    return Item("images", "ok", found, facts={"torchvision": has_torchvision})


# --- devices -------------------------------------------------------------------------------------------------------

DEVICES_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from tpuconv import libtpu
libtpu.hide_without_tpu()
import json
import jax
devices = jax.local_devices()
facts = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
facts["memory"] = (devices[0].memory_stats() or {}).get("bytes_limit")
print("\\n" + json.dumps(facts))
"""
"""Prints jax's devices as the last line of stdout. Run in a child process, which can be ended."""


def _devices() -> Item:
    command = [sys.executable, "-P", "-c", DEVICES_PROGRAM, str(Path(__file__).parents[1])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that waits in a driver cannot be killed
            child.communicate(timeout=1)
        found = f"jax listed no devices within {DEVICE_SECONDS:.0f} s"
        advice = "another process may use the TPU: end it, or set JAX_PLATFORMS=cpu to work without the TPU"
        return Item("devices", "fail", found, advice)
    if child.returncode:
        last = (err.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        advice = "check JAX_PLATFORMS and the versions of jax and its plugins; JAX_PLATFORMS=cpu always works"
        return Item("devices", "fail", f"jax finds no devices: {last[:300]}", advice)
    facts = json.loads(out.splitlines()[-1])
    memory = f", {format_size(facts['memory'])} each" if facts["memory"] else ""
    return Item("devices", "ok", f"{facts['count']} x {facts['kind']} ({facts['platform']}){memory}", facts=facts)


# --- memory and disk -----------------------------------------------------------------------------------------------


def _memory() -> Item:
    available, total = available_memory()
    facts = {"total": total, "available": available}
    found = f"{format_size(available)} of {format_size(total)} available"
    if available < LOW_MEMORY:
        advice = "end other processes, or limit commands with `max_memory=`"
        return Item("memory", "warn", found, advice, facts)
    return Item("memory", "ok", found, facts=facts)


def _bucket(folder: BucketPath) -> Item:
    """Checks the credentials, and whether objects can be written (also under a condition), read and deleted."""
    probe = folder / f"tpuconv-doctor-{secrets.token_hex(8)}"
    facts: dict[str, Any] = {"folder": str(folder), "store": SCHEMES[folder.scheme]}
    try:
        whose = credentials(folder.scheme)[0]
        facts["credentials"] = whose
        buckets.put_object(probe, b"x", only_if=buckets.ABSENT_OBJECT)
        try:
            with suppress(ConditionLost):
                buckets.put_object(probe, b"y", only_if=buckets.ABSENT_OBJECT)
                advice = "write to a disk, and copy the output: this store ignores conditions of writes"
                return Item("bucket", "fail", f"{folder.root}, credentials: {whose}", advice, facts)
            buckets.read(probe)
            there = buckets.listing_facts(folder)
            facts |= _work_left(folder, there, there[probe.name].modified)
        finally:
            buckets.remove_objects(folder, [probe.name])
    except TpuconvError as e:
        return Item("bucket", "fail", e.message, e.hint or "", facts)
    found = f"{folder.root} can be written, credentials: {whose}"
    works = [
        *(f"run the command for {folder / out} again: it stopped" for out in facts["stopped"]),
        *(f"delete {folder / name}/: it was left over, and nobody reads it" for name in facts["left_over"]),
    ]
    if works:
        return Item("bucket", "warn", f"{found}; {len(works)} folders of unfinished work", "; ".join(works), facts)
    return Item("bucket", "ok", found, facts=facts)


_WORK = re.compile(r"((?:.*/)?[^/]+)\.tpuconv/(?:claim|([0-9a-f]{32})/.+)")
"""An object in the work folder of an output."""


def _work_left(folder: BucketPath, there: Mapping[str, buckets.ObjectFacts], now: datetime) -> dict[str, list[str]]:
    """Work in a folder of a bucket that no process does: the outputs whose command stopped, and the folders that no
    claim names, of late requests of a process that had lost its claim."""
    works: dict[str, set[str]] = {}
    for match in filter(None, map(_WORK.fullmatch, there)):
        works.setdefault(match[1], set()).update([match[2]] if match[2] else [])
    stopped, left_over = [], []
    for out, folders in sorted(works.items()):
        work = f"{out}.tpuconv"
        if (found := Claim(folder / out, folder / work).read()) is not None and found[0].state != ClaimState.FREE:
            age = (now - found[1].modified).total_seconds()
            if age > LAPSED_SECONDS or has_stopped(found[0]):
                stopped.append(out)
            folders.discard(found[0].work)
        left_over += [f"{work}/{name}" for name in sorted(folders)]
    return {"stopped": stopped, "left_over": left_over}


def _disk(folder: Path) -> Item:
    if not folder.is_dir():
        return Item("disk", "fail", f"there is no folder {folder}", "make it, or name another one")
    free = shutil.disk_usage(folder).free
    facts: dict[str, Any] = {"folder": str(folder.absolute()), "free": free}
    found = f"{format_size(free)} free in {folder}"
    if free < 2 * DISK_BYTES:
        return Item("disk", "fail", found, "make room, or name a folder on another disk", facts)
    try:
        write, read = _disk_speed(folder)
    except OSError as e:
        return Item("disk", "fail", f"{folder} cannot be used: {e.strerror or e}", "choose another folder", facts)
    facts |= {"write_bytes_per_second": round(write), "read_bytes_per_second": round(read)}
    found += f", writes {format_size(write)}/s, reads {format_size(read)}/s"
    if free < LOW_DISK:
        return Item("disk", "warn", found, "free disk space: a model of 8B parameters in bfloat16 takes 16 GB", facts)
    if min(write, read) < SLOW_DISK:
        return Item("disk", "warn", found, "use a local disk if there is one: conversions run at its speed", facts)
    return Item("disk", "ok", found, facts=facts)


def _disk_speed(folder: Path) -> tuple[float, float]:
    """Returns the speed in bytes per second of writing, fsync included, and of reading past the page cache. Writes
    random bytes, which no file system can compress."""
    block = os.urandom(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder, prefix=".tpuconv-doctor-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES // BLOCK_BYTES):
            view = memoryview(block)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start, size = time.perf_counter(), 0
        while data := file.read(BLOCK_BYTES):
            size += len(data)
        return size / written, size / (time.perf_counter() - start)


# --- the Hub -------------------------------------------------------------------------------------------------------


def _hub() -> Item:
    from huggingface_hub import constants, get_session

    facts = {"endpoint": constants.ENDPOINT, "offline": constants.is_offline_mode()}
    if facts["offline"]:
        return Item("hub", "warn", "offline mode: only the cache is used", "unset HF_HUB_OFFLINE to download", facts)
    start = time.perf_counter()
    try:
        response = get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        found = f"{constants.ENDPOINT} does not answer: {reason}"
        return Item("hub", "fail", found, "check the network, HF_ENDPOINT and proxies", facts)
    facts["seconds"] = time.perf_counter() - start
    if response.status_code >= 500:
        found = f"{constants.ENDPOINT} answers with error {response.status_code}"
        return Item("hub", "fail", found, "try again later, or check HF_ENDPOINT", facts)
    return Item("hub", "ok", f"{constants.ENDPOINT} answers in {facts['seconds']:.2f} s", facts=facts)


def _token() -> Item:
    """Returns the account of the token in use. The token itself is never shown."""
    from huggingface_hub import constants, get_session, get_token
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    token = get_token()
    if token is None:
        return Item("token", "ok", "none: gated and private models need one (`hf auth login`)", facts={"name": None})
    if constants.is_offline_mode():
        return Item("token", "ok", "set; its account is not checked in offline mode", facts={"name": None})
    url = f"{constants.ENDPOINT}/api/whoami-v2"
    try:
        response = get_session().get(url, headers=build_hf_headers(token=token), timeout=HUB_SECONDS)
        if response.status_code in (401, 403):
            advice = "log in again with `hf auth login`, or set HF_TOKEN"
            return Item("token", "fail", f"rejected by the Hub ({response.status_code})", advice, {"name": None})
        name = str(response.raise_for_status().json()["name"])
    except Exception as e:
        found = f"its account cannot be checked: {type(e).__name__}"
        return Item("token", "warn", found, "check the network and HF_ENDPOINT", {"name": None})
    return Item("token", "ok", f"account {name}", facts={"name": name})
