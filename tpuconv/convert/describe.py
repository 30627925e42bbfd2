"""The manifest that a run writes of its plan."""

from collections.abc import Mapping
from importlib.metadata import version
from math import prod
from typing import Any

from tpuconv.checkpoint.manifest import LIBRARIES, passthrough_facts
from tpuconv.convert.plan.types import Plan
from tpuconv.names import QVALUE
from tpuconv.storage.sealed import CHECKPOINT, MANIFEST_FORMAT


def describe(
    plan: Plan,
    sha256: Mapping[str, str | None],
    checksums: Mapping[str, tuple[int, int]],
    statistics: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The manifest of a finished run, without the files beside the arrays.

    Args:
        plan: what was converted.
        sha256: of each shard of the source; None for a shard of which only a part was read.
        checksums: of each array, the sums over its chunks and over their crc32c.
        statistics: of each quantized parameter, what its encoder found.
    """
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "kind": CHECKPOINT,
        "fingerprint": plan.fingerprint,
        "source": plan.source.origin(sha256),
        "family": plan.family,
        "table": plan.table.fingerprint,
        **({"variant": plan.table.variant} if plan.table.variant else {}),
        "options": plan.options.to_json(),
        "versions": {library: version(library) for library in LIBRARIES},
        "parameters": plan.parameters,
        "bytes": plan.output_bytes,
        "skipped": [vars(skip) for skip in plan.skipped],
        "arrays": {
            array.name: {
                "shape": array.shape,
                "dtype": array.dtype.name,
                "axes": array.axes,
                "chunks": array.chunks,
                "sources": [info.name for name in array.sources for info in plan.tensors[name].stored],
                "shards": array.shards,
                "xxh3": f"{checksums[array.name][0]:016x}",
                "crc32c": f"{checksums[array.name][1]:016x}",
                **({"buffer": True} if array.buffer else {}),
            }
            for array in plan.arrays.values()
        },
    }
    if plan.quantization:
        parameters = {
            name: encoder.to_json() | _undone(plan, name) | {"figures": statistics[name]}
            for name, encoder in plan.quantization.encoders.items()
        } | {
            name: passthrough.to_json()
            | {"rule": plan.quantization.passthrough[name], "figures": _nothing_lost(plan, name)}
            for name, passthrough in plan.passthrough.items()
        }
        manifest["quantization"] = {**plan.quantization.config, "parameters": parameters}
    elif plan.passthrough:
        manifest["quantization"] = passthrough_facts(plan.passthrough)
    return manifest


def _undone(plan: Plan, name: str) -> dict[str, str]:
    """The encoding of the source that a parameter had before it was quantized to another."""
    source = plan.arrays[plan.stored_names(name)[0]].sources[0]
    scheme = plan.tensors[source].scheme
    return {"requantized": scheme.title} if scheme else {}


def _nothing_lost(plan: Plan, name: str) -> dict[str, float]:
    return {"signal": 0.0, "noise": 0.0, "clipped": 0.0, "count": float(prod(plan.arrays[name + QVALUE].shape))}
