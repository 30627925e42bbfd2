"""Opens a checkpoint for an export: ours, or a trainer's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tpuconv.checkpoint.manifest import Manifest, read_manifest
from tpuconv.convert.export.array_source import ArraySource, CheckpointArrays
from tpuconv.convert.export.carried import carried
from tpuconv.convert.export.contents import ExportContents
from tpuconv.convert.export.export import ExportWork, room_for_layout
from tpuconv.convert.export.exporting import Exporting, describe_exporting, released_table
from tpuconv.convert.export.layout import lay_out
from tpuconv.convert.export.lora.alpha import alpha_of
from tpuconv.convert.export.lora.work import trained_adapter
from tpuconv.convert.export.options import ExportOptions
from tpuconv.convert.export.trained import check_converted, open_trained, resolved_source, trained_arrays
from tpuconv.convert.plan.types import Skip
from tpuconv.encodings.tensors import OF_ACTIVATIONS
from tpuconv.errors import UsageError, shorten
from tpuconv.location import Location
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.dflash import formats as dflash
from tpuconv.models.dspark import formats as dspark
from tpuconv.models.eagle3 import formats as eagle3
from tpuconv.models.registry import get_family
from tpuconv.options import DRAFT_FORMS
from tpuconv.progress import Listener
from tpuconv.sources.source import open_source
from tpuconv.text import format_count

FORMATS_OF_DRAFTS = {"eagle3": eagle3.in_format, "dflash": dflash.dflash_format, "dspark": dspark.dspark_format}
"""By family, the function that writes config.json of a draft in another format."""


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
    check_converted(ckpt)
    manifest = read_manifest(ckpt)
    arrays, family = CheckpointArrays(manifest), get_family(manifest.family)
    beside, with_skipped = None, asked.with_skipped
    if with_skipped is None:
        _check_whole(manifest, as_released=asked.scheme is None)
    else:
        origin = manifest.raw["source"]
        revision = origin["commit"] if str(with_skipped) == origin["repo"] else None
        resolved = stack.enter_context(resolved_source(str(with_skipped), revision, progress, weights=True))
        source = open_source(resolved.folder, repo=resolved.repo)
        model_config = family.read_config(
            source.config, manifest.allow_config, source.tensors, manifest.returns, manifest.parts
        )
        beside = carried(manifest, source, released_table(manifest, family, model_config), model_config)
    if asked.form in DRAFT_FORMS:
        if manifest.family not in FORMATS_OF_DRAFTS:
            raise UsageError(f'`form="{asked.form}"` is for EAGLE-3, DFlash and DSpark drafts', hint="leave it out")
        target = asked.draft_for or manifest.draft_for
        arrays.config = FORMATS_OF_DRAFTS[manifest.family](arrays.config, asked.form, target)
    return arrays, describe_exporting(arrays, asked.scheme, beside, asked.form)


def _check_whole(manifest: Manifest, *, as_released: bool) -> None:
    """Checks that the config.json of an export describes nothing that the checkpoint lacks: programs fill what is
    missing with random numbers.

    Args:
        manifest: of the checkpoint.
        as_released: whether encoded weights are written as they were released.

    Raises:
        UsageError: the checkpoint has only the text model of a multimodal model, or lacks the static scales of
            activations and caches of a release that stayed encoded.
    """
    skipped = manifest.raw["skipped"]
    if lost := [skip for skip in skipped if is_outside(skip["reason"])]:
        what = "contains only the text model, and its config.json describes a multimodal model"
    elif manifest.passthrough and as_released and not manifest.is_rounded:
        lost = [skip for skip in skipped if skip["reason"] == OF_ACTIVATIONS]
        what = "has encoded weights without the scales of activations and caches that its config.json describes"
    if lost:
        origin = manifest.raw["source"]
        count, source = sum(skip["count"] for skip in lost), origin.get("repo") or origin.get("folder")
        shown = repr(source) if source else "SRC"
        raise UsageError(
            f"{manifest.folder} {what}: {format_count(count, 'tensor')} would be missing",
            details=shorten([f"{skip['pattern']}: {skip['reason']}" for skip in lost]),
            hint=f"for a complete model give the source, which has them: `with_skipped={shown}`",
        )


def _trained(ckpt: Location, asked: ExportOptions, stack: ExitStack, progress: Listener) -> ExportContents:
    """The arrays of a trainer's checkpoint, or the adapter in it."""
    model = open_trained(ckpt, str(asked.config), stack, progress, only_finite=not asked.allow_nonfinite)
    if asked.adapter:
        alpha = alpha_of(model.tree, asked.lora_alpha, "adapter")
        return trained_adapter(
            model.tree, model.family, model.config, model.known, asked.target, str(asked.config), alpha
        )
    merged_alpha = alpha_of(model.tree, asked.lora_alpha, "merge") if asked.merge else None
    run = trained_arrays(model, asked.target, merged_alpha)
    return _laid_out(run.arrays, run.exporting, run.facts.arrays, run.facts.skipped)
