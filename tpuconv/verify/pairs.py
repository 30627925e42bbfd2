"""Two checkpoints of ours compared: their logits on the same tokens, and their parameters. One model is in memory at a
time; of the parameters a box of one."""

import gc
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log10, prod
from tempfile import TemporaryFile, gettempdir
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import read_box
from tpuconv.errors import ResourceError, UsageError
from tpuconv.location import plain_path
from tpuconv.models.common.periods import LayerStacks
from tpuconv.models.logits import Window, whole_texts
from tpuconv.models.stored import model_config
from tpuconv.names import INPUT_SCALE, QVALUE, SCALE, ZERO_POINT
from tpuconv.quantize.encode import decoded_values
from tpuconv.text import format_size
from tpuconv.verify.logits import (
    Gates,
    LogitStatistics,
    compare_logits,
    each_logits,
    quantized_gates,
    rounding_divergence,
)
from tpuconv.verify.windows import scored_logits

BOX_VALUES = 1 << 24
"""Values of a parameter that are compared at once."""


@dataclass(frozen=True)
class Side:
    """A model that is compared: its checkpoint, the dtype that it computes in, and the dtype of its cache, None to
    compute without one."""

    manifest: Manifest
    dtype: str
    cache_dtype: str | None = None

    def logits(self, prompts: Sequence[Sequence[int]], rounding: int | None = None) -> Iterator[np.ndarray]:
        """Yields its logits [T, V] of each prompt; with `rounding`, a seed, the logits of another rounding. The model
        is in memory until the last one."""
        from tpuconv.restore import load, mesh_of_processes

        mesh, windows = mesh_of_processes(self.manifest), whole_texts(prompts)
        with plain_path(self.manifest.folder) as folder:
            model = partial(load, folder)
            yield from each_logits(model, windows, self.dtype, mesh, self.cache_dtype, rounding=rounding)


