"""The source of the arrays of an export: a checkpoint, or the plan of a conversion (`planned_arrays`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from tpuconv.checkpoint.companions import companions_of, copy_companion
from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import check_contents, read_box, read_checkpoint_config
from tpuconv.convert.plan.types import FLOAT_DTYPES
from tpuconv.convert.run.engine import RunProgress
from tpuconv.location import Location
from tpuconv.names import SCALE
from tpuconv.notation.layout import Axes, Ranges, Shape, lead
from tpuconv.sources.config import DTYPE_KEYS, parts_of, with_dtype, with_encoding, without_encoding
from tpuconv.storage.sealed import Sealed
from tpuconv.storage.sinks import Sink
from tpuconv.targets.registry import get_target


class ArraySource(Protocol):
    """The arrays of a model, in the tree that the manifest names."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the arrays. For a plan: the manifest of its output before any value is known."""

    @property
    def memory(self) -> int:
        """The bytes that reading takes, besides the arrays."""

    @property
    def file_config(self) -> Mapping[str, Any]:
        """The source's config.json, as the file has it."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The source's config.json, with the description of the weights' encoding that stands beside it."""

    @property
    def companions(self) -> Mapping[str, Mapping[str, Any]]:
        """The files that go with the weights, with size and hash."""

    @property
    def companions_folder(self) -> Location:
        """The folder with these files."""

    def copy_companion(self, name: str, sink: Sink, target: str) -> None:
        """Copies one of these files into an output, as `target`."""

    def check(self) -> None:
        """Checks, before arrays are read, that they match the manifest."""

    def read(
        self, name: str, axes: Axes, ranges: Ranges, made: dict[str, np.ndarray], figures: dict[str, Any]
    ) -> np.ndarray:
        """Returns an array, or the box of it with these ranges of letters.

        Args:
            name: of the array.
            axes: of the array, by the table; a manifest of a former tpuconv may have other letters.
            ranges: of letters that lead axes of the array; the others are complete.
            made: takes the other arrays that were made with it, for the next call with the same ranges.
            figures: takes what was found when it was quantized, by parameter.
        """

    def tensor_scale(self, name: str) -> float | None:
        """Returns the scale of a tensor that the array has multiplied with the scales of blocks.

        Args:
            name: of the scale in the source.

        Returns:
            The scale; None if it is not known.
        """

    @property
    def hashed(self) -> Sequence[str]:
        """The files of the source that are hashed while they are read, by this process or others."""

    def finish_part(self) -> dict[str, str]:
        """Checks that all was read of one version of the source. Returns the hashes of the files of the source that
        this process hashed while it read them, by name."""

    def finish(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Returns the manifest's description of the source, from the hashes of all its files, if it is still
        unchanged."""

    def describe(self, figures: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns further facts for the manifest, and further files, from the statistics of quantized parameters."""

    @property
    def stamps(self) -> dict[str, str]:
        """Returns a stamp for each source file, which shows that the file was changed or replaced. Empty if the
        identity shows it."""

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """The same, equal on all hosts that see the files."""

    def check_made(self, out: Location, made: Sealed) -> Iterator[RunProgress]:
        """Checks that an output, with this manifest, was made of the source as it is now. Yields progress before a file
        is read completely."""


class BoxSource(ArraySource, Protocol):
    """The arrays of a checkpoint, which any box is read from."""

    def read_box(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Returns a box of an array. May be called from several threads."""


class IdentifiedArrays:
    """The common part of arrays whose source has an identity: only the identity shows a change, no source file is
    hashed, and nothing is quantized during the export. See `ArraySource`."""

    manifest: Manifest
    hashed: Sequence[str] = ()
    memory = 0

    def read_box(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """See `BoxSource`."""
        raise NotImplementedError

    def read(
        self, name: str, axes: Axes, ranges: Ranges, made: dict[str, np.ndarray], figures: dict[str, Any]
    ) -> np.ndarray:
        """See `ArraySource`. Raises as `read_box` does."""
        return self.read_box(name, array_box(axes, self.manifest.arrays[name].shape, ranges))

    def tensor_scale(self, name: str) -> float | None:
        """See `ArraySource`."""
        scale: float | None = (self.manifest.quantization or {}).get("tensor_scales", {}).get(name)
        return scale

    def finish_part(self) -> dict[str, str]:
        """See `ArraySource`."""
        return {}

    def describe(self, figures: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """See `ArraySource`."""
        return {}, {}

    @property
    def stamps(self) -> dict[str, str]:
        """See `ArraySource`."""
        return {}

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `ArraySource`."""
        return {}

    def check_made(self, out: Location, made: Sealed) -> Iterator[RunProgress]:
        """See `ArraySource`."""
        yield from ()


class CheckpointArrays(IdentifiedArrays):
    """The arrays of a checkpoint. Their chunks have checksums. Scales that lack axes in a target have all here."""

    def __init__(self, manifest: Manifest):
        self._stored, self._dropped = manifest, _dropped_axes(manifest)
        arrays = {
            name: replace(manifest.arrays[name], shape=_with_axes(manifest.arrays[name].shape, axes))
            for name, axes in self._dropped.items()
        }
        self.manifest = replace(manifest, arrays={**manifest.arrays, **arrays})
        self.companions, self.companions_folder = companions_of(manifest), manifest.folder
        self.file_config = read_checkpoint_config(manifest)
        self.config = with_encoding(self.file_config, manifest.folder, self.companions)

    def copy_companion(self, name: str, sink: Sink, target: str) -> None:
        """See `ArraySource`. Raises SourceError if it was changed."""
        copy_companion(self.manifest, name, sink, target, self.companions[name])

    def check(self) -> None:
        """Raises CorruptOutput if files hold other chunks than the manifest says."""
        check_contents(self._stored, self._stored.arrays)

    def read_box(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """See `BoxSource`. Raises CorruptOutput if it cannot be read."""
        values = np.empty([part.stop - part.start for part in box], np.dtype(self.manifest.arrays[name].dtype))
        dropped = self._dropped.get(name, ())
        stored = [part for i, part in enumerate(box) if i not in dropped]
        read_box(self._stored, name, stored, values.squeeze(dropped))
        return values

    def finish(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """See `ArraySource`. Raises SourceError if the checkpoint was replaced."""
        self.manifest.check_current()
        return self.manifest.origin


def _dropped_axes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Returns the axes that scales of a checkpoint lack, by their names: in some targets the axes that are
    contracted."""
    target = get_target(manifest.target)
    if manifest.quantization is None or not target.squeezes_scales:
        return {}
    return {
        target.part(name, SCALE.removeprefix(".")): tuple(i for i, n in enumerate(facts["tiles"]) if n > 1)
        for name, facts in manifest.quantization["parameters"].items()
    }


def _with_axes(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """Returns a shape with axes of size 1 at these places."""
    return tuple(int(n) for n in np.expand_dims(np.empty(shape, bool), axes).shape)


def array_box(axes: Axes, shape: Shape, ranges: Ranges) -> tuple[slice, ...]:
    """Returns the box of an array with these ranges of letters, each of which is alone on its axis."""
    sizes = zip(map(lead, axes), shape, strict=True)
    return tuple(slice(*ranges[letter]) if letter in ranges else slice(0, n) for letter, n in sizes)


def released_config(manifest: Manifest) -> dict[str, Any]:
    """Returns the config.json of a checkpoint to export: the source's, without the description of an encoding that was
    undone."""
    return exported_config(CheckpointArrays(manifest))


def exported_config(arrays: ArraySource) -> dict[str, Any]:
    """Returns the same of arrays that are exported. It states the dtype of weights that were cast, and of those that
    were quantized or saved from a model if it stated another one: transformers casts what it loads to that."""
    manifest = arrays.manifest
    config = dict(arrays.config) if manifest.passthrough else without_encoding(arrays.config)
    cast = manifest.raw["options"]["dtype"]
    is_stated = any(part.get(key) for part in parts_of(config) for key in DTYPE_KEYS)
    if cast not in FLOAT_DTYPES and is_stated and (manifest.is_rounded or manifest.raw["source"].get("changed")):
        cast = manifest.dtype
    return dict(with_dtype(config, cast)) if cast in FLOAT_DTYPES else config
