"""Export."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuconv.errors import UsageError, shorten
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location, to_location
from tpuconv.memory import peak_memory
from tpuconv.names import MANIFEST
from tpuconv.options import (
    FORM_CHOICES,
    PART_ARGUMENT,
    PROGRESS_ARGUMENT,
    SCHEME_OPTION,
    Budget,
    Replacing,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import format_count

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.convert.export.array_source import ArraySource
    from tpuconv.convert.export.exporting import Exporting
    from tpuconv.convert.export.tensor import ExportTensor
    from tpuconv.convert.plan.types import Skip
    from tpuconv.notation.sizes import HasSizes
    from tpuconv.notation.table import MappingTable
    from tpuconv.sources.repository import Resolved
    from tpuconv.sources.source import Source


@dataclass(frozen=True)
class Export:
    """The output of `export`.

    Attributes:
        out: the folder with the safetensors files.
        family: the family of the model.
        target: the program that the checkpoint is for.
        arrays: the folder of the Orbax checkpoint.
        skipped: the arrays of a trainer's checkpoint, or the tensors skipped by the conversion, that were not exported.
        files: the number of safetensors files.
        bytes: size of the tensors.
        already_there: whether OUT was complete before.
        seconds: wall-clock time.
        peak_memory_bytes: peak resident memory of this process.
        part: the share of this process; None if there was only one process.
        published: whether OUT is complete. If not, the last of the other processes publishes it, and `files` is 0.
    """

    out: Location
    family: str
    target: str
    arrays: Location
    skipped: "tuple[Skip, ...]"
    files: int
    bytes: int
    already_there: bool
    seconds: float
    peak_memory_bytes: int
    part: ProcessPart | None
    published: bool

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        return {
            "out": str(self.out),
            "family": self.family,
            "target": self.target,
            "arrays": str(self.arrays),
            "skipped": [vars(skip) for skip in self.skipped],
            "files": self.files,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
            **({} if self.part is None else {"process": self.part.to_json(), "published": self.published}),
        }


@dataclass(frozen=True)
class ExportPlan:
    """The plan of an export, before a value is read.

    Attributes:
        ckpt: the checkpoint.
        family: the family of the model.
        target: the program that the checkpoint is for.
        skipped: the arrays of a trainer's checkpoint, or the tensors skipped by the conversion, that would not be
            exported.
        files: the tensors of each safetensors file.
        encoding: the description of quantized parameters for config.json; None if there are none.
    """

    ckpt: Location
    family: str
    target: str
    skipped: "tuple[Skip, ...]"
    files: "Sequence[Sequence[ExportTensor]]"
    encoding: dict[str, Any] | None

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file)

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        from tpuconv.convert.export.tensor import tensors_to_json

        return {
            "checkpoint": str(self.ckpt),
            "family": self.family,
            "target": self.target,
            "skipped": [vars(skip) for skip in self.skipped],
            "files": len(self.files),
            "bytes": self.bytes,
            "encoding": self.encoding,
            "tensors": tensors_to_json(self.files),
        }


@dataclass(eq=False, repr=False, kw_only=True)
class ExportOptions:
    """The options of `export` and `plan_export`."""

    config: str | Location | None = option(
        None,
        "CKPT is a trainer's Orbax checkpoint of the model SRC: a path or Hub id with config.json and tokenizer.",
        python="The model that was trained, if the checkpoint is a trainer's: a folder or a Hub id with config.json "
        "and tokenizer. If it has safetensors, the output has their names.",
    )
    target: str | None = option(
        None, "The program that trained CKPT: maxtext, tunix, nnx, ...  [default: each is tried]"
    )
    with_skipped: str | Location | None = option(
        None,
        "Add the tensors that the conversion skipped (towers, MTP layers) from its source, a path or Hub id.",
    )
    scheme: str | None = field(default=None, metadata=SCHEME_OPTION)
    form: str | None = option(
        None,
        "Name and group the tensors as the family's releases do, or as the modules of transformers do.  "
        "[default: as the source did]",
        choices=FORM_CHOICES,
    )


CKPT = argument(
    "A checkpoint of tpuconv; with `config` a checkpoint that a trainer saved with Orbax, its step, or its run, of "
    "which the latest step is taken."
)


@dataclass(eq=False, repr=False)
class PlanExportRequest(ExportOptions):
    """The arguments of `plan_export`."""

    ckpt: str | Location = field(metadata=CKPT)
    _: KW_ONLY
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@dataclass(eq=False, repr=False)
class ExportRequest(Budget, Replacing, ExportOptions):
    """The arguments of `export`."""

    ckpt: str | Location = field(metadata=CKPT)
    out: str | Location = field(metadata=argument("The folder to write; it appears complete or not at all."))
    _: KW_ONLY
    part: ProcessPart | None = field(default=None, metadata=PART_ARGUMENT)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(PlanExportRequest)
def plan_export(asked: PlanExportRequest) -> ExportPlan:
    """Plans `export` with the same arguments; no values are read.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.convert.export.layout import lay_out

    ckpt = to_location(asked.ckpt)
    with _opened(ckpt, asked, asked.progress) as (arrays, what, skipped):
        layout = lay_out(arrays, what)
        return ExportPlan(ckpt, what.family, arrays.manifest.target, skipped, layout.files, layout.encoding)


