"""Opens the checkpoint of a trainer, which has no manifest, by the model that was trained."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.orbax_tree import TrainedTree, holds_tree, locate_tree
from tpuconv.convert.export.exporting import Exporting
from tpuconv.convert.export.lora.tree import MergedPairs, explain_pairs, read_pairs
from tpuconv.convert.export.orbax_arrays import OrbaxArrays
from tpuconv.convert.export.way_back import Reading, explain_tree, parameters_of, readings
from tpuconv.convert.plan.types import Skip
from tpuconv.errors import UsageError
from tpuconv.location import Location, to_location
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import Family, find_family
from tpuconv.names import MANIFEST, collapse
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MappingTable
from tpuconv.progress import Listener, Progress
from tpuconv.sources.config import without_encoding
from tpuconv.sources.hub import resolve
from tpuconv.sources.repository import Resolved
from tpuconv.sources.source import Source, open_described
from tpuconv.storage.places import is_there


@dataclass(frozen=True)
class TrainedModel:
    """The tree of a trainer, and the model that was trained.

    Attributes:
        ckpt: as it was given.
        tree: the arrays that were saved.
        source: the folder of the model.
        config: its parsed config.json, without an encoding.
        family: of the model.
        known: its readings.
    """

    ckpt: Location
    tree: TrainedTree
    source: Source
    config: Mapping[str, Any]
    family: Family
    known: list[Reading]


@dataclass(frozen=True)
class TrainedRun:
    """The facts of a trainer's checkpoint that is read.

    Attributes:
        folder: as it was given: a checkpoint, a step or a run.
        target: the program whose tree it has.
        arrays: the folder of the tree.
        skipped: arrays of the tree that are no parameters, and tensors of the model that it lacks.
    """

    folder: Location
    target: str
    arrays: Location
    skipped: tuple[Skip, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            "folder": str(self.folder),
            "target": self.target,
            "arrays": str(self.arrays),
            "skipped": [vars(skip) for skip in self.skipped],
        }


@dataclass(frozen=True)
class OpenedRun:
    """A trainer's checkpoint that is open.

    Attributes:
        arrays: its parameters.
        exporting: their table, with the names of the release.
        facts: what is read and what is not.
    """

    arrays: OrbaxArrays
    exporting: Exporting
    facts: TrainedRun


def check_converted(ckpt: Location) -> None:
    """Raises UsageError if a folder has a checkpoint of Orbax without a manifest of tpuconv."""
    if not is_there(ckpt / MANIFEST) and holds_tree(ckpt):
        raise UsageError(
            f"{ckpt} is a checkpoint of Orbax without {MANIFEST}",
            hint="give `config=SRC`, the model that was trained: a folder or a Hub id; commands without this option "
            "take the checkpoint that `tpuconv reshard RUN OUT --config SRC` makes",
        )


def open_trained(
    ckpt: Location, config: str, stack: ExitStack, progress: Listener, *, only_finite: bool
) -> TrainedModel:
    """Opens a trainer's checkpoint, its step or its run.

    Args:
        ckpt: of the trainer.
        config: the model that was trained, a folder or a Hub id.
        stack: keeps the model's folder until it is closed.
        progress: called while config.json is downloaded.
        only_finite: whether NaN and infinite values are refused where they are read.

    Raises:
        UsageError: `ckpt` has a manifest of tpuconv, and is no adapter that `keep_adapter=` wrote.
        TpuconvError: it is no checkpoint of Orbax, or the model is not known.
    """
    folder = locate_tree(ckpt)
    if is_there(ckpt / MANIFEST) and not read_manifest(ckpt).holds_lora:
        raise UsageError(
            f"{ckpt} has a manifest of tpuconv, so `config=` is not needed",
            hint="leave out `config=`; if a trainer wrote other arrays into it, give the folder of its step",
        )
    tree = TrainedTree(folder, only_finite=only_finite)
    source = open_described(stack.enter_context(resolved_source(config, None, progress, weights=False)))
    raw = without_encoding(source.config)
    family = find_family(raw)
    known = readings(family, raw, source.tensors, family.returns(raw, source.tensors))
    return TrainedModel(ckpt, tree, source, raw, family, known)


def trained_arrays(model: TrainedModel, target: str | None, merged_alpha: float | None = None) -> OpenedRun:
    """Returns the parameters of a trainer's tree, and the arrays that are no parameters.

    Args:
        model: that was trained.
        target: whose tree it is; None: of each target in turn.
        merged_alpha: the alpha of LoRA that is added to the parameters; None if there is no LoRA.

    Raises:
        MappingError: no target explains the arrays.
    """
    tree, family, model_type = model.tree, model.family, model.config["model_type"]
    explained = explain_tree(tree, family, model_type, model.known, target, merged=merged_alpha is not None)
    parameters, padded = parameters_of(tree, explained)
    merged = None
    if merged_alpha is not None:
        pairs = explain_pairs(tree, family, model_type, model.known, explained.form.target.name)
        merged = MergedPairs(read_pairs(tree, pairs, merged_alpha), merged_alpha)
    arrays = OrbaxArrays(tree, explained, parameters, model.source, family.name, merged)
    form = explained.form
    skipped = (*explained.skipped, *padded, *_outside(model.source, form.table, form.config))
    return OpenedRun(
        arrays,
        Exporting(form.table, form.config, family.name),
        TrainedRun(model.ckpt, form.target.name, tree.folder, skipped),
    )


@contextmanager
def opened_run(
    ckpt: Location, config: str, progress: Listener, target: str | None = None, *, only_finite: bool = False
) -> Iterator[OpenedRun]:
    """Opens the parameters of a trainer's checkpoint. Other arguments and errors are as of `open_trained` and
    `trained_arrays`."""
    with ExitStack() as stack:
        yield trained_arrays(open_trained(ckpt, config, stack, progress, only_finite=only_finite), target)


def configs_of(places: Sequence[str | Location], config: str | Location | None) -> list[str | None]:
    """Returns for each place the model that was trained there; None of a place that is not a trainer's. If none is, the
    first one is opened as a trainer's, which says what it is instead."""
    if config is None:
        return [None for _ in places]
    folders = [to_location(place) for place in places]
    trained = [not is_there(folder / MANIFEST) and holds_tree(folder) for folder in folders]
    first = trained.index(True) if any(trained) else 0
    return [str(config) if is_trained or i == first else None for i, is_trained in enumerate(trained)]


def _outside(source: Source, table: MappingTable, config: HasSizes) -> list[Skip]:
    """Returns the tensors of a multimodal model that a source describes and trained text models do not have."""
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


def resolved_source(src: str, revision: str | None, progress: Listener, *, weights: bool) -> Resolved:
    """Returns the source at a place or on the Hub, with its weights or without."""
    return resolve(
        src,
        revision=revision,
        weights=weights,
        progress=lambda n, of: progress(Progress("downloading", n, of)),
    )
