"""The manifest that a run writes of its plan."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from typing import Any

from tpuconv.checkpoint.manifest import LIBRARIES, PARAMS, Manifest, passthrough_facts
from tpuconv.checkpoint.shards import ZSTD
from tpuconv.checkpoint.stored import stored_arrays
from tpuconv.convert.plan.types import OutputArray, Plan
from tpuconv.convert.run.results import UnitResult
from tpuconv.names import QVALUE
from tpuconv.sources.source import Source
from tpuconv.storage.sealed import CHECKPOINT, MANIFEST_FORMAT, Sealed


def describe(
    plan: Plan,
    hashes: Mapping[str, str | None],
    result: UnitResult,
    calibrated: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the manifest of a finished run, without the files beside the arrays.

    Args:
        plan: what was converted.
        hashes: of each shard of the source; None for a shard of which only a part was read.
        result: what all units found.
        calibrated: of each parameter that was calibrated, what to say of that.
    """
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "kind": CHECKPOINT,
        "fingerprint": plan.fingerprint,
        "source": plan.source.origin(hashes),
        "family": plan.family,
        "table": plan.table.fingerprint,
        **({"release": release} if (release := plan.table.release.to_json()) else {}),
        **({"returns": plan.table.returns} if plan.table.returns else {}),
        **({"parts": list(parts)} if (parts := getattr(plan.config, "parts", {})) else {}),
        "options": plan.options.to_json(),
        **({"folder": plan.target.folder} if plan.target.folder != PARAMS else {}),
        "versions": {library: version(library) for library in LIBRARIES},
        "parameters": plan.parameters,
        "bytes": plan.output_bytes,
        "skipped": [*plan.source.skipped_before, *(vars(skip) for skip in plan.skipped)],
        **described_arrays(
            plan.arrays,
            result,
            lambda array: [info.name for name in array.sources for info in plan.tensors[name].stored],
        ),
    }
    if plan.quantization:
        parameters = {
            name: encoder.to_json()
            | _undone(plan, name)
            | {"figures": result.statistics[name], **calibrated.get(name, {})}
            for name, encoder in plan.quantization.encoders.items()
        } | {
            name: passthrough.to_json()
            | {"rule": plan.quantization.passthrough[name], "figures": _nothing_lost(plan, name)}
            for name, passthrough in plan.passthrough.items()
        }
        manifest["quantization"] = {**plan.quantization.config, "parameters": parameters}
    elif plan.passthrough:
        scales = {"tensor_scales": result.tensor_scales} if result.tensor_scales else {}
        manifest["quantization"] = passthrough_facts(plan.passthrough) | scales
    return manifest


def described_arrays(
    arrays: Mapping[str, OutputArray], result: UnitResult, sources: Callable[[OutputArray], Sequence[str]]
) -> dict[str, Any]:
    """Returns the keys of the manifest about arrays.

    Args:
        arrays: of the output, by name.
        result: what all units found.
        sources: returns the names of the released tensors that an array is made of.
    """
    return {
        **dict(_stored_bytes(arrays, result.shard_bytes)),
        "arrays": {
            array.name: {
                "shape": array.shape,
                "dtype": array.dtype.name,
                "axes": array.axes,
                "chunks": array.chunks,
                "sources": list(sources(array)),
                "shards": array.shards,
                "xxh3": f"{result.checksums[array.name][0]:016x}",
                "crc32c": f"{result.checksums[array.name][1]:016x}",
                **dict(_compression(array, result.shard_bytes)),
                **({"buffer": True} if array.buffer else {}),
            }
            for array in arrays.values()
        },
    }


@dataclass(frozen=True)
class PlannedManifest(Manifest):
    """The manifest of a checkpoint that is not written: its model is loaded from the `source`. Folder and files are of
    the source; checksums are 0."""

    source: Source

    def check_current(self) -> None:
        """Checks that the source is still what the plan was made from.

        Raises:
            SourceError: a file of weights is missing or changed.
        """
        reader = self.source.open(hashes=())
        try:
            reader.check_unchanged()
        finally:
            reader.close()


def planned_manifest(plan: Plan) -> PlannedManifest:
    """Returns the manifest that a run of the plan would write, as far as it is known before anything is read."""
    sizes = {a.name: dict.fromkeys(a.shard_names(), 0) for a in plan.arrays.values() if a.compressed}
    result = UnitResult(defaultdict(lambda: (0, 0)), defaultdict(dict), sizes)
    raw = describe(plan, dict.fromkeys(plan.source.stamps), result, {}) | {"files": dict(plan.source.companions)}
    return PlannedManifest(plan.source.folder, Sealed(raw, "", None), stored_arrays(raw), plan.source)


def _stored_bytes(
    arrays: Mapping[str, OutputArray], sizes: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, int]]:
    if sizes:
        plain = sum(array.nbytes for array in arrays.values() if not array.compressed)
        yield "stored_bytes", plain + sum(sum(files.values()) for files in sizes.values())


def _compression(array: OutputArray, sizes: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, Any]]:
    if array.compressed:
        yield "compression", ZSTD
        yield "shard_bytes", [sizes[array.name][name] for name in array.shard_names()]


def _undone(plan: Plan, name: str) -> dict[str, str]:
    """Returns the encoding of the source that a parameter had before it was quantized to another."""
    source = plan.arrays[plan.stored_names(name)[0]].sources[0]
    scheme = plan.tensors[source].scheme
    return {"requantized": scheme.title} if scheme else {}


def _nothing_lost(plan: Plan, name: str) -> dict[str, float]:
    return {
        "signal": 0.0,
        "noise": 0.0,
        "clipped": 0.0,
        "count": float(prod(plan.arrays[plan.target.part(name, QVALUE[1:])].shape)),
    }