@takes(ExportRequest)
def export(asked: ExportRequest) -> Export:
    """Writes a checkpoint as safetensors, under the names that its tensors had. What was neither cast nor dequantized
    comes back bit for bit. Quantized parameters are written in the formats that vLLM, SGLang, tpu-inference and
    transformers load.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.api.verification import verify
    from tpuconv.convert.export.export import ExportWork, room_for_layout
    from tpuconv.convert.export.layout import lay_out
    from tpuconv.convert.run.engine import PART_DONE, check_outside, make
    from tpuconv.convert.run.sizing import Limits
    from tpuconv.storage.sealed import read_sealed

    part, progress = asked.part, asked.progress
    ckpt, out = to_location(asked.ckpt), to_location(asked.out)
    began, total, was_there, is_published = time.monotonic(), 0, False, True
    with _opened(ckpt, asked, progress) as (arrays, what, skipped):
        for source in (arrays.manifest.folder, asked.config, asked.with_skipped):
            if source is not None:
                check_outside(to_location(source), out)
        progress(Progress("exporting"))
        layout = lay_out(arrays, what)
        limits = Limits.of_this_machine(asked.jobs, asked.max_memory)
        work = ExportWork(arrays, what, layout, room_for_layout(ckpt.name, arrays, layout, limits))
        for step in make(work, out, overwrite=asked.overwrite, part=part):
            progress(step.shown_as(f"exporting, {part}" if part else "exporting"))
            is_published = step.stage != PART_DONE
            total, was_there = step.total, is_published and step.resumed == step.total
    if asked.check and was_there:
        verify(out, progress=progress).check()
    manifest = arrays.manifest
    return Export(
        out=out,
        family=what.family,
        target=manifest.target,
        arrays=manifest.folder if asked.config is not None else manifest.params,
        skipped=skipped,
        files=sum(name.endswith(".safetensors") for name in read_sealed(out).files) if is_published else 0,
        bytes=total,
        already_there=was_there,
        seconds=time.monotonic() - began,
        peak_memory_bytes=peak_memory(),
        part=part,
        published=is_published,
    )


@contextmanager
def _opened(
    ckpt: Location, asked: ExportOptions, progress: Listener
) -> "Iterator[tuple[ArraySource, Exporting, tuple[Skip, ...]]]":
    """The arrays of a checkpoint, what is exported of them, and what is not."""
    _check_together(asked)
    with ExitStack() as stack:
        if asked.config is not None:
            yield _trained(ckpt, str(asked.config), asked.target, stack, progress)
        else:
            arrays, what = _converted(ckpt, asked, stack, progress)
            yield arrays, what, what.beside.skipped if what.beside else ()


def _check_together(asked: ExportOptions) -> None:
    """Raises UsageError for options that do not go together."""
    if asked.form is not None and asked.config is not None:
        raise UsageError(
            "`form=` is for checkpoints of tpuconv, and `config=` names tensors as SRC does",
            hint="leave one of them out",
        )
    if asked.config is None and asked.target is not None:
        raise UsageError(
            "`target=` is only for a trainer's checkpoint, which needs `config=`",
            hint="leave it out, or give `config=SRC`",
        )
    if asked.config is not None and asked.scheme is not None:
        raise UsageError(
            "`scheme=` is for quantized checkpoints of tpuconv, and `config=` is for a trainer's checkpoint",
            hint="leave it out",
        )
    if asked.config is not None and asked.with_skipped is not None:
        raise UsageError(
            "`with_skipped=` needs the manifest of a conversion, and `config=` is for checkpoints without one",
            hint="give one of them",
        )


def _converted(
    ckpt: Location, asked: ExportOptions, stack: ExitStack, progress: Listener
) -> "tuple[ArraySource, Exporting]":
    """The arrays of a checkpoint of ours, and what is exported of them."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.orbax_tree import holds_tree
    from tpuconv.convert.export.array_source import CheckpointArrays
    from tpuconv.convert.export.carried import carried
    from tpuconv.convert.export.exporting import describe_exporting, released_table
    from tpuconv.models.registry import get_family
    from tpuconv.sources.source import open_source
    from tpuconv.storage.places import is_there

    if not is_there(ckpt / MANIFEST) and holds_tree(ckpt):
        raise UsageError(
            f"{ckpt} is a checkpoint of Orbax without {MANIFEST}",
            hint="give `config=SRC`, the model that was trained: a folder or a Hub id",
        )
    manifest = read_manifest(ckpt)
    arrays, family = CheckpointArrays(manifest), get_family(manifest.family)
    beside, with_skipped = None, asked.with_skipped
    if with_skipped is None:
        _check_whole(manifest)
    else:
        origin = manifest.raw["source"]
        revision = origin["commit"] if str(with_skipped) == origin["repo"] else None
        resolved = stack.enter_context(_resolved(str(with_skipped), revision, progress, weights=True))
        source = open_source(resolved.folder, repo=resolved.repo)
        model_config = family.read_config(
            source.config, manifest.allow_config, source.tensors, manifest.returns, manifest.parts
        )
        beside = carried(manifest, source, released_table(manifest, family, model_config), model_config)
    return arrays, describe_exporting(arrays, asked.scheme, beside, asked.form)


