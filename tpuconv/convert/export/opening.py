"""Opens a checkpoint for an export: ours, or a trainer's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tpuconv.checkpoint.manifest import Manifest, read_manifest
from tpuconv.checkpoint.orbax_tree import TrainedTree, holds_tree, locate_tree
from tpuconv.convert.export.array_source import ArraySource, CheckpointArrays
from tpuconv.convert.export.carried import carried
from tpuconv.convert.export.contents import ExportContents
from tpuconv.convert.export.export import ExportWork, room_for_layout
from tpuconv.convert.export.exporting import Exporting, describe_exporting, released_table
from tpuconv.convert.export.layout import lay_out
from tpuconv.convert.export.lora.merged import MergedPairs
from tpuconv.convert.export.lora.tree import explain_pairs, read_pairs
from tpuconv.convert.export.lora.work import trained_adapter
from tpuconv.convert.export.options import ExportOptions
from tpuconv.convert.export.orbax_arrays import OrbaxArrays
from tpuconv.convert.export.way_back import explain_tree, parameters_of, readings
from tpuconv.convert.plan.types import Skip
from tpuconv.errors import UsageError, shorten
from tpuconv.location import Location
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import find_family, get_family
from tpuconv.names import MANIFEST, collapse
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MappingTable
from tpuconv.progress import Listener, Progress
from tpuconv.sources.config import without_encoding
from tpuconv.sources.hub import resolve
from tpuconv.sources.repository import Resolved
from tpuconv.sources.source import Source, open_described, open_source
from tpuconv.storage.places import is_there
from tpuconv.text import format_count


@contextmanager
def opened_export(ckpt: Location, asked: ExportOptions, progress: Listener) -> Iterator[ExportContents]:
    """Opens a checkpoint. The value is what its export would write. Raises as `tpuconv.api.plan_export` does."""
    asked.check_together()
    with ExitStack() as stack:
        if asked.config is not None:
            yield _trained(ckpt, asked, stack, progress)
        else:
            arrays, what = _converted(ckpt, asked, stack, progress)
            yield _laid_out(arrays, what, arrays.manifest.params, what.beside.skipped if what.beside else ())


def _laid_out(arrays: ArraySource, what: Exporting, params: Location, skipped: tuple[Skip, ...]) -> ExportContents:
    layout, manifest = lay_out(arrays, what), arrays.manifest
    return ExportContents(
        checkpoint=manifest.folder,
        family=what.family,
        target=manifest.target,
        arrays=params,
        skipped=skipped,
        files=layout.files,
        encoding=layout.encoding,
        work=lambda limits: ExportWork(
            arrays, what, layout, room_for_layout(manifest.folder.name, arrays, layout, limits)
        ),
    )


def _converted(
    ckpt: Location, asked: ExportOptions, stack: ExitStack, progress: Listener
) -> tuple[ArraySource, Exporting]:
    """The arrays of a checkpoint of ours, and what is exported of them."""

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


def _check_whole(manifest: Manifest) -> None:
    """Raises UsageError if a checkpoint contains only the text model of a multimodal model: the config.json of its
    export would describe missing parts, which transformers fills with random numbers."""

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


def _trained(ckpt: Location, asked: ExportOptions, stack: ExitStack, progress: Listener) -> ExportContents:
    """The arrays of a trainer's checkpoint, or the adapter in it."""
    folder = locate_tree(ckpt)
    if is_there(ckpt / MANIFEST):
        raise UsageError(
            f"{ckpt} has a manifest of tpuconv, so `config=` is not needed",
            hint="leave out `config=`; if a trainer wrote other arrays into it, give the folder of its step",
        )
    tree = TrainedTree(folder)
    source = open_described(stack.enter_context(_resolved(str(asked.config), None, progress, weights=False)))
    raw = without_encoding(source.config)
    family = find_family(raw)
    known = readings(family, raw, source.tensors, family.returns(raw, source.tensors))
    if asked.adapter:
        assert asked.lora_alpha is not None
        return trained_adapter(tree, family, raw, known, asked.target, str(asked.config), asked.lora_alpha)
    explained = explain_tree(tree, family, raw["model_type"], known, asked.target, merged=asked.merge)
    parameters, padded = parameters_of(tree, explained)
    merged = None
    if asked.merge:
        assert asked.lora_alpha is not None
        pairs = explain_pairs(tree, family, raw["model_type"], known, explained.form.target.name)
        rows = read_pairs(tree, pairs, asked.lora_alpha)
        merged = MergedPairs(rows, asked.lora_alpha)
    arrays = OrbaxArrays(tree, explained, parameters, source, family.name, merged)
    form = explained.form
    skipped = (*explained.skipped, *padded, *_outside(source, form.table, form.config))
    return _laid_out(arrays, Exporting(form.table, form.config, family.name), tree.folder, skipped)


def _outside(source: Source, table: MappingTable, config: HasSizes) -> list[Skip]:
    """The tensors of a multimodal model that is described by a source, which trained text models do not have."""

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


def _resolved(src: str, revision: str | None, progress: Listener, *, weights: bool) -> Resolved:

    return resolve(
        src,
        revision=revision,
        weights=weights,
        progress=lambda n, of: progress(Progress("downloading", n, of)),
    )
