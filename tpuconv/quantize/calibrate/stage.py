"""The parameters of one stage of a model, rounded by GPTQ: the Hessians of its inputs are added up over all samples, as
many at once as memory allows, and each serves all products of its input. Those of many experts are too many: then the
inputs are kept in files, so that the stage runs once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from tpuconv.errors import SourceError
from tpuconv.quantize.calibrate.gptq import Factor, SingularHessian, factorize, propagation
from tpuconv.quantize.calibrate.layer_functions import Weights
from tpuconv.quantize.calibrate.layers import LayerRunner, Observed
from tpuconv.quantize.calibrate.memory import HESSIAN_BYTES, sums_bytes
from tpuconv.quantize.calibrate.rounding import Rounding
from tpuconv.quantize.calibrate.triangular import add_product, add_square, mirror
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.storage import disk

Samples = Callable[[], Iterator[np.ndarray]]
"""Yields the hidden states [T, D] of each sample before a stage, each time that it is called."""
_Hessian = tuple[int, int, int, list[Rounding]]
"""The numbers of an input and of an expert, the width of the input, and what is rounded by the Hessian of these."""
EachSample = Callable[[], Iterator[Sequence[Observed]]]
"""Yields the inputs of a stage's products on each sample, each time that it is called."""


def rounding_of(
    runner: LayerRunner,
    encoder: QwixEncoder,
    name: str,
    weights: Weights,
    summed: Sequence[int] = (),
    has_experts: bool = False,
) -> Rounding:
    """Returns a parameter of a stage, rounded to nearest.

    Raises:
        SourceError: it is not finite.
    """
    try:
        values, layer = np.asarray(weights[name]), runner.stored_name(name)[1]
        return Rounding(encoder, values, summed, has_experts=has_experts, is_stacked=layer is not None)
    except FloatingPointError:
        raise SourceError(
            f"{name} is not finite: there are NaN or infinite values", hint="convert the source again"
        ) from None


def rounded_by_gptq(
    runner: LayerRunner,
    stage: str,
    weights: Weights,
    samples: Samples,
    encoder_sets: Sequence[Mapping[str, QwixEncoder]],
    settings: Calibration,
    folder: Path,
    exact: Samples | None = None,
) -> list[dict[str, Rounding]]:
    """Returns the quantized parameters of a stage, for each set of encoders, by their names in a model of separate
    layers. Those whose inputs are not seen are left out.

    Args:
        runner: of the model.
        stage: its name.
        weights: of the stage.
        samples: what runs through it.
        encoder_sets: of the parameters, by their names in the checkpoint.
        settings: of GPTQ.
        folder: for files with inputs. They are removed again.
        exact: what runs through it in the model that is not quantized, where errors are propagated.

    Raises:
        SourceError: a parameter is not finite.
        ResourceError: the disk is full.
    """
    seen = runner.observe(stage, weights, next(samples()))
    results: list[dict[str, Rounding]] = [{} for _ in encoder_sets]
    hessians: list[_Hessian] = []
    for number, observed in enumerate(seen):
        of_input = []
        for kernel, summed in observed.summed_axes.items():
            name = f"{stage}.{kernel}"
            for encoders, result in zip(encoder_sets, results, strict=True):
                if (encoder := encoders.get(runner.stored_name(name)[0])) is not None:
                    has_experts = observed.counts_E is not None
                    result[name] = rounding_of(runner, encoder, name, weights, summed, has_experts)
                    of_input.append(result[name])
        experts = 1 if observed.counts_E is None else len(observed.counts_E)
        if of_input:
            hessians += [(number, expert, observed.x.shape[1], of_input) for expert in range(experts)]
    del seen

    def run() -> Iterator[Sequence[Observed]]:
        seen = (runner.observe(stage, weights, x_TD) for x_TD in samples())
        if exact is None:
            return seen
        return map(_with_changes, seen, (runner.observe(stage, weights, y_TD) for y_TD in exact()))

    parts = list(_parts(hessians, exact is not None))
    with nullcontext(run) if len(parts) < 2 else _kept(run(), folder) as each_sample:
        for part in parts:
            sums = _sums(each_sample, [item[:3] for item in part])
            for _, expert, _, of_input in part:
                _round(of_input, expert, *sums.pop(0), settings)
    return results


def _with_changes(seen: Sequence[Observed], exact: Sequence[Observed]) -> Sequence[Observed]:
    """Returns the inputs with their changes in the model that is not quantized. Experts, which may get other tokens
    there, have none."""
    return [
        have if have.counts_E is not None else replace(have, change=want.x - have.x)
        for have, want in zip(seen, exact, strict=True)
    ]


