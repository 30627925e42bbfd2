"""`on_ray` and `--ray`, on clusters of several nodes on this machine."""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.attacks import made
from helpers.attacks.processes import tpuconv
from helpers.attacks.simulated import contents
from helpers.ray_workers import HALT
from tpuconv import api
from tpuconv.api import ray_tasks
from tpuconv.convert.plan import sizes
from tpuconv.errors import ConfigError, UsageError
from tpuconv.extras import install_command
from tpuconv.hosts import ProcessPart
from tpuconv.storage.shared_journal import SharedJournal

needs_ray = [
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (extra ray)"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the workers."""
    for name, value in {"CHUNK_BYTES": 1500, "SLAB_BYTES": 3000, "UNIT_BYTES": 6000}.items():
        monkeypatch.setattr(sizes, name, value)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made.source(tmp_path / "src", shards=9, num_hidden_layers=6)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_units: None) -> Iterator[Any]:
    """Two nodes of one CPU each; this process is connected to the cluster."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    options = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "worker_process_setup_hook": "helpers.ray_workers.set_up",
                "env_vars": {HALT: str(tmp_path / "halted")},
            },
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def leftovers(out: Path) -> list[str]:
    return [path.name for path in out.parent.glob(f".{out.name}*")]


class TestOnACluster:
    pytestmark = needs_ray

    def test_a_node_that_is_killed(self, cluster, source, tmp_path):
        """Its task runs again elsewhere, and continues."""
        made.convert(source, tmp_path / "alone")
        out, halted = tmp_path / "out", tmp_path / "halted"
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(api.on_ray, api.convert, source, out, count=3)
            while not (halted.exists() and halted.read_text()):
                assert not running.done() or running.result()
                time.sleep(0.05)
            assert not out.exists()
            (node,) = [node for node in cluster.list_all_nodes() if node.node_id == halted.read_text()]
            cluster.remove_node(node, allow_graceful=False)
            done = running.result()
        assert contents(out) == contents(tmp_path / "alone")
        assert not leftovers(out)
        assert done.published
        assert "process" not in done.to_json()
        assert not done.already_there
        assert api.on_ray(api.convert, source, out, overwrite=True, check=True).already_there

    def test_quantized_and_exported(self, cluster, source, tmp_path, monkeypatch):
        ckpt = tmp_path / "ckpt"
        (tmp_path / "halted").touch()  # nothing is killed
        api.convert(source, ckpt, jobs=1)
        for name, command, options in (
            ("int8", api.quantize, {"config": "int8_weight_only", "jobs": 1}),
            ("again", api.export, {}),
        ):
            done = api.on_ray(command, ckpt, tmp_path / name, **options)
            assert done.published
            assert not done.already_there
            assert not done.resumed_bytes
            command(ckpt, tmp_path / f"{name}-alone", **options)
            assert contents(tmp_path / name) == contents(tmp_path / f"{name}-alone")

    def test_errors_of_tasks_are_raised(self, cluster, source, tmp_path, monkeypatch):
        (tmp_path / "halted").touch()
        (source / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="model_type"):
            api.on_ray(api.convert, source, tmp_path / "out")
        # A node whose disk is another one does not see the mark of this process.
        monkeypatch.setattr("tpuconv.api.ray_tasks._mark", lambda out: nullcontext(out.parent / "elsewhere"))
        with pytest.raises(UsageError, match="not on a disk that all nodes of the cluster share") as error:
            api.on_ray(api.convert, source, tmp_path / "out")
        assert "bucket" in str(error.value.hint)
        assert not leftovers(tmp_path / "out")

    def test_the_command(self, cluster, source, tmp_path):
        (tmp_path / "halted").touch()
        done = tpuconv("convert", source, tmp_path / "out", "--ray", cluster.address, "--json", fresh=True)
        assert json.loads(done.stdout)["arrays"]
        made.convert(source, tmp_path / "alone")
        # Units and chunks are those of the nodes, which no test changed here.
        assert api.verify(tmp_path / "out").passed


def test_the_first_driver_to_end_leaves_the_mark_of_another(tmp_path):
    with ray_tasks._mark(tmp_path / "out") as mark:
        with ray_tasks._mark(tmp_path / "out") as other:
            ray_tasks._check_shared(tmp_path / "out", other)
        ray_tasks._check_shared(tmp_path / "out", mark)
    assert not list(tmp_path.iterdir())


def test_marks_of_killed_drivers_are_removed_and_no_other_files(tmp_path):
    killed, others = ".out.tpuconv-ray-0123456789abcdef", [".out.tpuconv-ray-mine", ".other.tpuconv-ray-" + 16 * "0"]
    others += [".out.tpuconv-ray-" + 16 * "1"]
    with ray_tasks._mark(tmp_path / "out") as running:
        for name in (killed, *others):
            (tmp_path / name).touch()
        (tmp_path / others[-1]).write_text("of somebody")
        with ray_tasks._mark(tmp_path / "out"):
            assert not (tmp_path / killed).exists()
            assert running.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_the_parents_of_an_output_are_made(tmp_path):
    with ray_tasks._mark(tmp_path / "new" / "folder" / "out") as mark:
        assert mark.exists()


def test_what_does_not_go_with_ray(tmp_path):
    for words, message in (
        (["--ray", "--distributed"], "--ray starts the processes itself"),
        (["--ray", "--process-index", 0], "--ray starts the processes itself"),
        (["--ray", "gs://bucket/out"], "no address of a cluster"),
    ):
        assert message in tpuconv("convert", tmp_path, tmp_path / "out", *words, code=2).stderr
    assert "--ray needs OUT" in tpuconv("convert", tmp_path, "--ray", code=2).stderr


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuconv.api.ray_tasks.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package ray") as error:
        api.on_ray(api.convert, tmp_path, tmp_path / "out")
    assert install_command("ray") in str(error.value.hint)


def test_a_task_waits_for_the_one_it_follows(small_units, source, tmp_path, monkeypatch):
    """A process that died may hold its lock a little longer."""
    out, share = tmp_path / "out", SharedJournal.share

    def waits(seconds: float) -> None:
        raise InterruptedError

    def shared(self: Any) -> None:
        share(self)
        with pytest.raises(InterruptedError):
            ray_tasks._do_part(part, api.convert, source, out, {}, os.getcwd(), None)

    part = ProcessPart(0, 2, publishes=False)
    monkeypatch.setattr(SharedJournal, "share", shared)
    monkeypatch.setattr("tpuconv.api.ray_tasks.time.sleep", waits)
    api.convert(source, out, part=part)
    assert not out.exists()
