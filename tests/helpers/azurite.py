"""Azurite, Microsoft's own server that speaks the protocol of Azure Blob Storage: `npm install --global azurite`."""

import base64
import hashlib
import hmac
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from helpers.times import wait_for

PROGRAM = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those that every Azurite has: published in its documentation, and no secret."""


@contextmanager
def azurite(folder: Path, container: str) -> Iterator[dict[str, str]]:
    """A server with an empty container; yields the variables by which obstore finds it."""
    assert PROGRAM
    log = folder / "log"
    command = [PROGRAM, "--blobPort", "0", "--location", str(folder), "--skipApiVersionCheck"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            wait_for(lambda: "successfully listens on" in log.read_text(), server)
            url = log.read_text().split("successfully listens on ")[1].split()[0] + f"/{ACCOUNT}"
            _create(url, container)
            yield {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_ENDPOINT": url,
            }
        finally:
            server.terminate()


def _create(url: str, container: str) -> None:
    """Creates a container, which obstore cannot, by a request that is signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed = "PUT" + 12 * "\n" + named + f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
    request = urllib.request.Request(f"{url}/{container}?restype=container", method="PUT", headers=headers)
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201
