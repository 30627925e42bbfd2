"""Processes of `jax.distributed` on CPU devices of this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack


def joined(command: Sequence[object], count: int, devices: int, seconds: float = 1200) -> list[str]:
    """Runs a command in `count` processes, each with so many devices. Returns what each printed; all must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    own = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    env=os.environ | own | {"JAX_PROCESS_ID": str(index)},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )
            for index in range(count)
        ]  # fmt: skip
        for process in started:
            stack.callback(process.kill)
        with ThreadPoolExecutor(count) as pool:  # one whose pipe is full would keep the others waiting
            ended = list(pool.map(lambda process: process.communicate(timeout=seconds), started))
    assert [process.returncode for process in started] == [0] * count, "\n".join(error for _, error in ended)
    # Collectives between CPUs say on stdout that they are connected.
    return ["".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]")) for out, _ in ended]
