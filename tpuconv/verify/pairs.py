"""Two models compared: their logits on the same tokens, and their parameters. One model is in memory at a time; of the
parameters of a checkpoint of ours a box of one."""

import gc
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryFile, gettempdir

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.errors import ResourceError, UsageError
from tpuconv.models.logits import Window, whole_texts
from tpuconv.text import format_size
from tpuconv.verify.logits import (
    Gates,
    LogitStatistics,
    ModelLoader,
    compare_logits,
    each_logits,
    quantized_gates,
    rounding_divergence,
)
from tpuconv.verify.weights.measuring import measured_pair
from tpuconv.verify.weights.statistics import DifferenceSums, TensorDifference
from tpuconv.verify.weights.stored import Weight
from tpuconv.verify.windows import scored_logits


@dataclass(frozen=True)
class Side:
    """A model that is compared.

    Attributes:
        manifest: of it.
        load: loads it in a dtype onto a mesh.
        dtype: that it computes in.
        cache_dtype: of its cache; None to compute without one.
    """

    manifest: Manifest
    load: ModelLoader
    dtype: str
    cache_dtype: str | None = None

    def logits(self, prompts: Sequence[Sequence[int]], rounding: int | None = None) -> Iterator[np.ndarray]:
        """Yields its logits [T, V] of each prompt; with `rounding`, a seed, the logits of another rounding. The model
        is in memory until the last one."""
        from tpuconv.restore import mesh_of_processes

        mesh, windows = mesh_of_processes(self.manifest), whole_texts(prompts)
        yield from each_logits(self.load, windows, self.dtype, mesh, self.cache_dtype, rounding=rounding)


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


def tensor_differences(reference: Mapping[str, Weight], other: Mapping[str, Weight]) -> Iterator[TensorDifference]:
    """Yields the difference of each parameter of two models, given by their names.

    Raises:
        UsageError: they have other parameters, or of other shapes. It is found before a value is read.
    """
    shapes = [{name: weight.shape for name, weight in side.items()} for side in (reference, other)]
    if shapes[0] != shapes[1]:
        first = min(name for name in {**reference, **other} if shapes[0].get(name) != shapes[1].get(name))
        said = [str(list(side[first])) if first in side else "none" for side in shapes]
        raise UsageError(
            f"the models have different shapes: {first} is {said[0]} in the reference and {said[1]} in the other one",
            hint="compare a checkpoint with one that was made from it, or with its release",
        )
    return (
        TensorDifference.of(name, measured_pair(weight, other[name]).difference or DifferenceSums())
        for name, weight in reference.items()
    )
