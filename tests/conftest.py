"""Settings of property tests: no deadline on a loaded machine, and the same examples in every run of CI."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from helpers.families import Case
    from helpers.shared import Shared

pytest.register_assert_rewrite("helpers")

# Commands that tests interrupt would inherit that a signal is ignored, as of a run in the background.
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)

# libtpu, which the tests of topologies need, would look for a TPU in every process.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# There is a worker for each processor. With more threads than processors torch, which waits for them in a loop, takes
# ten times as long for a tiny model.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Programs that XLA compiled are kept in pytest's cache folder, for the children and workers of this run and for
    the next run: most of the time of these tests is the compiler's. The key holds the program, the versions and the
    compiler's options. `pytest --cache-clear` empties it."""
    if cache := getattr(config, "cache", None):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("xla")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow what `is_slow` says, before pytest chooses by marks."""
    from helpers.families import is_slow

    for item in items:
        if (call := getattr(item, "callspec", None)) and is_slow(getattr(item, "originalname", ""), call.params):
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture
def users_compiler(quick_compiler: None) -> Iterator[None]:
    """The compiler with its optimizations again, and nothing that was compiled without them."""
    import jax

    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> "Shared":
    """Folders that are written once a run, for all of its workers."""
    from helpers.shared import Shared

    base = tmp_path_factory.getbasetemp()
    return Shared((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared")


@pytest.fixture(scope="session")
def hf(shared: "Shared") -> "Callable[..., Path]":
    """The folder of a case as transformers saves it, with weights in float32 or the dtype that is given."""
    from helpers.families import save

    def saved(case: "Case", dtype: str = "float32") -> Path:
        return shared(f"{case.key}-{dtype}-hf", lambda folder: save(case, folder, dtype))

    return saved


@pytest.fixture(scope="session")
def orbax(shared: "Shared", hf: "Callable[..., Path]") -> "Callable[..., Path]":
    """The folder of a case as tpuconv converts it, with weights in float32 or the dtype that is given."""
    from helpers.conversions import convert

    def converted(case: "Case", dtype: str = "float32") -> Path:
        return shared(f"{case.key}-{dtype}-orbax", lambda folder: convert(hf(case, dtype), folder))

    return converted


@pytest.fixture(scope="session")
def converted(shared: "Shared") -> Path:
    """A folder with the example's checkpoint in it, made by the command as the README has it."""
    from helpers.commands import EXAMPLE, tpuconv

    def make(folder: Path) -> None:
        folder.mkdir()
        tpuconv("convert", EXAMPLE, cwd=folder)

    return shared("example", make)


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, pieces and units so small that tiny tensors are cut as large ones are."""
    from tpuconv.convert.plan import sizes

    monkeypatch.setattr(sizes, "CHUNK_BYTES", 240)
    monkeypatch.setattr(sizes, "SLAB_BYTES", 1800)
    monkeypatch.setattr(sizes, "UNIT_BYTES", 12_000)


@pytest.fixture(scope="session")
def with_mtp(shared: "Shared") -> Path:
    """A DeepSeek V3 of 3 layers as `save_pretrained` writes it, and a layer of that kind beside, with its copies."""
    from helpers.families import CASES, save_with_mtp

    case = next(case for case in CASES if case.id == "kimi_k2-one-group")
    return shared("with-mtp", lambda folder: save_with_mtp(case, folder))
