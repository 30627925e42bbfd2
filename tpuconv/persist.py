"""Saves a Flax NNX model as a checkpoint."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from tpuconv.checkpoint.orbax_tree import TreeArray
from tpuconv.checkpoint.reader import Checkpoint, CheckpointReader, open_checkpoint
from tpuconv.convert.export.contents import ExportContents
from tpuconv.convert.export.lora.work import trained_adapter
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.options import Options
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.engine import RunProgress, make
from tpuconv.convert.run.sizing import Limits
from tpuconv.encodings.casts import refuse_nonfinite
from tpuconv.errors import UsageError, shorten
from tpuconv.location import Location
from tpuconv.models.registry import get_family
from tpuconv.models.stored import stored_table
from tpuconv.names import OWN_TARGET
from tpuconv.sources.config import without_encoding
from tpuconv.sources.headers import CODES, TensorInfo
from tpuconv.sources.origins import find_folder
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import CHANGED
from tpuconv.storage.hashes import hash_bytes
from tpuconv.text import format_count

NOT_FINITE_HINT = "the training diverged: save an earlier state of the model, with `overwrite=True` to begin anew"
"""The hint where values of a model are NaN or infinite."""
PART_BYTES = 64 << 20
"""The bytes that are copied from the device at a time for hashing."""


def save(
    model: nnx.Module,
    out: Location,
    like: Location,
    limits: Limits,
    *,
    lora_alpha: float | None = None,
    overwrite: bool = False,
) -> Iterator[RunProgress]:
    """Writes the parameters of a model as a checkpoint, or its LoRA as an adapter, and yields progress. See
    `tpuconv.api.save`.

    Raises:
        UsageError: the model does not match the checkpoint `like`, or one of them is quantized; or the alpha of LoRA is
            not given.
        OutputError: `out` exists, is locked or belongs to another plan.
        ResourceError: there is too little disk space or memory.
    """
    if pairs := _arrays(model, nnx.LoRAParam):
        yield from make(_adapter(pairs, open_checkpoint(like), lora_alpha).work(limits), out, overwrite=overwrite)
        return
    if lora_alpha is not None:
        raise UsageError("`lora_alpha=` is for a model with LoRA", hint="leave it out")
    source = _source(model, open_checkpoint(like))
    manifest = source.manifest
    options, family = Options.of_checkpoint(manifest), get_family(manifest.family)
    config = family.read_config(source.config, options.allow_config, source.tensors, manifest.returns, manifest.parts)
    plan = make_plan(source, family.name, stored_table(source), config, options)
    yield from run(plan, out, limits, overwrite=overwrite)


@dataclass(frozen=True)
class _Model(Checkpoint):
    """The checkpoint that a model was loaded from, with the model's arrays instead of its own."""

    arrays: Mapping[str, jax.Array] = field(kw_only=True)

    not_finite_hint = NOT_FINITE_HINT

    def origin(self, hashes: Mapping[str, str | None]) -> dict[str, Any]:
        return {**super().origin(hashes), "verified": CHANGED, "changed": True}

    def open(
        self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: Collection[str] | None = None
    ) -> CheckpointReader:
        return _Reader(self, super().open(check_cancelled, hashes=hashes))

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        return [] if info.name in self.arrays else super().files(info)


class _Reader(CheckpointReader):
    """Reads the model's arrays; those that the model does not have are read from the checkpoint."""

    def __init__(self, model: _Model, stored: CheckpointReader):
        super().__init__(model.manifest)
        self._arrays, self._stored = model.arrays, stored

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        if info.name in self._arrays:
            out[...] = np.asarray(self._arrays[info.name][tuple(box)]).view(out.dtype)
        else:
            self._stored.read_box(info, box, out)


def _source(model: nnx.Module, like: Checkpoint) -> _Model:
    arrays = _arrays(model, nnx.Param) | _tables(model, like)
    _check(arrays, like)
    tensors, shards = dict(like.tensors), []
    for shard in like.shards:
        if (array := arrays.get(shard.name)) is not None:
            code = CODES[array.dtype.name]
            size = prod(array.shape) * array.dtype.itemsize
            tensors[shard.name] = TensorInfo(shard.name, code, tuple(array.shape), shard.name, 0, size)
            shards.append(SourceShard(shard.name, size, digest=_digest(array)))
        else:
            shards.append(shard)
    return _Model(
        like.folder,
        like.config,
        tensors,
        tuple(shards),
        companions=like.companions,
        manifest=like.manifest,
        arrays=arrays,
    )


