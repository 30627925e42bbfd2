"""Inspect the tensors of a checkpoint, and propose a family for it."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.opened import runs_to_json
from tpuconv.arguments import given_as
from tpuconv.errors import UsageError
from tpuconv.location import Location, local_path, to_location
from tpuconv.options import MESH_OPTION, PROGRESS_ARGUMENT, TRAINED_CONFIG_OPTION, argument, option, takes
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.convert.export.trained import OpenedRun, TrainedRun
    from tpuconv.convert.plan.proposal import FamilyProposal
    from tpuconv.verify.weights.measuring import MeasuredWeight, WeightComparison


@dataclass(frozen=True, repr=False)
class Inspection(OneLine):
    """The tensors of a checkpoint by pattern of their names.

    Attributes:
        format: "tpuconv" for a checkpoint of ours, "orbax" for a trainer's, "safetensors" for others.
        tensors: how many there are.
        bytes: their size, in which values of less than 8 bits are packed as on a device.
        patterns: for each pattern the keys that docs/json.md lists.
        mesh: sizes of the mesh axes; None without a mesh.
        device_bytes: bytes of one device of the mesh; None without a mesh.
        html: the page that was written; None without one.
        weights: with a page, each tensor with the statistics of its values, and of its quantized numbers.
        comparison: with `beside`, how the parameters of the two differ.
        runs: the facts of trainers' checkpoints among the two.
    """

    format: str
    tensors: int
    bytes: int
    patterns: Sequence[Mapping[str, Any]]
    mesh: Mapping[str, int] | None
    device_bytes: int | None
    html: Path | None = None
    weights: "Sequence[MeasuredWeight]" = ()
    comparison: "WeightComparison | None" = None
    runs: "Sequence[TrainedRun]" = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        sharded = {"mesh": dict(self.mesh), "device_bytes": self.device_bytes} if self.mesh else {}
        facts = {"format": self.format, "tensors": self.tensors, "bytes": self.bytes}
        written: dict[str, Any] = {}
        if self.html is not None:
            written = {"html": str(self.html), "weights": [each.to_json() for each in self.weights]}
        if self.comparison is not None:
            written["comparison"] = self.comparison.to_json()
        return {**facts, **sharded, **written, **runs_to_json(self.runs), "patterns": list(self.patterns)}


@dataclass(eq=False, repr=False)
class InspectRequest:
    """The arguments of `inspect`."""

    path: str | Location = field(
        metadata=argument(
            "A safetensors folder or file, a Hub id, or a checkpoint of ours; with `config` a trainer's checkpoint."
        )
    )
    _: KW_ONLY
    mesh: Mapping[str, int] | None = field(default=None, metadata=MESH_OPTION)
    html: str | Path | None = option(
        None, "Read all weights, and write a page with statistics and histograms of each tensor to this file."
    )
    beside: str | Location | None = option(
        None, "Compare with this checkpoint, of the same kind, in the page: where the two differ most."
    )
    overwrite: bool = option(False, "Replace the page if it exists.")
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(InspectRequest)
def inspect(asked: InspectRequest) -> Inspection:
    """Returns the tensors of a checkpoint, from headers alone. With `html` all weights are read, in bounded memory.

    Raises:
        OutputError: the page exists already.
        TpuconvError: the path is none of these, or `mesh` is given for safetensors.
    """
    from tpuconv.names import collapse
    from tpuconv.notation.sharding import named_mesh

    if asked.html is None and (asked.beside is not None or asked.overwrite):
        raise UsageError("`beside=` and `overwrite=` need a page", hint="name the page by `html=`")
    manifest, form, runs = _described(asked)
    if asked.mesh and manifest is None:
        raise UsageError(
            f"{asked.path} is not a checkpoint of tpuconv: `mesh=` shards by its axes", hint="convert it first"
        )
    if manifest is None:
        tensors = _source_tensors(str(asked.path))
    else:
        tensors = _our_tensors(manifest, named_mesh(asked.mesh or {}))
    patterns = []
    for pattern, names in collapse(tensors).items():
        kinds = {(tensors[name]["dtype"], tuple(tensors[name]["shape"])) for name in names}
        (dtype, shape), more = sorted(kinds)[0], len(kinds) - 1
        facts = {"pattern": pattern, "count": len(names), "dtype": dtype, "shape": list(shape), "other_kinds": more}
        if manifest is not None:
            facts["axes"] = tensors[names[0]]["axes"]
        for key in ("bytes", *(["device_bytes"] if asked.mesh else [])):
            facts[key] = sum(tensors[name][key] for name in names)
        if asked.mesh:
            facts["partition"] = tensors[names[0]]["partition"]
            facts["undivided"] = tensors[names[0]]["undivided"]
        patterns.append(facts)
    found = Inspection(
        format=form,
        tensors=len(tensors),
        bytes=sum(tensor["bytes"] for tensor in tensors.values()),
        patterns=patterns,
        mesh=asked.mesh,
        device_bytes=sum(tensor["device_bytes"] for tensor in tensors.values()) if asked.mesh else None,
        runs=runs,
    )
    return found if asked.html is None else _with_page(found, asked, local_path(asked.html))


def _with_page(found: Inspection, asked: InspectRequest, page: Path) -> Inspection:
    """Reads the weights and writes the page."""
    from tpuconv.api.running import downloading_again
    from tpuconv.storage.reports import check_free, write_report
    from tpuconv.verify.weights.measuring import measured_trees
    from tpuconv.verify.weights.page import weights_page

    check_free(page, "html", overwrite=asked.overwrite)
    measured = downloading_again(
        lambda: measured_trees(_places(asked), lambda n, of: asked.progress(Progress("reading weights", n, of))),
        asked.progress,
    )
    write_report(weights_page(measured), page, "html", overwrite=asked.overwrite)
    return replace(found, html=page, weights=measured.trees[0].weights, comparison=measured.comparison)


def _places(asked: InspectRequest) -> "list[tuple[str | Location, str | None]]":
    """Returns the checkpoints that are inspected, each with the model that was trained, if it is a trainer's."""
    from tpuconv.convert.export.trained import configs_of

    places = [asked.path, *([] if asked.beside is None else [asked.beside])]
    return list(zip(places, configs_of(places, asked.config), strict=True))


