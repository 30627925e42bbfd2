"""The arrays of any Orbax checkpoint on a local disk or in a bucket, as a trainer saved it: with OCDBT or a folder for
each array, in zarr's format 2 or 3. Names come from Orbax's `_METADATA`; shapes, dtypes and values from TensorStore,
which makes its own requests to buckets.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv import buckets
from tpuconv.credentials import CREDENTIAL_HINTS, endpoint, region
from tpuconv.encodings.casts import refuse_nonfinite
from tpuconv.errors import BucketError, SourceError, UsageError, root_cause
from tpuconv.jsonfile import MAX_BYTES, Each, Optional, check, opened, parse, read_bytes, short
from tpuconv.location import SCHEMES, BucketPath, Location, near_folders
from tpuconv.notation.layout import Shape
from tpuconv.sources.shard import object_samples, samples
from tpuconv.storage.hashes import hash_bytes, stamp
from tpuconv.storage.places import files_below, is_file, names_in

METADATA = "_METADATA"
"""Orbax's file with the tree of an item."""
MAX_METADATA_BYTES = 256 << 20
"""It has 300 bytes for each array."""
METADATA_SCHEMA = {
    "tree_metadata": Each({"key_metadata": [{"key": (str, int)}], "value_metadata": {"value_type": str}}),
    "use_ocdbt": Optional((bool, None)),
    "use_zarr3": Optional((bool, None)),
    "store_array_data_equal_to_fill_value": Optional((bool, None)),
}
DIVERGED = (
    "the training diverged: take an earlier step, or give `allow_nonfinite=True` to write it as it is, each with "
    "`overwrite=True` to begin anew"
)
"""The hint where values of a trainer are NaN or infinite."""
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
"""Orbax's file with the metadata of a checkpoint, or of a step of a `CheckpointManager`, whose items are folders."""
ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")
"""Types of values that are stored as arrays. Others are empty places of the tree, texts and keys of random numbers."""

ITEMS = ("default", "items", "state", "model_params", "params", "pytree", "model")
"""Names that trainers and Orbax give to the item with the parameters, in a step of a `CheckpointManager`."""
RUN_FOLDER = "checkpoints"
"""The folder with the steps of a run of MaxText."""
_STEP = re.compile(r"(?:[\w-]*_)?(\d+)")

UNFINISHED = "wait until the trainer has saved it, then run again"

STORE_ERRORS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""The beginnings of TensorStore's errors that come from a bucket, not from the checkpoint."""

TENSORSTORE_MEMORY = 300 << 20
"""The memory that TensorStore and its threads add to a process."""

CACHE_BYTES = 256 << 20
"""The cache of decoded chunks; larger if two chunks of an array need more."""


def locate_tree(folder: Location) -> Location:
    """Returns the folder with the tree of parameters in a trainer's checkpoint: the folder itself, an item in it, or an
    item of the latest step.

    Raises:
        UsageError: there is none, or TensorStore does not read it where it is.
        SourceError: the folder cannot be read.
    """
    _key_value_store(folder)
    if isinstance(folder, Path) and not folder.exists():
        raise UsageError(
            f"{folder} does not exist", hint=near_folders(folder) or "give the folder of a checkpoint, or of a run"
        )
    if (tree := _tree_at(folder)) is not None:
        return tree
    for parent in (folder, folder / RUN_FOLDER):
        steps = {int(found[1]): name for name in _folders(parent) if (found := _STEP.fullmatch(name))}
        if steps:
            step = parent / steps[max(steps)]
            if (tree := _tree_at(step)) is not None:
                return tree
            raise UsageError(
                f"{step}, the latest step, has no item with parameters: none of {', '.join(ITEMS)} has a {METADATA}",
                hint=_other_items(step) or "give the folder of the item, or of another step",
            )
    raise UsageError(
        f"{folder} holds no Orbax checkpoint: no {METADATA}, no item ({', '.join(ITEMS)}) and no step with one",
        hint=_other_items(folder) or "give the folder of a checkpoint, of a step, or of a run with steps",
    )


def _other_items(step: Location) -> str | None:
    """Returns a hint that names the items of a step that have other names; None if there are none."""
    items = [name for name in _folders(step) if is_file(step / name / METADATA)]
    return f"give the item with the parameters: {' or '.join(str(step / name) for name in items)}" if items else None


def holds_tree(folder: Location) -> bool:
    """Returns True if `locate_tree` finds a tree."""
    try:
        locate_tree(folder)
    except (UsageError, SourceError):
        return False
    return True


