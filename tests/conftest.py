"""Settings of property tests, fixtures that tests share, and the choice of slow tests."""

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from helpers.families import Case
    from helpers.hub_server import HubServer
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

# XLA leaves out what makes a program faster, which changes no result by more than its rounding: most of the time of
# these tests is the compiler's. Tests of speed take `users_compiler`.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# XLA of jax 0.10 compiles a program in a third of the time by its former emitters, into one module of code.
HAS_FORMER_EMITTERS = version("jaxlib").startswith("0.10.")
QUICK_COMPILER = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# Commands in child processes keep their bytecode: it costs each of them a quarter of a second to compile the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A collection of garbage while tests are collected would look at the objects of jax, torch and transformers again and
# again: a quarter of the time of imports.
gc.disable()

# What conversions remember of their sources, theirs and those of child processes and workers, is removed at the end.
# Wheels that pip downloads for oracles stay.
os.environ.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = TemporaryDirectory(prefix="tpuconv-cache-")
    os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help="run every test that is parametrised by this family of models, slow ones too, and no other test;"
        " may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Programs that XLA compiled are kept in pytest's cache folder, for the children and workers of this run and for
    the next run: most of the time of these tests is the compiler's. The key holds the program, the versions and the
    compiler's options. `pytest --cache-clear` empties it. With slow tests properties are tried on more examples."""
    if config.option.family:
        from tpuconv.errors import UsageError
        from tpuconv.models.registry import get_family

        try:
            for name in config.option.family:
                get_family(name)
        except UsageError as error:
            raise pytest.UsageError(f"--family: {error}") from None
        if config.option.markexpr == "not slow":  # which pyproject.toml gives
            config.option.markexpr = "not consumers and not oracles"
    elif config.option.markexpr != "not slow":
        settings.load_profile("slow")
    elif HAS_FORMER_EMITTERS:
        os.environ.setdefault("XLA_FLAGS", QUICK_COMPILER)
    if cache := getattr(config, "cache", None):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("xla")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of other families than those of `--family`. Marks slow what `is_slow` and `is_left_out` say,
    before pytest chooses by marks. Of a test's fast cases coverage is measured of the first one: on Python 3.11 it
    takes half as long again, of jax and torch too."""
    from helpers.families import families_of, is_slow
    from helpers.samples import is_left_out

    if chosen := set(config.option.family):
        about: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            call = getattr(item, "callspec", None)
            about[bool(call and chosen & families_of(call.params))].append(item)
        config.hook.pytest_deselected(items=about[False])
        items[:] = about[True]
    measured = set()
    for item in items:
        name, call = getattr(item, "originalname", ""), getattr(item, "callspec", None)
        if is_left_out(name, call.id if call else "") or (call and is_slow(name, call.params)):
            item.add_marker(pytest.mark.slow)
        elif (test := (item.path, name)) in measured:
            item.add_marker(pytest.mark.no_cover)
        elif item.get_closest_marker("slow") is None:
            measured.add(test)


def pytest_collection_finish() -> None:
    """The million objects of jax, torch and transformers stay: no garbage collection looks at them from now on, nor at
    the programs and traces that a test leaves in their caches, once what it made is collected."""
    gc.collect()
    gc.freeze()


pytest_runtest_logfinish = pytest_collection_finish


settings.register_profile(
    "tpuconv",
    max_examples=20,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("slow", settings.get_profile("tpuconv"), max_examples=200)
settings.load_profile("tpuconv")


@pytest.fixture
def users_compiler() -> Iterator[dict[str, bool]]:
    """The compiler with its optimizations again, and nothing that was compiled without them. Yields the options that a
    fast test gives `jax.jit`."""
    import jax

    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield {"xla_cpu_use_fusion_emitters": True} if HAS_FORMER_EMITTERS else {}
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The folders of a case's source and checkpoint, by its name."""

    from helpers.whole_sights import made
    from tpuconv import api

    @cache
    def folders(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        made(name).save(folder / "src")
        api.convert(folder / "src", folder / "out")
        return folder / "src", folder / "out"

    return folders


@pytest.fixture(scope="session")
def chosen(request: pytest.FixtureRequest) -> "Callable[[Iterable[str]], list[str]]":
    """For a fixture that computes something of many families at once: those of them that this run is about."""
    only = request.config.option.family
    return lambda families: [name for name in families if not only or name in only]


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


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the client, without token. The client reads its environment when it is imported."""
    from huggingface_hub import constants

    from tpuconv.sources import download

    home = tmp_path / "hf-home"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    monkeypatch.setattr(download, "BACKOFF_SECONDS", 0.01)
    for module in ("file_download", "utils._http"):  # the client sleeps before it asks again
        monkeypatch.setattr(f"huggingface_hub.{module}.time", SimpleNamespace(sleep=lambda _: None))
    return home / "hub"


@pytest.fixture
def serve_hub(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Callable[..., HubServer]]":
    """Starts a Hub and makes it the client's endpoint."""
    from huggingface_hub import close_session, constants

    from helpers.hub_server import HubServer

    servers = []

    def start(repos: dict[str, Path | dict[str, Path]]) -> HubServer:
        server = HubServer(repos)
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        return server

    yield start
    close_session()
    for server in servers:
        server.__exit__(None, None, None)