def _parts(hessians: Sequence[_Hessian], propagates: bool) -> Iterator[Sequence[_Hessian]]:
    """Yields the Hessians in parts that fit in memory, or are a single one."""
    start = held = 0
    for at, (_, _, width, _) in enumerate(hessians):
        held += sums_bytes(width, propagates)
        if held > HESSIAN_BYTES and at > start:
            yield hessians[start:at]
            start, held = at, sums_bytes(width, propagates)
    if hessians:
        yield hessians[start:]


@contextmanager
def _kept(each_sample: Iterator[Sequence[Observed]], folder: Path) -> Iterator[EachSample]:
    """Writes the inputs of all samples to files. Within the `with` they are read from there."""
    paths: list[Path] = []

    def written(values: np.ndarray) -> Callable[[], np.ndarray]:
        path, shape = folder / f"input-{len(paths)}", values.shape
        paths.append(path)
        disk.write_file(path, np.ascontiguousarray(values), flush=False)
        return lambda: np.memmap(path, np.float32, "r", shape=shape)

    def keep(seen: Observed) -> Callable[[], Observed]:
        axes, counts_E, x = seen.summed_axes, seen.counts_E, written(seen.x)
        change = None if seen.change is None else written(seen.change)
        return lambda: Observed(axes, x(), counts_E, None if change is None else change())

    try:
        samples = [[keep(each) for each in seen] for seen in each_sample]
        yield lambda: ([read() for read in sample] for sample in samples)
    finally:
        for path in paths:
            disk.remove(path)


def kept_bytes(runner: LayerRunner, stages: Sequence[str], samples: int, propagates: bool = False) -> int:
    """Returns the most that the inputs of a stage take on the disk, where its Hessians do not fit in memory at once."""
    each = 2 if propagates else 1
    arrays = runner.manifest.arrays
    kinds = {
        tuple(
            (name.removeprefix(stage), arrays[runner.stored_name(name)[0]].shape) for name in runner.names(stage)
        ): stage
        for stage in stages
    }
    sizes = [runner.input_bytes(stage) for stage in kinds.values()]
    return each * samples * max((inputs for inputs, sums in sizes if each * sums > HESSIAN_BYTES), default=0)


def _sums(
    each_sample: EachSample, places: Sequence[tuple[int, int, int]]
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Returns the Hessians [I, I] of inputs over all samples, and the products [I, I] of inputs and their changes,
    where there are changes. `places` has for each the number of the input, the expert, and I."""
    hessians = [np.zeros((width, width), np.float32) for *_, width in places]
    changes: dict[int, np.ndarray] = {}
    for seen in each_sample():
        for place, (hessian, (number, expert, _)) in enumerate(zip(hessians, places, strict=True)):
            rows, counts_E, change = seen[number].x, seen[number].counts_E, seen[number].change
            if counts_E is not None:
                end = int(counts_E[: expert + 1].sum())
                rows = rows[end - int(counts_E[expert]) : end]
            if len(rows):
                add_square(hessian, rows)
            if change is not None:
                add_product(changes.setdefault(place, np.zeros_like(hessian)), rows, change)
    for hessian in hessians:
        mirror(hessian)
    return [(hessian, changes.get(place)) for place, hessian in enumerate(hessians)]


def _round(
    roundings: Sequence[Rounding],
    matrix: int,
    hessian: np.ndarray,
    change: np.ndarray | None,
    settings: Calibration,
) -> None:
    """Rounds one matrix of the parameters that share an input. `change` is the product of the input and its change,
    where errors are propagated."""
    if not hessian.any():
        for rounding in roundings:
            rounding.leave("no token reached it")
        return
    try:
        corrected = None if change is None else propagation(hessian, change, settings.propagate)
    except SingularHessian:
        corrected = None
    factor: Factor | None = None
    for rounding in sorted(roundings, key=lambda rounding: rounding.fits_scales):  # most share an order, and a factor
        if not rounding.is_channelwise:
            rounding.leave("several outputs share a scale")
            continue
        order = rounding.order(hessian, settings.act_order)
        if factor is None or not np.array_equal(order, factor.order):
            factor = None  # it has the size of the Hessian
            try:
                factor = factorize(hessian, settings.damping, order)
            except SingularHessian:
                rounding.leave("its Hessian is singular")
                continue
        rounding.adjust(matrix, hessian, factor, settings.refine, corrected)
