"""A model that is loaded: a checkpoint of ours or of a trainer, or a release."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tpuconv.api.quantizers import find_rules, quantizer_by
from tpuconv.convert.plan.options import Options
from tpuconv.errors import PushedCheckpoint, UsageError
from tpuconv.location import BucketPath, Location, plain_path, to_location
from tpuconv.memory import check_address_space_for_jax
from tpuconv.names import MANIFEST, OWN_TARGET
from tpuconv.progress import ignore

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.checkpoint.reader import ReadArray
    from tpuconv.convert.export.array_source import ArraySource
    from tpuconv.convert.export.exporting import Exporting
    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.convert.plan.types import Plan


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights are not read yet.

    Attributes:
        manifest: of the model under our names.
        plan: how a release, or a checkpoint for another program, is read; None for a checkpoint of ours.
        stored: the manifest of a checkpoint; None for a release, and for a trainer's.
        run: the facts of a trainer's checkpoint; None for others.
    """

    manifest: "Manifest"
    plan: "Plan | None" = None
    stored: "Manifest | None" = None
    run: "TrainedRun | None" = None

    @property
    def folder(self) -> Location:
        """The folder of the checkpoint or of the release. The manifest of a trainer's names the model's folder."""
        return self.manifest.folder if self.run is None else self.run.folder

    @property
    def runs(self) -> "tuple[TrainedRun, ...]":
        """The facts of a trainer's checkpoint; empty for others."""
        return () if self.run is None else (self.run,)

    @property
    def is_decoded(self) -> bool:
        """True if stored numbers of fewer bits were decoded."""
        return self.plan is not None and any(tensor.scheme is not None for tensor in self.plan.tensors.values())

    def load(self, dtype: Any = None, mesh: Any = None, *, mtp: bool = False) -> Any:
        """Returns the model with its weights. See `tpuconv.api.load`."""
        from tpuconv import restore

        if self.plan is None:
            with plain_path(self.manifest.folder) as folder:
                return restore.load(folder, dtype, mesh, mtp=mtp)
        from tpuconv.convert.run.sizing import Limits
        from tpuconv.direct import ReleaseArrays

        reader = ReleaseArrays(self.plan, Limits.of_this_machine())
        return restore.load_from(self.manifest, reader, dtype, mesh, mtp=mtp)

    def reading(self) -> "AbstractContextManager[ReadArray | None]":
        """Returns a context with a function that makes the arrays of a release one at a time; with None for a
        checkpoint of ours."""
        from tpuconv.convert.run.made_arrays import reading

        return reading(self.plan)

    def load_on_all_devices(self, dtype: Any = None, *, mtp: bool = False, beside: "OpenedModel | None" = None) -> Any:
        """Returns the model, sharded over all devices (with `jax.distributed`, of all processes); with `mtp` and its
        module for multi-token prediction. Its mesh is the mesh of the model `beside` it, if there is one."""
        check_address_space_for_jax(int(self.manifest.raw["bytes"]))
        from tpuconv.restore import default_mesh_of

        return self.load(dtype, default_mesh_of((beside or self).manifest), mtp=mtp)


def runs_to_json(runs: "Sequence[TrainedRun]") -> dict[str, Any]:
    """Returns the key of results about trainers' checkpoints; nothing if there are none."""
    return {"runs": [run.to_json() for run in runs]} if runs else {}


Speculation = bool | str | Location
"""How tokens are drafted: True by the module for multi-token prediction, or by this draft."""


@contextmanager
def opened_draft(speculate: Speculation) -> "Iterator[OpenedModel | None]":
    """Yields the draft of a target, whose weights are not read yet; None if tokens are drafted without one.

    Raises:
        UsageError: it is no draft.
        TpuconvError: see `opened_model`.
    """
    if isinstance(speculate, bool):
        yield None
        return
    from tpuconv.models.common.heads import AS_DRAFT

    with opened_model(speculate, Options()) as opened:
        if opened.manifest.returns != AS_DRAFT:
            raise UsageError(
                f"{speculate} is no draft of another model", hint="docs/drafts.md lists the drafts that are supported"
            )
        yield opened


def check_draft(opened: OpenedModel, draft: "OpenedModel | None", speculate: Speculation) -> None:
    """Checks that tokens of a model can be drafted as it is asked for. No weights are read.

    Raises:
        UsageError: the model has no module for multi-token prediction, or the draft is for another model.
        UnsupportedConfig: drafts are not implemented for this model.
    """
    from tpuconv.checkpoint.reader import check_mtp

    if speculate is True:
        check_mtp(opened.manifest)
    if draft is not None:
        from tpuconv.models.common.pairing import check_pair
        from tpuconv.models.stored import model_config

        target = opened.manifest
        check_pair(model_config(target), model_config(draft.manifest), stacked=target.scan_layers)