def _tables(model: nnx.Module, like: Checkpoint) -> dict[str, np.ndarray]:
    """Returns the tables of numbers, in the dtypes of the checkpoint. They are no parameters, since they have no
    gradient."""
    found, stored = _arrays(model, lambda _, leaf: type(leaf) is nnx.Variable), like.manifest.arrays
    return {name: np.asarray(x).astype(stored[name].dtype) for name, x in found.items() if name in stored}


def _arrays(model: nnx.Module, kind: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, kind))}


def _adapter(pairs: Mapping[str, jax.Array], like: Checkpoint, alpha: float | None) -> ExportContents:
    """The adapter of a model's pairs."""
    if alpha is None:
        raise UsageError(
            "the model has LoRA, whose alpha is not in it: changes are scaled by alpha / rank",
            hint="give `lora_alpha=`, such as 32 of Qwix's `LoraProvider(rank=16, alpha=32.0)`",
        )
    manifest, raw = like.manifest, without_encoding(like.config)
    family = get_family(manifest.family)
    config = family.read_config(raw, manifest.allow_config, like.tensors, manifest.returns, manifest.parts)
    known = [(stored_table(like), config)]
    release = manifest.raw["source"].get("repo") or find_folder(manifest.sealed, manifest.folder)
    base = str(release or manifest.folder)
    return trained_adapter(_Pairs(manifest.folder, pairs), family, raw, known, OWN_TARGET, base, alpha)


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a model as a tree; see `tpuconv.convert.export.lora.tree.Tree`."""

    folder: Location
    arrays: Mapping[str, jax.Array]
    stamps: dict[str, str] = field(default_factory=dict)
    stamps_for_hosts: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> Collection[str]:
        return self.arrays.keys()

    @property
    def identity(self) -> str:
        return str(
            hash_bytes(repr([(name, _digest(array)) for name, array in self.arrays.items()]).encode())["xxh3_128"]
        )

    def open(self, names: Collection[str]) -> Mapping[str, TreeArray]:
        found = {name: self.arrays[name] for name in names}
        shapes = {name: tuple(array.shape) for name, array in found.items()}
        return {name: TreeArray(name, shapes[name], array.dtype.name, shapes[name]) for name, array in found.items()}

    def read(self, name: str, box: Sequence[slice]) -> np.ndarray:
        values = np.asarray(self.arrays[name][tuple(box)])
        refuse_nonfinite(name, values, box, NOT_FINITE_HINT)
        return values

    def check_unchanged(self) -> None:
        """Nothing: arrays of jax do not change."""


def _digest(array: jax.Array) -> str:
    """Returns a hash of the content: a rerun resumes only if the weights are the same. Rows come from the device a part
    at a time, since jax keeps a copy of what it transferred."""
    hasher, rows = xxhash.xxh3_64(), np.atleast_1d(array) if array.ndim == 0 else array
    step = max(1, PART_BYTES // max(1, prod(array.shape[1:]) * array.dtype.itemsize))
    for start in range(0, rows.shape[0], step):
        hasher.update(np.ascontiguousarray(rows[start : start + step]).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _check(arrays: Mapping[str, Any], like: Checkpoint) -> None:
    stored = like.manifest.arrays
    faults = [
        f"{name}: {list(array.shape)} {array.dtype.name} in the model, {list(stored[name].shape)} in the checkpoint"
        if name in stored
        else f"{name}: not in the checkpoint"
        for name, array in arrays.items()
        if name not in stored or tuple(array.shape) != stored[name].shape or array.dtype.name not in CODES
    ]
    faults += [f"{name}: not in the model" for name in stored if name not in arrays and not name.startswith("mtp.")]
    if faults:
        raise UsageError(
            f"the model does not match {like.folder} in {format_count(len(faults), 'parameter')}",
            details=shorten(faults, 10),
            hint="`like` must be the checkpoint that the model was loaded from; quantized models cannot be saved",
        )
