"""A server of vLLM's build for CPUs, in a process of its own."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from helpers.oracles import environment, oracle

MOST_SECONDS = 280
"""Before a test hangs by the measure of `make fast`."""


@contextmanager
def vllm_server(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """Yields the address of a server of a folder, which it stops afterwards; what the server says goes to `log`."""
    python = oracle("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    sizes = ["--host", "127.0.0.1", "--enforce-eager", "--max-num-seqs", "2", "--max-model-len", "256"]
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, *sizes, *options],
            env=environment("vllm") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(server, url, log)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # the process of its engine too
        server.wait()


def _wait(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Returns when a server answers; raises AssertionError if it ends before."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return
    raise AssertionError(f"the server does not answer: {log.read_text()[-5000:]}")
