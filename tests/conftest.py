"""Settings of property tests: no deadline on a loaded machine, and the same examples in every run of CI."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from helpers.families import Case

pytest.register_assert_rewrite("helpers")

# Commands that tests interrupt would inherit that a signal is ignored, as of a run in the background.
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)

# libtpu, which the tests of topologies need, would look for a TPU in every process.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

settings.register_profile(
    "tpuconv",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("tpuconv")


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """XLA leaves out what makes a program faster: for tests of what is computed, of which most of the time is spent in
    the compiler."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for children
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[Case], Path]":
    """The folder of a case as transformers saves it, in float32."""
    from helpers.families import save

    return cache(lambda case: save(case, tmp_path_factory.mktemp("hf")))


@pytest.fixture(scope="session")
def orbax(hf: "Callable[[Case], Path]", tmp_path_factory: pytest.TempPathFactory) -> "Callable[[Case], Path]":
    """The folder of a case as tpuconv converts it."""
    from helpers.conversions import convert

    def converted(case: "Case") -> Path:
        out = tmp_path_factory.mktemp("orbax") / "out"
        convert(hf(case), out)
        return out

    return cache(converted)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's checkpoint in it, made by the command as the README has it."""
    from helpers.commands import EXAMPLE, tpuconv

    folder = tmp_path_factory.mktemp("example")
    tpuconv("convert", EXAMPLE, cwd=folder)
    return folder


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, pieces and units so small that tiny tensors are cut as large ones are."""
    from tpuconv.convert.plan import sizes

    monkeypatch.setattr(sizes, "CHUNK_BYTES", 240)
    monkeypatch.setattr(sizes, "SLAB_BYTES", 1800)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 12_000)


@pytest.fixture(scope="session")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek V3 of 3 layers as `save_pretrained` writes it, and a layer of that kind beside, with its copies."""
    from helpers.families import CASES, save_with_mtp

    case = next(case for case in CASES if case.id == "kimi_k2-one-group")
    return save_with_mtp(case, tmp_path_factory.mktemp("mtp"))