def compare_windows(
    reference: Side,
    other: Side,
    windows: Sequence[Window],
    vocabulary: int,
    gates: Gates | None,
    on_model: Callable[[str], None] = lambda name: None,
) -> LogitStatistics:
    """Returns the statistics of two models' logits. Those of one model are in a temporary file meanwhile.

    Args:
        reference, other: the models.
        windows: what they run on.
        vocabulary: V.
        gates: bounds by the name of a statistic; None for what another rounding of the second model changes.
        on_model: called with "reference", "other" and "another rounding" before each runs.

    Raises:
        ResourceError: the temporary file does not fit on its disk.
    """
    prompts, size = [window.ids for window in windows], np.dtype(np.float32).itemsize
    counts = [len(window.scored) - 1 for window in windows]
    needed = size * vocabulary * sum(counts)
    if needed > (free := shutil.disk_usage(gettempdir()).free):
        raise ResourceError(
            f"the logits of {sum(map(len, prompts))} tokens take {format_size(needed)}, and {gettempdir()} has "
            f"{format_size(free)}",
            hint="compare on less text, or set TMPDIR to a folder on a larger disk",
        )
    with TemporaryFile() as file:

        def stored() -> Iterator[np.ndarray]:
            for start, count in zip(starts, counts, strict=True):
                file.seek(size * vocabulary * start)
                yield np.frombuffer(file.read(size * count * vocabulary), np.float32).reshape(count, vocabulary)

        def storing(logits: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
            """Yields the logits, each of which takes the place of what `stored` yielded before it."""
            for start, logits_TV in zip(starts, scored_logits(windows, logits), strict=True):
                file.seek(size * vocabulary * start)
                file.write(np.ascontiguousarray(logits_TV, np.float32).data)
                yield logits_TV

        starts = [sum(counts[:number]) for number in range(len(counts))]
        scored = [window.scored for window in windows]
        on_model("reference")
        for _ in storing(reference.logits(prompts)):
            pass
        gc.collect()  # the first model is in cycles of references
        on_model("other")
        found = compare_logits(scored, stored(), storing(other.logits(prompts)), other.dtype, gates or {})
        if gates is not None:
            return found

        def rerounded(seed: int) -> Iterator[np.ndarray]:
            gc.collect()
            on_model("another rounding")
            return scored_logits(windows, other.logits(prompts, seed))

        rounding_kl = rounding_divergence(scored, stored, rerounded, other.dtype)
        return replace(
            found,
            rounding_kl=rounding_kl,
            gates=quantized_gates(other.dtype, rounding_kl, other.manifest.quantization or {}),
        )


# -- parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorDifference:
    """The difference of a parameter.

    Attributes:
        name: of the parameter, of one layer.
        count: its values.
        snr_db: 10 log10(sum x^2 / sum (x - y)^2) of the values x of the reference and y of the other; inf for none.
        largest: the largest absolute difference.
    """

    name: str
    count: int
    snr_db: float
    largest: float

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists; an infinite ratio is null."""
        return vars(self) | {"snr_db": self.snr_db if self.snr_db < inf else None}


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a checkpoint, of one layer.

    Attributes:
        stored: its name in the checkpoint.
        layer: the number of the layer within it, if layers are stacked.
        shape: of the layer.
        step: along the first axis, how many elements share a scale.
    """

    manifest: Manifest
    stored: str
    layer: int | None
    shape: tuple[int, ...]
    step: int
    qtype: str | None

    def read(self, rows: slice) -> np.ndarray:
        """Returns the values in float32 of some rows of the first axis. `rows` begins and ends at a multiple of
        `step`."""
        if self.qtype is None:
            return self._part(self.stored, rows).astype(np.float32)
        arrays = self.manifest.arrays
        parts = [self._part(self.stored + QVALUE, rows).view(np.uint8)]
        few = slice(rows.start // self.step, -(-rows.stop // self.step))
        parts.append(self._part(self.stored + SCALE, few))
        if self.stored + ZERO_POINT in arrays:
            parts.append(self._part(self.stored + ZERO_POINT, few).view(np.uint8))
        return decoded_values(self.qtype, parts)

    def _part(self, name: str, rows: slice) -> np.ndarray:
        array = self.manifest.arrays[name]
        shape = array.shape if self.layer is None else array.shape[1:]
        out = np.empty((rows.stop - rows.start, *shape[1:]) if shape else (), array.dtype)
        box = (rows,) if shape else ()
        read_box(self.manifest, name, box if self.layer is None else (self.layer, *box), out)
        return out


def _parameters(manifest: Manifest) -> dict[str, _Parameter]:
    """Returns the parameters by the names that they have in a model of separate layers."""
    quantized: Mapping[str, Any] = (manifest.quantization or {}).get("parameters", {})
    suffixes = (QVALUE, SCALE, ZERO_POINT, INPUT_SCALE)
    names = [name for name in manifest.arrays if not name.endswith(suffixes)]
    names += [name.removesuffix(QVALUE) for name in manifest.arrays if name.endswith(QVALUE)]
    stacks = _stacks(manifest)
    out = {}
    for name in names:
        qtype = quantized[name]["qtype"] if name not in manifest.arrays else None
        shape = manifest.arrays[name if qtype is None else name + QVALUE].shape
        held = stacks.names_in(name) if stacks else [(name, None)]
        is_stacked = held[0][1] is not None
        own = shape[1:] if is_stacked else shape
        step = 1
        if qtype is not None:
            scales = manifest.arrays[name + SCALE].shape
            step = own[0] // (scales[1:] if is_stacked else scales)[0]
        for one, layer in held:
            out[one] = _Parameter(manifest, name, layer, own, step, qtype)
    return out


def _stacks(manifest: Manifest) -> LayerStacks | None:
    if not manifest.scan_layers:
        return None
    config = model_config(manifest)
    return LayerStacks(config.num_hidden_layers, config.period)


def tensor_differences(reference: Manifest, other: Manifest) -> Iterator[TensorDifference]:
    """Yields the difference of each parameter that both checkpoints have.

    Raises:
        UsageError: they hold other parameters, or of other shapes. It is found before a value is read.
    """
    ours, theirs = _parameters(other), _parameters(reference)
    shapes = [{name: parameter.shape for name, parameter in side.items()} for side in (theirs, ours)]
    if shapes[0] != shapes[1]:
        first = min(name for name in {**theirs, **ours} if shapes[0].get(name) != shapes[1].get(name))
        said = [str(list(side[first])) if first in side else "none" for side in shapes]
        raise UsageError(
            f"{reference.folder} and {other.folder} contain models of different shapes: {first} is {said[0]} in one "
            "and "
            f"{said[1]} in the other",
            hint="compare a checkpoint with one that was made from it, or from the same release",
        )
    return (_difference(name, theirs[name], ours[name]) for name in theirs)


def _difference(name: str, a: _Parameter, b: _Parameter) -> TensorDifference:
    signal = noise = largest = 0.0
    rows = a.shape[0] if a.shape else 1
    unit = int(np.lcm(a.step, b.step))
    step = unit * max(1, BOX_VALUES // (unit * prod(a.shape[1:])))
    for start in range(0, rows, step):
        box = slice(start, min(start + step, rows))
        x, y = a.read(box), b.read(box)
        signal += float(np.square(x, dtype=np.float64).sum())
        lost = np.subtract(x, y, dtype=np.float64)
        noise += float(np.square(lost).sum())
        largest = max(largest, float(np.abs(lost).max(initial=0)))
    ratio = inf if noise == 0 else 10 * log10(signal / noise) if signal else -inf
    return TensorDifference(name, prod(a.shape), ratio, largest)
