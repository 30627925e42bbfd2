"""Tensors that a conversion skipped, carried into an export: towers, projectors, layers that predict further tokens.

They are read from the source of the checkpoint, which is first proved to be the same, and written byte for byte; of a
plan with adapters as these change them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.export.tensor import ExportTensor
from tpuconv.convert.plan.types import Plan, Skip
from tpuconv.encodings.adapted import BY_ADAPTER, Adapted
from tpuconv.encodings.tensors import decode_names, unused_reason
from tpuconv.errors import SourceError, UsageError, shorten
from tpuconv.location import BucketPath
from tpuconv.models.common.rows import FURTHER_TOKENS
from tpuconv.models.common.wrapper import is_outside
from tpuconv.names import collapse, expand
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MappingTable
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.origins import known_stamps
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import changed_shards
from tpuconv.sources.source import Source

CHANGED_AT_ONCE = 1 << 22
"""Values of a tensor that an adapter changes in one go, which takes twelve times as many bytes."""


@dataclass(frozen=True)
class Carried:
    """Tensors of a source that go into an export as they are, or as adapters have `changed` them. `skipped` are others
    that do not."""

    source: Source
    tensors: tuple[ExportTensor, ...]
    skipped: tuple[Skip, ...] = ()
    changed: Mapping[str, Adapted] = field(default_factory=dict)

    def read(self, names: Collection[str], opened: Reader | None) -> Iterator[tuple[ExportTensor, np.ndarray]]:
        """Yields each tensor that has one of the names, with its bytes, from a reader of the source if one is open.

        Raises:
            SourceError: they cannot be read, or the source changed.
        """
        tensors = [tensor for tensor in self.tensors if tensor.name in names]
        with nullcontext(opened) if opened else closing(self.source.open(hashes=())) as reader:
            for tensor in tensors:
                values = np.empty(tensor.nbytes // DTYPES[tensor.dtype].itemsize, DTYPES[tensor.dtype])
                if (adapted := self.changed.get(tensor.of)) is not None:
                    for start in range(0, values.size, CHANGED_AT_ONCE):
                        adapted.read(reader, start, np.empty(0, np.uint8), values[start : start + CHANGED_AT_ONCE])
                else:
                    reader.read(self.source.tensors[tensor.of], 0, values.view(np.uint8).data)
                yield tensor, values.reshape(tensor.shape)
            reader.check_unchanged({self.source.tensors[tensor.of].shard for tensor in tensors})

    @property
    def modules(self) -> list[str]:
        """The modules among them that have a matrix."""
        return [
            t.name.removesuffix(".weight") for t in self.tensors if len(t.shape) == 2 and t.name.endswith(".weight")
        ]


def carried(manifest: Manifest, source: Source, table: MappingTable, config: HasSizes) -> Carried:
    """Returns the tensors that the conversion of a checkpoint skipped.

    A copy of another tensor is carried too, unless the export may hold other values of that.

    Args:
        manifest: of the checkpoint.
        source: a checkpoint that should be its source.
        table: of the family, with the names of the source.
        config: the family's reading of the source's config.json.

    Raises:
        UsageError: the conversion skipped nothing; or the skipped tensors are encoded, and the export is not.
        SourceError: it is not the source of the checkpoint, or this cannot be proved.
    """
    if any(BY_ADAPTER in skip["reason"] for skip in manifest.raw["skipped"]):
        raise UsageError(
            f"a merged adapter changes tensors that the conversion of {source.name} skipped",
            hint="merge the adapter with peft first, and convert that",
        )
    _check_same(manifest, source)
    mtp = manifest.include_mtp
    tensors, _ = decode_names(source.tensors, source.encoding, any_scales=True)
    expected = {name for binding in table.bind(config, mtp) for name in binding.src_shapes()}
    copies, why_ignored = table.copies_of(config, mtp), table.ignored(config, mtp)
    is_encoded, has_copies = bool(manifest.passthrough) and not manifest.is_rounded, _has_values_of_source(manifest)
    infos: list[TensorInfo] = []
    encoded = []
    for name, tensor in tensors.items():
        if name in expected or (name in copies and not has_copies):
            continue
        if not is_encoded and not why_ignored(name) and unused_reason(name):
            continue  # of an encoding that the export does not have
        if tensor.scheme and not is_encoded:
            encoded.append(name)
            continue
        infos += tensor.stored
    # A multimodal model is complete without the layers that predict further tokens.
    is_multimodal = any(is_outside(why_ignored(info.name) or "") for info in infos)
    if encoded and not (is_multimodal and all(why_ignored(name) == FURTHER_TOKENS for name in encoded)):
        raise UsageError(
            f"the tensors that the conversion of {source.name} skipped are encoded, and the export is not",
            details=shorten(list(collapse(encoded))),
            hint='convert with `encoding="keep"`, and export that',
        )
    if not infos:
        raise UsageError(f"the conversion of {source.name} skipped nothing", hint="leave `with_skipped=` out")
    skipped = [Skip(pattern, len(names), f"{FURTHER_TOKENS}; encoded") for pattern, names in collapse(encoded).items()]
    return replace(_as_they_are(source, infos), skipped=tuple(skipped))


def skipped_tensors(plan: Plan) -> Carried | None:
    """Returns the unencoded tensors that a plan leaves out of its source, as adapters change them; if the output stays
    encoded as released, the encoded ones too. None if it leaves out nothing."""
    is_encoded = bool(plan.passthrough) and plan.quantization is None
    mapped = {name for array in plan.arrays.values() for name in array.sources}
    infos = [
        info
        for name, tensor in plan.tensors.items()
        if mapped.isdisjoint((name, *(info.name for info in tensor.stored)))  # encoded ones are mapped as stored
        and name not in plan.copies
        and (is_encoded or (tensor.scheme is None and not unused_reason(name)))
        for info in tensor.stored
    ]
    changed = {tensor.values.name: tensor for tensor in plan.tensors.values() if isinstance(tensor, Adapted)}
    return replace(_as_they_are(plan.source, infos), changed=changed) if infos else None


def split_skipped(plan: Plan) -> tuple[tuple[Skip, ...], int]:
    """Returns the tensors that a plan leaves out of its output, and the number of tensors that it copies unchanged."""
    if not plan.target.is_safetensors or plan.faults or (beside := skipped_tensors(plan)) is None:
        return plan.skipped, 0
    names = {tensor.name for tensor in beside.tensors}
    return tuple(skip for skip in plan.skipped if names.isdisjoint(expand(skip.pattern))), len(names)


def _as_they_are(source: Source, infos: Sequence[TensorInfo]) -> Carried:
    return Carried(source, tuple(ExportTensor(i.name, i.dtype, i.shape, i.name, np.asarray) for i in infos))


def _has_values_of_source(manifest: Manifest) -> bool:
    """Returns True if the export has the unchanged values of the source."""
    options: Mapping[str, Any] = manifest.raw["options"]
    changed = manifest.raw["source"].get("changed") or manifest.is_rounded or options.get("adapters")
    return not changed and options["dtype"] == "auto"


def _check_same(manifest: Manifest, source: Source) -> None:
    """Raises SourceError unless every shard is unchanged since the conversion, by its stamp or its sha256."""
    if isinstance(source.folder, BucketPath):
        raise UsageError(
            f"`with_skipped=` does not read {source.folder}", hint="give a local copy of it, or its Hub id"
        )
    changed = changed_shards(
        source.folder, manifest.raw["source"]["shards"], known_stamps(manifest.sealed, source.folder)
    )
    if changed:
        raise SourceError(
            f"{source.folder} is not the source of {manifest.folder}: other weights",
            details=shorten(changed),
            hint="give the source at the commit that was converted, which the manifest names",
        )
    if changed is None:
        raise SourceError(
            f"{source.folder} may not be the source of {manifest.folder}: its files were replaced, and not all of them "
            "were hashed when it was converted",
            hint="convert it again, without `layers=`",
        )
