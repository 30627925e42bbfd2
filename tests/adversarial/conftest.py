"""At its end a run of the campaign prints how often each attack was tried."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.attacks.counts import COUNTS


@pytest.fixture
def collected() -> Iterator[None]:
    """What Orbax leaves behind where it fails, tasks that nobody awaits, does not reach other tests."""
    yield
    gc.collect()


def pytest_sessionfinish(session: Any) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of xdist
        session.config.workeroutput["counts"] = [[*key, n] for key, n in COUNTS.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for what, of, n in getattr(node, "workeroutput", {}).get("counts", ()):
        COUNTS[what, of] += n


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if COUNTS:
        terminalreporter.section("attacks tried")
        for (what, of), n in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{n:8,}  {what}: {of}")
