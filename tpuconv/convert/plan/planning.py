"""A conversion begins here. Its source becomes a plan: the source is opened, its family and the target give the table,
and `make_plan` proves that tensors and table fit. For a quantization the rules choose encoders from this plan, and
`with_quantization` divides its arrays by them.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.plan.arrays import with_quantization
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.draft_target import checked_target
from tpuconv.convert.plan.kept_adapter import plan_kept_adapter
from tpuconv.convert.plan.options import Fetching, Options
from tpuconv.convert.plan.quantization import Quantization
from tpuconv.convert.plan.types import Plan
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import UsageError
from tpuconv.location import BucketPath, Location, local_path, to_location
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.registry import Family, find_family, get_family
from tpuconv.models.stored import stored_table
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MappingTable
from tpuconv.progress import Listener, Progress
from tpuconv.sources.hub import resolve
from tpuconv.sources.repository import Resolved
from tpuconv.sources.source import Source, fetched_meanwhile, open_source
from tpuconv.targets.compose import same_parameters, target_table
from tpuconv.targets.registry import get_target
from tpuconv.targets.target import OWN, Target
from tpuconv.targets.trees import check_quantized, differences, find_tree, placed_parts


class Quantizer(Protocol):
    """Returns the quantization of the parameters of an unquantized plan, by rules; see `tpuconv.quantize.apply`."""

    def __call__(
        self, plain: Plan, family: Family, config: DecoderConfig, *, for_servers: bool = False
    ) -> Quantization: ...


@contextmanager
def planned_conversion(
    src: str,
    options: Options,
    fetching: Fetching,
    quantizer: Quantizer | None,
    *,
    ahead: Callable[[Plan], None] | None,
    progress: Listener,
) -> Iterator[Plan]:
    """Yields the plan of a conversion; the source is held while it is used.

    Args:
        src: a Hub id, or the place of a folder.
        options: what to convert, and how.
        fetching: how a source on the Hub or in a bucket is read.
        quantizer: chooses how parameters are quantized; None leaves them as they are.
        ahead: begins to read what the plan needs first, while it is completed; None for a plan that does not run, which
            needs no weights.
        progress: called while a source is downloaded.

    Raises:
        TpuconvError: see `tpuconv.api.plan`.
    """
    if fetching.keep_source and (isinstance(place := to_location(src), BucketPath) or place.is_dir()):
        raise UsageError(f"`keep_source=True` needs a Hub id, and {src} is a folder", hint="leave it out")
    runs, streams, workspace = ahead is not None, not fetching.keep_source, workspace_folder(fetching.workspace)
    options = options.with_adapters()
    with resolve(
        src,
        revision=options.revision,
        weights=runs and not streams and not options.keep_adapter,
        streams=runs and streams and not options.keep_adapter,
        progress=lambda n, of: progress(Progress("downloading", n, of)),
    ) as resolved:
        source = _opened(resolved)
        if options.keep_adapter:
            yield plan_kept_adapter(source, find_family(source.config), options)
            return
        if streams:
            source = fetched_meanwhile(source, resolved.remote, workspace)
        yield _plan_release(source, options, quantizer, ahead)


@contextmanager
def planned_loading(src: str, options: Options, quantizer: Quantizer | None, *, weights: bool = True) -> Iterator[Plan]:
    """Yields the plan of a release whose model is loaded without a checkpoint. Its weights are read where they are, in
    a folder or in a bucket; from the Hub they are downloaded to its cache when the plan is known to have no faults, and
    not without `weights`. Other arguments are as of `planned_conversion`.

    Raises:
        UsageError: the quantization has a calibration.
        TpuconvError: see `tpuconv.api.plan`.
    """
    options = options.with_adapters()
    revision = options.revision
    for whole in (False, True):
        with resolve(src, revision=revision, weights=whole) as resolved:
            plan = _plan_release(_opened(resolved), options, quantizer, None)
            plan.check()
            if plan.quantization and plan.quantization.calibration:
                raise UsageError(
                    f"{plan.quantization.config['name']} has a calibration, which runs the model before it is "
                    "quantized",
                    hint="`tpuconv quantize` the release, and load that",
                )
            if whole or not weights or not resolved.headers_only:
                yield plan
                return
            revision = resolved.commit


def plan_of_source(source: Source, options: Options) -> Plan:
    """Returns the plan for a source that is open, under our own names.

    Raises:
        TpuconvError: see `tpuconv.api.plan`.
    """
    plan = _plan_release(source, options, None, None)
    plan.check()
    return plan


def quantized_plan(plan: Plan, quantizer: Quantizer, *, compress: bool) -> Plan:
    """Returns a plan under our own names with parameters that are quantized.

    Raises:
        TpuconvError: see `tpuconv.api.plan_quantization`.
    """
    plan = replace(plan, options=replace(plan.options, compress=compress))
    assert isinstance(plan.config, DecoderConfig)
    return with_quantization(plan, quantizer(plan, get_family(plan.family), plan.config))


def _opened(resolved: Resolved) -> Source:
    return open_source(
        resolved.folder,
        repo=resolved.repo,
        commit=resolved.commit,
        sha256=resolved.sha256,
        unproved=resolved.unproved,
        listed=resolved.listed,
    )


def _plan_release(
    source: Source, options: Options, quantizer: Quantizer | None, ahead: Callable[[Plan], None] | None
) -> Plan:
    family = find_family(source.config)
    if options.draft_for is not None:
        options = replace(options, draft_for=checked_target(options.draft_for, source, options.allow_config))
    parts = () if options.text_only else family.parts_among(source.tensors)
    return plan_source(source, family, None, options, quantizer, ahead, parts)


def planned_quantization(
    ckpt: Location, quantizer: Quantizer, *, compress: bool, ahead: Callable[[Plan], None] | None
) -> Plan:
    """Returns the plan to quantize a checkpoint, in the form that it has."""
    source = open_checkpoint(ckpt)
    options = Options.of_checkpoint(source.manifest, compress=compress)
    family = get_family(source.manifest.family)
    return plan_source(source, family, stored_table(source), options, quantizer, ahead, source.manifest.parts)


def workspace_folder(workspace: str | Path | None) -> Path | None:
    """Returns the folder of a workspace, if there is one.

    Raises:
        UsageError: it is not on a local disk.
    """
    return None if workspace is None else local_path(workspace, "the workspace is on a local disk")


def plan_source(
    source: Source,
    family: Family,
    table: MappingTable | None,
    options: Options,
    quantizer: Quantizer | None,
    ahead: Callable[[Plan], None] | None,
    parts: Collection[str],
) -> Plan:
    """Returns the plan for a table, the table of a checkpoint. If it is None, for the table of the family and the
    target. `parts` are converted with the text model of a multimodal one, if the target has them."""
    target = get_target(options.target)
    _check_target(target, options, is_quantized=quantizer is not None)
    returns = family.returns(source.config, source.tensors) if table is None else table.returns
    name, model_type = family.in_targets(source.config.get("model_type", ""))
    if table is None:
        read = partial(family.read_config, source.config, options.allow_config, source.tensors, returns)
        parts = placed_parts(target, name, model_type, parts, read)
    report = family.check_config(source.config, options.allow_config, source.tensors, returns, parts)
    model_config = report.config
    released = family.table_for(source.tensors, model_config, returns)

    def table_for(target: Target) -> tuple[MappingTable, HasSizes]:
        scan, mtp = options.scan_layers, options.include_mtp
        return target_table(target, name, model_type, released, model_config, scan_layers=scan, include_mtp=mtp)

    config: HasSizes = model_config
    if table is None:
        table, config = table_for(target)
    decoded = decode_names(source.tensors, source.encoding, any_scales=options.allow_nonfinite)
    plan = replace(
        make_plan(source, family.name, table, config, options, report.ignored, decoded),
        differs=differences(target, name, model_type, model_config),
    )
    if quantizer is None or plan.faults:
        return plan
    if ahead is not None:  # begins before jax and Qwix are imported: these come in small pieces from the same disk
        ahead(plan)
    if target is OWN:
        return with_quantization(plan, quantizer(plan, family, model_config))
    # rules are for our names
    our_table, _ = table_for(OWN)
    ours = replace(options, target=OWN.name)
    our_plan = make_plan(source, family.name, our_table, model_config, ours, decoded=decoded)
    quantization = quantizer(our_plan, family, model_config, for_servers=target.is_safetensors)
    if target.trees is not None:
        tree = find_tree(target, name, model_type, model_config)
        check_quantized(target, tree, our_plan.arrays, (*quantization.encoders, *quantization.passthrough))
    names = same_parameters(our_table, model_config, table, config, options.include_mtp)
    return with_quantization(plan, quantization.renamed(names, target.name))


def _check_target(target: Target, options: Options, *, is_quantized: bool) -> None:
    """Raises UsageError for options that a target does not have."""
    if target.is_safetensors and (options.scan_layers or options.layers):
        raise UsageError(
            f"the target {target.name} always has all layers, unstacked",
            hint="leave out `scan_layers=` and `layers=`",
        )
    if options.pathways and options.compress:
        raise UsageError("checkpoints for Pathways are not compressed", hint="leave out `compress=`")
    if options.scheme is not None and not target.is_safetensors:
        raise UsageError(
            f"the target {target.name} does not write formats of servers",
            hint='leave out `scheme=`, or use `target="huggingface"`',
        )
    if is_quantized and target.quantized is None:
        raise UsageError(f"the target {target.name} has no quantized parameters", hint="leave out `quantize=`")
    if is_quantized and target.fp8_block:
        raise UsageError(
            f"the target {target.name} has no parameters that are quantized by rules",
            hint='leave out `quantize=`, or keep the FP8 weights of a release with `encoding="keep"`',
        )