def _described(asked: InspectRequest) -> "tuple[Manifest | None, str, list[TrainedRun]]":
    """Returns the manifest of a checkpoint of ours or of a trainer's, None of safetensors; the format; and the facts of
    trainers' checkpoints.

    Raises:
        TpuconvError: one cannot be read.
    """
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.convert.export.trained import check_converted, opened_run
    from tpuconv.names import MANIFEST
    from tpuconv.storage.places import is_file
    from tpuconv.storage.sealed import SAFETENSORS, kind_of

    trained: dict[bool, OpenedRun] = {}
    for place, config in _places(asked):
        if config is None:
            check_converted(to_location(place))
            continue
        with opened_run(to_location(place), config, asked.progress) as run:
            trained[place is asked.path] = run
    runs = [run.facts for run in trained.values()]
    if True in trained:
        return trained[True].arrays.manifest, "orbax", runs
    folder = to_location(asked.path)
    if is_file(folder / MANIFEST) and kind_of(folder) != SAFETENSORS:
        return read_manifest(folder), "tpuconv", runs
    return None, "safetensors", runs


def _our_tensors(manifest: "Manifest", mesh: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Returns the arrays of a checkpoint, and the part of each that one device of the mesh holds."""
    from tpuconv.checkpoint.manifest import element_bits
    from tpuconv.notation.sharding import partition, shard_shape, undivided
    from tpuconv.targets.words import check_words

    tensors = {}
    if mesh:
        check_words(manifest)
    for name, array in manifest.arrays.items():
        parts = partition(array.axes, array.shape, mesh) if mesh else (None,) * len(array.shape)
        bits = element_bits(array.dtype)
        tensors[name] = {
            "dtype": array.dtype,
            "shape": array.shape,
            "axes": array.axes,
            "bytes": -(-prod(array.shape) * bits // 8),
            "partition": parts,
            "undivided": undivided(array.axes, array.shape, mesh) if mesh else {},
            "device_bytes": -(-prod(shard_shape(array.shape, parts, mesh)) * bits // 8),
        }
    return tensors


def _source_tensors(path: str) -> dict[str, dict[str, Any]]:
    from tpuconv.sources.headers import read_header
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import open_source

    if path.endswith(".safetensors") and Path(path).is_file():
        infos = {info.name: info for info in read_header(Path(path))[2]}
    else:
        with resolve(path, weights=False) as resolved:
            infos = dict(open_source(resolved.folder, repo=resolved.repo).tensors)
    return {name: {"dtype": info.dtype, "shape": info.shape, "bytes": info.nbytes} for name, info in infos.items()}


def propose(src: str | Path) -> "FamilyProposal":
    """Returns the family that is nearest to a checkpoint that no family reads, what it explains, and a draft of a
    `family.py`. From config.json and headers alone.

    Args:
        src: a folder with safetensors, or a Hub id.

    Raises:
        TpuconvError: the source cannot be read, or no family can read the sizes in its config.json.
    """
    from tpuconv.convert.plan.proposal import propose_family
    from tpuconv.sources.hub import resolve
    from tpuconv.sources.source import open_source

    with resolve(str(given_as("src", src, Path)), weights=False) as resolved:
        return propose_family(open_source(resolved.folder, repo=resolved.repo))