def _tree_at(folder: Location) -> Location | None:
    return next((path for path in (folder, *(folder / item for item in ITEMS)) if is_file(path / METADATA)), None)


def _folders(folder: Location) -> list[str]:
    try:
        return [name for name in names_in(folder) if isinstance(folder, BucketPath) or (folder / name).is_dir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise SourceError(f"{folder} cannot be read: {e.strerror}") from None


@dataclass(frozen=True)
class TreeArray:
    """An array, as it is stored."""

    name: str
    shape: Shape
    dtype: str
    chunks: Shape


class TrainedTree:
    """The arrays of a tree. Any thread may read.

    Args:
        folder: see `locate_tree`.
        only_finite: whether NaN and infinite values are refused where they are read.

    Raises:
        SourceError: its metadata cannot be understood.
    """

    def __init__(self, folder: Location, *, only_finite: bool = False):
        self.folder, self._only_finite = folder, only_finite
        self._root = _key_value_store(folder)
        path = folder / METADATA
        data = read_bytes(path, MAX_METADATA_BYTES, SourceError)
        raw = check(parse(data, str(path), SourceError), METADATA_SCHEMA, str(path), SourceError)
        self._stamps = self._file_stamps()
        has_ocdbt = raw.get("use_ocdbt")
        self._has_ocdbt = is_file(folder / "manifest.ocdbt") if has_ocdbt is None else has_ocdbt
        self._driver = "zarr3" if raw.get("use_zarr3") else "zarr"
        self._is_complete = bool(raw.get("store_array_data_equal_to_fill_value"))
        self.names: set[str] = {
            ".".join(str(key["key"]) for key in entry["key_metadata"])
            for entry in raw["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] in ARRAY_TYPES
        }
        for name in self.names:
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise SourceError(f"{path} has an array of the name {short(name)}, which is no name of a folder")
        self._stores: dict[str, Any] = {}
        self._cache_bytes = CACHE_BYTES

    @cached_property
    def identity(self) -> str:
        """Equal for copies: a hash of names, sizes and samples of the files. Whether a file is the same in all its
        bytes, `stamps` tell."""
        with ThreadPoolExecutor(buckets.REQUESTS if isinstance(self.folder, BucketPath) else 1) as pool:
            found = [*pool.map(lambda name: [name, _sampled(self.folder / name)], sorted(self._stamps))]
        return str(hash_bytes(json.dumps(found).encode())["xxh3_128"])

    @cached_property
    def custom_metadata(self) -> dict[str, Any]:
        """The metadata that the trainer gave to Orbax with the step or its item.

        Raises:
            SourceError: they cannot be understood.
        """
        found: dict[str, Any] = {}
        for path in (self.folder.parent / CHECKPOINT_METADATA, self.folder / CHECKPOINT_METADATA):
            if is_file(path):
                raw = parse(read_bytes(path, MAX_BYTES, SourceError), str(path), SourceError, constants=False)
                schema = {"custom_metadata": Optional((dict, None))}
                found |= check(raw, schema, str(path), SourceError).get("custom_metadata") or {}
        return found

    @property
    def memory(self) -> int:
        """The bytes that reading takes besides what is read: the cache, and TensorStore itself."""
        return self._cache_bytes + TENSORSTORE_MEMORY

    @property
    def stamps(self) -> dict[str, str]:
        """By file, what changes when it is written or replaced."""
        return _hashed(self._stamps)

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """The same, equal on all hosts that see the files: of a file on a disk its size and time of modification."""
        is_on_disk = isinstance(self.folder, Path)
        return _hashed({name: found[2:4] if is_on_disk else found for name, found in self._stamps.items()})

    def check_unchanged(self) -> None:
        """Raises SourceError if a file was changed since the tree was opened."""
        if self._file_stamps() != self._stamps:
            raise SourceError(
                f"{self.folder} was changed while it was read",
                hint=UNFINISHED,
            )

    def open(self, names: Collection[str]) -> Mapping[str, TreeArray]:
        """Opens arrays, which can be read from then on.

        Raises:
            SourceError: an array is missing, or cannot be understood.
            BucketError: their bucket cannot be reached, or refuses access.
        """
        stores = self._opened(names, CACHE_BYTES)
        largest = max((prod(_chunk(s)) * s.dtype.numpy_dtype.itemsize for s in stores.values()), default=0)
        if 2 * largest > CACHE_BYTES:  # layers in one chunk are read one at a time, and decoded once
            self._cache_bytes = 2 * largest
            stores = self._opened(names, self._cache_bytes)
        self._stores |= stores
        return {n: TreeArray(n, tuple(s.shape), s.dtype.name, _chunk(s)) for n, s in stores.items()}

    def _opened(self, names: Collection[str], cache_bytes: int) -> dict[str, Any]:
        import tensorstore as ts

        retries = {"max_retries": buckets.BUCKET_RETRIES["max_retries"]}
        context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": cache_bytes},
                "gcs_request_retries": retries,
                "s3_request_retries": retries,
            }
        )
        opening = {name: ts.open(self._spec(name), read=True, open=True, context=context) for name in names}
        return {name: self._result(name, future) for name, future in opening.items()}

    def read(self, name: str, box: Sequence[slice]) -> np.ndarray:
        """A box of an array that was opened.

        Raises:
            SourceError: it cannot be read, or holds values that are not finite.
            BucketError: its bucket cannot be reached, or refuses access.
        """
        future = self._stores[name][tuple(box)].read()
        values = np.asarray(self._result(name, future))
        if self._only_finite:
            refuse_nonfinite(name, values, box, DIVERGED)
        return values

    def _result(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as e:
            cause = root_cause(e)
            if isinstance(self.folder, BucketPath) and cause.startswith(STORE_ERRORS):
                raise BucketError(
                    f"{name} of {self.folder} cannot be read: {cause}",
                    hint="TensorStore finds credentials of its own: "
                    f"{CREDENTIAL_HINTS[self.folder.scheme]}; else check the network, and run again",
                ) from None
            raise SourceError(
                f"{name} of {self.folder} cannot be read: {cause}",
                hint="the checkpoint is damaged or not complete: take another step",
            ) from None

    def _spec(self, name: str) -> dict[str, Any]:
        inside = f"{name}/"
        kvstore = (
            {"driver": "ocdbt", "base": self._root, "path": inside}
            if self._has_ocdbt
            else {**self._root, "path": f"{self._root['path']}{inside}"}
        )
        return {
            "driver": self._driver,
            "kvstore": kvstore,
            "fill_missing_data_reads": not self._is_complete,
        }

    def _file_stamps(self) -> dict[str, list[Any]]:
        if isinstance(self.folder, BucketPath):
            found = buckets.listing_facts(self.folder)
            return {name: [each.size, sorted(each.version.items())] for name, each in found.items()}
        out = {}
        for path in files_below(self.folder):
            try:
                out[os.path.relpath(path, self.folder)] = list(stamp(os.stat(path)))
            except OSError as e:
                raise SourceError(f"{path} cannot be read: {e.strerror}") from None
        return out


def _hashed(stamps: Mapping[str, list[Any]]) -> dict[str, str]:
    return {name: str(hash_bytes(json.dumps(found).encode())["xxh3_128"]) for name, found in stamps.items()}


def _sampled(path: Location) -> list[Any]:
    """The size of a file, and a hash of samples of its bytes."""
    if isinstance(path, BucketPath):
        if (facts := buckets.facts(path)) is None:
            raise SourceError(f"{path} is missing now", hint=UNFINISHED)
        return [facts.size, hash_bytes(b"".join(object_samples(path, 0, facts.size)))["xxh3_128"]]
    with opened(path, SourceError) as (fd, status):
        return [status.st_size, hash_bytes(b"".join(samples(fd, 0, status.st_size)))["xxh3_128"]]


def _key_value_store(folder: Location) -> dict[str, Any]:
    """TensorStore's specification of a folder.

    Raises:
        UsageError: TensorStore has no driver for it.
    """
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{os.path.realpath(folder)}/"}
    out: dict[str, Any] = {"bucket": folder.bucket, "path": f"{folder.key}/" if folder.key else ""}
    if folder.scheme == "gs":
        return out | {"driver": "gcs"}
    if folder.scheme == "s3":
        settings = {"endpoint": endpoint("s3"), "aws_region": region()}
        return out | {"driver": "s3"} | {key: value for key, value in settings.items() if value}
    raise UsageError(
        f"{folder} is in {SCHEMES[folder.scheme]}, which TensorStore does not read",
        hint="copy the checkpoint to a local disk, and give its folder",
    )


def _chunk(store: Any) -> Shape:
    return tuple(store.chunk_layout.read_chunk.shape or store.shape)