def _check_whole(manifest: "Manifest") -> None:
    """Raises UsageError if a checkpoint contains only the text model of a multimodal model: the config.json of its
    export would describe missing parts, which transformers fills with random numbers."""
    from tpuconv.models.common.wrapper import is_outside

    lost = [skip for skip in manifest.raw["skipped"] if is_outside(skip["reason"])]
    if lost:
        origin = manifest.raw["source"]
        count, source = sum(skip["count"] for skip in lost), origin.get("repo") or origin.get("folder")
        shown = repr(source) if source else "SRC"
        raise UsageError(
            f"{manifest.folder} contains only the text model, and its config.json describes a multimodal model: "
            f"{format_count(count, 'tensor')} would be missing",
            details=shorten([f"{skip['pattern']}: {skip['reason']}" for skip in lost]),
            hint=f"for a complete model give the source, which has them: `with_skipped={shown}`",
        )


def _trained(
    ckpt: Location, config: str, target: str | None, stack: ExitStack, progress: Listener
) -> "tuple[ArraySource, Exporting, tuple[Skip, ...]]":
    """Returns the arrays of a trainer's checkpoint, the exported ones and the skipped ones."""
    from tpuconv.checkpoint.orbax_tree import TrainedTree, locate_tree
    from tpuconv.convert.export.exporting import Exporting
    from tpuconv.convert.export.orbax_arrays import OrbaxArrays
    from tpuconv.convert.export.way_back import explain_tree, parameters_of, readings
    from tpuconv.models.registry import find_family
    from tpuconv.sources.config import without_encoding
    from tpuconv.sources.source import open_described
    from tpuconv.storage.places import is_there

    folder = locate_tree(ckpt)
    if is_there(ckpt / MANIFEST):
        raise UsageError(
            f"{ckpt} has a manifest of tpuconv, so `config=` is not needed",
            hint="leave out `config=`; if a trainer wrote other arrays into it, give the folder of its step",
        )
    tree = TrainedTree(folder)
    source = open_described(stack.enter_context(_resolved(config, None, progress, weights=False)))
    raw = without_encoding(source.config)
    family = find_family(raw)
    returns = family.returns(raw, source.tensors)
    explained = explain_tree(tree, family, raw["model_type"], readings(family, raw, source.tensors, returns), target)
    parameters, padded = parameters_of(tree, explained)
    arrays = OrbaxArrays(tree, explained, parameters, source, family.name)
    skipped = (*explained.skipped, *padded, *_outside(source, explained.table, explained.config))
    return arrays, Exporting(explained.table, explained.config, family.name), skipped


def _outside(source: "Source", table: "MappingTable", config: "HasSizes") -> "list[Skip]":
    """The tensors of a multimodal model that is described by a source, which trained text models do not have."""
    from tpuconv.convert.plan.types import Skip
    from tpuconv.models.common.wrapper import is_outside
    from tpuconv.names import collapse

    why = table.ignored(config)
    lost: dict[str, list[str]] = {}
    for name in source.tensors:
        if (reason := why(name)) and is_outside(reason):
            lost.setdefault(reason, []).append(name)
    return [
        Skip(
            pattern, len(names), f"{reason}; config.json describes them, and transformers would fill in random numbers"
        )
        for reason, each in lost.items()
        for pattern, names in collapse(each).items()
    ]


def _resolved(src: str, revision: str | None, progress: Listener, *, weights: bool) -> "Resolved":
    from tpuconv.sources.hub import resolve

    return resolve(
        src,
        revision=revision,
        weights=weights,
        progress=lambda n, of: progress(Progress("downloading", n, of)),
    )
