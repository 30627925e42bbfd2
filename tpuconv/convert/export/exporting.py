"""Chooses the table and the config for an export, which name the tensors of the release."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.export.array_source import ArraySource, exported_config
from tpuconv.convert.export.carried import Carried
from tpuconv.convert.export.serving.caches import with_cache_scales
from tpuconv.convert.export.serving.formats import IN_COMPRESSED, IN_MXFP4, type_of
from tpuconv.errors import UsageError
from tpuconv.models.common.saved import BY_TRANSFORMERS, saved_release
from tpuconv.models.eagle3.formats import EAGLE3, SGLANG
from tpuconv.models.registry import Family, get_family
from tpuconv.notation.release import AS_TABLED
from tpuconv.notation.segments import undressed
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MappingTable
from tpuconv.options import DRAFT_FORMS
from tpuconv.sources.config import ENCODING_KEYS, without_encoding
from tpuconv.targets.compose import target_table
from tpuconv.targets.registry import get_target


@dataclass(frozen=True)
class Exporting:
    """The facts of an export besides the arrays.

    Attributes:
        table: from released tensors to the arrays, before layers are stacked.
        config: the config of the family, with the letters of the table.
        family: the name of the family.
        beside: further tensors of the source to write.
        scheme: the format of quantized parameters; None to leave them encoded as they were released.
    """

    table: MappingTable
    config: HasSizes
    family: str
    beside: Carried | None = None
    scheme: str | None = None


def describe_exporting(
    arrays: ArraySource, scheme: str | None = None, beside: Carried | None = None, form: str | None = None
) -> Exporting:
    """What is exported of arrays that have a manifest.

    Args:
        arrays: those of a checkpoint or of a plan.
        scheme: in which quantized parameters are written. By default that of their types; parameters that are all
            encoded as they were released stay so.
        beside: tensors of the source that are written too.
        form: whose names tensors have, of `FORM_CHOICES`; by default those of the source, for servers without the
            segments of trainers: these fill in random numbers for names that they do not know.

    Raises:
        UsageError: a scheme is given, and nothing is quantized; or the names of a form are not known.
    """
    manifest = arrays.manifest
    family, raw = get_family(manifest.family), exported_config(arrays)
    if manifest.quantization is None and scheme is not None:
        raise UsageError(
            f"{manifest.folder} has no quantized parameters, which `scheme=` is for",
            hint="leave out `scheme=`, or quantize by `tpuconv quantize` or `tpuconv convert --quantize`",
        )
    if manifest.is_rounded and scheme is None:
        scheme = _scheme_of(manifest, family, raw)
    if scheme is not None:
        raw = _encoded(raw, scheme)
    is_served = scheme is not None or get_target(manifest.target).is_safetensors
    if beside is not None and is_served:
        beside = replace(beside, tensors=tuple(replace(each, name=undressed(each.name)) for each in beside.tensors))
    table, config = _form(manifest, family, raw, manifest.scan_layers, form, is_served=is_served)
    table = with_cache_scales(table, manifest)
    return Exporting(table, config, family.name, beside, scheme)


def target_form(arrays: ArraySource, *, scan_layers: bool) -> tuple[MappingTable, HasSizes]:
    """Returns the table from released tensors to arrays, with stacked layers or without, and its config.

    Args:
        arrays: of a checkpoint or of a plan.
        scan_layers: True for stacked layers.

    Raises:
        UnsupportedConfig: the target has no stacked layers of this model.
    """
    manifest = arrays.manifest
    return _form(manifest, get_family(manifest.family), exported_config(arrays), scan_layers)


def _form(
    manifest: Manifest,
    family: Family,
    raw: Mapping[str, Any],
    scan_layers: bool,
    form: str | None = None,
    *,
    is_served: bool = False,
) -> tuple[MappingTable, HasSizes]:
    model_config = _read(manifest, family, raw)
    if form in DRAFT_FORMS and family.name == EAGLE3:  # the tensors of other drafts have one name in both
        model_config = replace(model_config, is_midlayer=form == SGLANG)
    return target_table(
        get_target(manifest.target),
        *family.in_targets(raw.get("model_type", "")),
        released_table(manifest, family, model_config, form, is_served=is_served),
        model_config,
        scan_layers=scan_layers,
        include_mtp=manifest.include_mtp,
    )


def released_table(
    manifest: Manifest, family: Family, config: Any, form: str | None = None, *, is_served: bool = False
) -> MappingTable:
    """Returns the table of the release that a checkpoint was made from, or that of a form. What `is_served` has no
    segments of trainers."""
    if form is not None:
        release = saved_release(family.name) if form == BY_TRANSFORMERS else AS_TABLED
        return family.table_of(release, config, manifest.returns)
    if manifest.has_variant:
        return family.table_for(manifest.source_names, config, manifest.returns)
    release = manifest.release.undressed() if is_served else manifest.release
    return family.table_of(release, config, manifest.returns)


def _scheme_of(manifest: Manifest, family: Family, raw: Mapping[str, Any]) -> str:
    """Returns the scheme in which servers read the types of a checkpoint: compressed-tensors; MXFP4's own where
    releases of the family have other tensors in it."""
    types = {type_of(facts) for facts in (manifest.quantization or {})["parameters"].values()}
    plain = _read(manifest, family, without_encoding(raw))
    if types == {IN_MXFP4} and _read(manifest, family, _encoded(raw, IN_MXFP4)) != plain:
        return IN_MXFP4
    return IN_COMPRESSED


def _encoded(raw: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    """Returns a parsed config.json that says that weights are encoded in this scheme."""
    return without_encoding(raw) | {ENCODING_KEYS[0]: {"quant_method": scheme}}


def _read(manifest: Manifest, family: Family, raw: Mapping[str, Any]) -> Any:
    return family.read_config(raw, manifest.allow_config, manifest.source_names, manifest.returns, manifest.parts)
