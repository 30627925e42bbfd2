"""Conversions in this process, and arrays read back by Orbax."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.export.array_source import CheckpointArrays
from tpuconv.convert.export.export import ExportWork
from tpuconv.convert.export.exporting import Exporting
from tpuconv.convert.export.layout import lay_out
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.engine import RunProgress, make
from tpuconv.convert.run.sizing import Limits, TensorRoom
from tpuconv.models.registry import find_family
from tpuconv.notation.table import MappingTable
from tpuconv.sources.source import open_source

LIMITS = Limits(jobs=2, max_memory=2**30)
PLAIN = Options()


def plan_for(folder: Path, options: Options = PLAIN):
    source = open_source(folder)
    family = find_family(source.config)
    returns = family.returns(source.config, source.tensors)
    config = family.read_config(source.config, tensors=source.tensors, returns=returns)
    return make_plan(source, family.name, family.table_for(source.tensors, config, returns), config, options)


def convert(folder: Path, out: Path, options: Options = PLAIN, **kwargs):
    plan = plan_for(folder, options)
    for _ in run(plan, out, kwargs.pop("limits", LIMITS), **kwargs):
        pass
    return plan


def flatten(tree, front=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{front}{key}.")
        else:
            yield front + key, np.asarray(value)


def restore(out: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return dict(flatten(checkpointer.restore((out / "params").absolute())))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    bits = f"u{a.dtype.itemsize}"
    return (a.shape, a.dtype) == (b.shape, b.dtype) and np.array_equal(
        np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits)
    )


def assert_same(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert set(have) == set(want)
    assert not [name for name in want if not same_bits(have[name], want[name])]


def export_checkpoint(
    manifest: Manifest, table: MappingTable, config: Any, out: Path, *, overwrite: bool = False
) -> Iterator[RunProgress]:
    """Exports a checkpoint with one thread, by the table of the target that it is for."""
    arrays, what = CheckpointArrays(manifest), Exporting(table, config, manifest.family)
    return make(ExportWork(arrays, what, lay_out(arrays, what), TensorRoom(1)), out, overwrite=overwrite)