@contextmanager
def opened_model(
    src: str | Location, options: Options, *, config: str | Location | None = None, weights: bool = True
) -> Iterator[OpenedModel]:
    """Yields the model of a checkpoint, for any program, or of a release, which is planned with the options. Either may
    be on the Hub; a checkpoint there, and with `weights` a release, is downloaded to the Hub's cache. With `config`,
    the model that was trained, `src` is a trainer's checkpoint.

    Raises:
        UsageError: there is neither, or options are given for a checkpoint; a trainer's has no `config`, or another one
            has.
        TpuconvError: see `tpuconv.api.plan`.
    """
    if config is not None:
        from tpuconv.convert.export.trained import opened_run

        with opened_run(to_location(src), str(config), ignore) as run:
            _check_plain(src, "a trainer's checkpoint", options)
            yield replace(_placed(run.arrays, run.exporting, options), run=run.facts)
        return
    if (manifest := checkpoint_at(src)) is not None:
        yield _opened(src, manifest, options)
        return
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.convert.plan.planning import planned_loading
    from tpuconv.convert.run.describe import planned_manifest
    from tpuconv.sources.hub import fetch_checkpoint

    rules = find_rules(options.quantize, options.encoding)
    with ExitStack() as stack:
        try:
            quantizer = quantizer_by(rules) if rules else None
            plan = stack.enter_context(planned_loading(str(src), options, quantizer, weights=weights))
        except PushedCheckpoint:
            plan = None
        except UsageError:
            from tpuconv.convert.export.trained import check_converted

            check_converted(to_location(src))
            raise
        if plan is None:
            yield _opened(src, read_manifest(fetch_checkpoint(str(src))), options)
        else:
            yield OpenedModel(planned_manifest(plan), plan)


def _opened(src: str | Location, manifest: "Manifest", options: Options) -> OpenedModel:
    """Returns the model of a checkpoint.

    Raises:
        UsageError: options are given.
    """
    _check_plain(src, "a checkpoint of tpuconv", options)
    if manifest.target == OWN_TARGET:
        return OpenedModel(manifest, stored=manifest)
    from tpuconv.convert.export.array_source import CheckpointArrays
    from tpuconv.convert.export.exporting import describe_exporting

    arrays = CheckpointArrays(manifest)
    return replace(_placed(arrays, describe_exporting(arrays), options), stored=manifest)


def _check_plain(src: str | Location, what: str, options: Options) -> None:
    """Raises UsageError if options are given that are for releases."""
    plain = Options(include_mtp=options.include_mtp)
    given = [each.name for each in fields(Options) if getattr(options, each.name) != getattr(plain, each.name)]
    if given:
        raise UsageError(
            f"{src} is {what}, which has the form that it was written in",
            hint=f"leave out {', '.join(f'`{name}=`' for name in given)}, or give the release",
        )


def _placed(arrays: "ArraySource", what: "Exporting", options: Options) -> OpenedModel:
    """Returns the model of a checkpoint with other names, whose arrays are read by way of the released tensors."""
    from tpuconv.convert.export.exported_source import exported_source
    from tpuconv.convert.plan.planning import plan_of_source
    from tpuconv.convert.run.describe import planned_manifest

    allowed = replace(options, allow_config=arrays.manifest.allow_config)
    plan = plan_of_source(exported_source(arrays, what), allowed)
    return OpenedModel(planned_manifest(plan), plan)


def checkpoint_at(src: str | Location) -> "Manifest | None":
    """Returns the manifest of a checkpoint of ours; None of anything else, which may be a release: the plan of its
    conversion says what is wrong with it.

    Raises:
        UsageError: `src` is a folder within a checkpoint, or see `source_location`.
        CorruptOutput: see `read_manifest`.
    """
    from tpuconv.checkpoint.manifest import manifest_of, read_manifest
    from tpuconv.sources.files import CONFIG_FILE
    from tpuconv.sources.hub import source_location
    from tpuconv.storage.places import is_there
    from tpuconv.storage.sealed import SAFETENSORS, read_sealed

    place = source_location(src) if isinstance(src, str) else to_location(src)
    if is_there(place / MANIFEST):
        sealed = read_sealed(place)
        return None if sealed.raw.get("kind") == SAFETENSORS else manifest_of(place, sealed)
    is_folder = isinstance(place, BucketPath) or place.is_dir()  # else a Hub id, or nothing
    is_inside = is_folder and not is_there(place / CONFIG_FILE) and is_there(place.parent / MANIFEST)
    return read_manifest(place) if is_inside else None
