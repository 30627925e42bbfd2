"""The arrays of a plan, made when they are asked for: what is exported in one pass, without a checkpoint between."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest, add_statistics
from tpuconv.checkpoint.stored import stored_arrays
from tpuconv.convert.plan.quantization import REPORT
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.convert.run.conversion import check_made_of
from tpuconv.convert.run.describe import describe
from tpuconv.convert.run.engine import RunProgress
from tpuconv.convert.run.results import UnitResult
from tpuconv.convert.run.share import share_of
from tpuconv.convert.run.sizing import QUANTIZE_MEMORY
from tpuconv.convert.run.slabs import check_copy, check_promise, not_finite, read_slab
from tpuconv.convert.run.stamps import stamps_for_hosts
from tpuconv.encodings.casts import all_finite
from tpuconv.errors import ConfigError, SourceError
from tpuconv.hosts import ProcessPart
from tpuconv.location import Location
from tpuconv.notation.layout import Axes, Ranges
from tpuconv.sources.config import read_json
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.sources.reader import Reader
from tpuconv.storage.disk import page_buffer
from tpuconv.storage.local_file import room_for
from tpuconv.storage.sealed import Sealed
from tpuconv.storage.sinks import Sink


class PlannedArrays:
    """See `tpuconv.convert.export.array_source.ArraySource`. `read` may be called from several threads."""

    def __init__(self, plan: Plan, part: ProcessPart | None = None):
        self.plan = plan
        self.share = share_of(plan, part)
        self._cancelled = threading.Event()
        raw = describe_plan(plan)
        self.manifest = Manifest(plan.source.folder, Sealed(raw, plan.fingerprint, None), stored_arrays(raw))
        self.companions, self.companions_folder = plan.source.companions, plan.source.folder
        dtypes = {slab.binding.dst[0].names[0]: slab.dtype for slab in plan.slabs}
        self._made_by = {
            stored: (binding, dtypes[binding.dst[0].names[0]])
            for binding in plan.bindings
            for stack in binding.dst
            for stored in plan.stored_names(stack.names[0])
        }

    @cached_property
    def reader(self) -> Reader:
        """The reader of the source. It is opened when the first value is read."""
        return self.plan.source.open(self._check_cancelled, hashes=[shard.name for shard in self.share.shards])

    @property
    def memory(self) -> int:
        """See `ArraySource`."""
        return QUANTIZE_MEMORY if self.plan.quantization else 0

    def cancel(self) -> None:
        """Ends what waits for bytes of the source, by an error."""
        self._cancelled.set()

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise SourceError("the work was cancelled")

    @cached_property
    def file_config(self) -> Mapping[str, Any]:
        """See `ArraySource`."""
        return read_json(self.plan.source.folder / CONFIG_FILE, ConfigError)

    @property
    def config(self) -> Mapping[str, Any]:
        """See `ArraySource`."""
        return self.plan.source.config

    def copy_companion(self, name: str, sink: Sink, target: str) -> None:
        """See `ArraySource`. Raises SourceError if it was changed."""
        self.plan.source.copy_companion(name, sink, target)

    def check(self) -> None:
        """Opens the source, once for all threads. Raises SourceError if copies of a tensor are not equal; of a source
        that is fetched they are compared at the end."""
        _ = self.reader
        if not self.plan.source.remote:
            self.check_copies()

    def check_copies(self) -> None:
        """Raises SourceError if copies of a tensor are not equal."""
        for copy, original in self.plan.copies.items():
            check_copy(self.plan, self.reader, copy, original, self._check_cancelled)

    def shards_of(self, name: str, ranges: Ranges) -> set[str]:
        """Returns the files of the source that an array is made from, or the box of it with these ranges of letters."""
        binding, dtype = self._made_by[name]
        names = Slab(binding, ranges, dtype).names
        return {info.shard for name in names for info in self.plan.tensors[name].stored}

    def read(
        self, name: str, axes: Axes, ranges: Ranges, made: dict[str, np.ndarray], figures: dict[str, Any]
    ) -> np.ndarray:
        """See `ArraySource`.

        Raises:
            SourceError: the source cannot be read, or holds values that are not finite.
        """
        if name not in made:
            binding, dtype = self._made_by[name]
            self._make(Slab(binding, ranges, dtype), made, figures)
        return made.pop(name)

    def _make(self, slab: Slab, made: dict[str, np.ndarray], figures: dict[str, Any]) -> None:
        plan = self.plan
        raw = 0 if plan.is_stored_as_wanted(slab) else plan.stored_bytes(slab)
        sources = read_slab(self.reader, plan, slab, page_buffer(room_for(slab.nbytes)), np.empty(raw, np.uint8))
        bits = [source.view(f"u{slab.dtype.itemsize}") for source in sources]
        names = [stack.names[0] for stack in slab.binding.dst]
        is_plain = any(name not in plan.encoders for name in names)  # an encoder looks by itself
        checked = is_plain and not plan.options.allow_nonfinite
        if checked and not all(all_finite(values, slab.dtype) for values in bits):
            raise not_finite(plan, " or ".join(names))
        for name, target in zip(names, slab.binding.layout(bits, slab.sizes), strict=True):
            values, encoder = target.view(slab.dtype), plan.encoders.get(name)
            if encoder is None:
                made[name] = values
                continue
            try:
                parts, found = encoder(values)
            except FloatingPointError:
                raise not_finite(plan, name) from None
            encoder.check()
            add_statistics(figures.setdefault(name, {}), found)
            made |= zip(plan.stored_names(name), parts, strict=True)

    def tensor_scale(self, name: str) -> float | None:
        """See `ArraySource`. Raises SourceError if it cannot be read."""
        scale = np.empty(1, np.float32)
        self.reader.read(self.plan.source.tensors[name], 0, scale.view(np.uint8).data)
        return float(scale[0])

    @property
    def hashed(self) -> Sequence[str]:
        """See `ArraySource`."""
        return [shard.name for shard in self.plan.source.shards] if self.plan.hashes_shards else []

    def finish_part(self) -> dict[str, str]:
        """See `ArraySource`.

        Raises:
            DamagedDownload: a shard does not have the sha256 that the Hub promises.
            SourceError: the source changed.
        """
        if self.plan.source.remote:  # hashes were compared as files came, and what was fetched is not needed any more
            self.reader.check_unchanged()
            self.reader.close()
            return {}
        hashes = {shard.name: check_promise(self.plan.source, self.reader, shard) for shard in self.share.shards}
        self.reader.check_unchanged()
        return {name: digest for name, digest in hashes.items() if digest is not None}

    def finish(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """See `ArraySource`. Raises SourceError if the source changed."""
        if not self.plan.source.remote:
            self.reader.check_unchanged()
        return self.plan.source.origin({shard.name: hashes.get(shard.name) for shard in self.plan.source.shards})

    def describe(self, figures: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """See `ArraySource`: with `quantize=` the rules and what they did, and the report."""
        raw, quantization = self.manifest.raw, self.manifest.quantization
        if quantization is None or self.plan.quantization is None:
            return {"options": raw["options"]}, {}
        parameters = {
            n: facts | ({"figures": figures[n]} if n in figures else {})
            for n, facts in quantization["parameters"].items()
        }
        found = {**quantization, "parameters": parameters}
        return {"options": raw["options"], "quantization": found}, {
            REPORT: self.plan.quantization.report({**raw, "quantization": found})
        }

    @property
    def stamps(self) -> dict[str, str]:
        """See `ArraySource`."""
        return self.plan.source.stamps

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """See `ArraySource`."""
        return stamps_for_hosts(self.plan.source)

    def check_made(self, out: Location, made: Sealed) -> Iterator[RunProgress]:
        """See `ArraySource`. Raises OutputError if it was not."""
        return check_made_of(self.plan, out, made)

    def close(self) -> None:
        """Closes the files of the source."""
        if "reader" in vars(self):
            self.reader.close()


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Returns the manifest of a plan's checkpoint, with zeros for values that only the conversion finds."""
    result = UnitResult(
        checksums=dict.fromkeys(plan.arrays, (0, 0)),
        statistics={
            name: dict.fromkeys(("signal", "noise", "clipped"), 0.0) | {"count": 1.0} for name in plan.encoders
        },
        shard_bytes={n: dict.fromkeys(a.shard_names(), 0) for n, a in plan.arrays.items() if a.compressed},
    )
    return describe(plan, dict.fromkeys((shard.name for shard in plan.source.shards), None), result, {})
