"""The parameters of one stage of a model, rounded to nearest after AWQ or SmoothQuant has scaled its inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np

from tpuconv.quantize.calibrate import smoothing
from tpuconv.quantize.calibrate.layer_functions import Weights
from tpuconv.quantize.calibrate.layers import HEAD_STAGE, LayerRunner
from tpuconv.quantize.calibrate.rounding import Rounding
from tpuconv.quantize.calibrate.stage import Samples, rounding_of
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.quantize.encode import QwixEncoder


@dataclass(frozen=True)
class StageInput:
    """An input of products of a stage.

    Attributes:
        kernels: of the products, with the axes that they sum over, by their names in a model of separate layers.
        statistics: over all samples.
        sample: the hidden states [T, D] of the first sample before the stage, on which folds are tried.
    """

    kernels: Mapping[str, Sequence[int]]
    statistics: smoothing.InputStatistics
    sample: np.ndarray


def stage_inputs(runner: LayerRunner, stage: str, weights: Weights, samples: Samples, count: int) -> list[StageInput]:
    """Returns the inputs of a stage whose products may be scaled, in one pass over `count` samples. The inputs of
    experts and of the head are left out."""
    if stage == HEAD_STAGE:
        return []
    gathered: list[_Gathered] = []
    first = next(samples())
    for number, x_TD in enumerate(samples()):
        seen = runner.observe(stage, weights, x_TD)
        for i, observed in enumerate(seen):
            if number == 0:
                gathered.append(_Gathered())
            if observed.counts_E is None:
                gathered[i].add(observed.x, max(1, count * len(observed.x) // smoothing.ROWS))
        if number == 0:
            kernels = [{f"{stage}.{kernel}": axes for kernel, axes in each.summed_axes.items()} for each in seen]
    return [
        StageInput(names, each.statistics, first) for names, each in zip(kernels, gathered, strict=True) if each.sums
    ]


class _Gathered:
    """The statistics of an input after some samples."""

    def __init__(self) -> None:
        self.sums: list[np.ndarray] = []
        self.largest: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []
        self.tokens = 0

    def add(self, x_TI: np.ndarray, step: int) -> None:
        """Adds a sample, and keeps each row whose number over all samples is a multiple of `step`."""
        self.sums.append(np.abs(x_TI).mean(0))
        self.largest.append(np.abs(x_TI).max(0))
        self.rows.append(x_TI[-self.tokens % step :: step])
        self.tokens += len(x_TI)

    @property
    def statistics(self) -> smoothing.InputStatistics:
        """The statistics of all samples."""
        return smoothing.InputStatistics(np.mean(self.sums, 0), np.max(self.largest, 0), np.concatenate(self.rows))


def rounded_by_scales(
    runner: LayerRunner,
    stage: str,
    weights: Weights,
    inputs: Sequence[StageInput],
    encoders: Mapping[str, QwixEncoder],
    settings: Calibration,
) -> tuple[dict[str, Rounding], dict[str, np.ndarray]]:
    """Returns the quantized parameters of a stage, by their names in a model of separate layers; and the weights that
    have other values than before they are rounded, in the dtype that they are stored in.

    Args:
        runner: of the model.
        stage: its name.
        weights: of the stage.
        inputs: its inputs.
        encoders: of the parameters, by their names in the checkpoint.
        settings: AWQ's or SmoothQuant's.
    """
    weights = dict(weights)

    def encoder_of(name: str) -> QwixEncoder | None:
        return encoders.get(runner.stored_name(name)[0])

    def dtype_of(name: str) -> np.dtype[np.generic]:
        return np.dtype(runner.manifest.arrays[runner.stored_name(name)[0]].dtype)

    errors: dict[str, tuple[float, float]] = {}
    changed: dict[str, np.ndarray] = {}
    for each in inputs:
        quantized = {name: axes for name, axes in each.kernels.items() if encoder_of(name) is not None}
        if not quantized:
            continue
        fold = smoothing.find_fold(weights, each.kernels, partial(_run, runner, stage, each.sample))
        if fold is None:
            continue
        scales, before, after = _search(runner, weights, fold, quantized, each.statistics, encoders, settings)
        errors |= dict(zip(quantized, zip(before, after, strict=True), strict=True))
        if scales is None:
            continue
        scaled = smoothing.folded(weights, fold, each.kernels, scales)
        for name in (name for name in scaled if scaled[name] is not weights[name]):
            changed[name] = np.asarray(scaled[name]).astype(dtype_of(name))
            weights[name] = jnp.asarray(changed[name].astype(np.float32))
    roundings = {}
    for name in weights:
        if (encoder := encoder_of(name)) is None:
            continue
        rounding = roundings[name] = rounding_of(runner, encoder, name, weights)
        if name in errors:
            rounding.nearest, rounding.calibrated = errors[name]
        else:
            rounding.leave("nothing before it can take its scales")
    return roundings, changed


def _run(runner: LayerRunner, stage: str, x_TD: np.ndarray, weights: Weights) -> np.ndarray:
    return runner.run(stage, weights, x_TD)[:, : runner.changing]


def _search(
    runner: LayerRunner,
    weights: Weights,
    fold: smoothing.Fold,
    kernels: Mapping[str, Sequence[int]],
    statistics: smoothing.InputStatistics,
    encoders: Mapping[str, QwixEncoder],
    settings: Calibration,
) -> tuple[np.ndarray | None, list[float], list[float]]:
    """Returns the scales of the quantized kernels of an input; see `smoothing.search`."""
    names, width = list(kernels), statistics.rows.shape[1]
    stored = [runner.stored_name(name)[0] for name in names]

    def round_weights(number: int, scales_I: np.ndarray) -> np.ndarray:
        name = names[number]
        scaled = smoothing.multiplied(np.asarray(weights[name]), kernels[name], scales_I)
        own = {name: jnp.asarray(scaled)}
        return rounding_of(runner, encoders[stored[number]], name, own, kernels[name]).decoded.reshape(width, -1)

    is_awq = settings.method == "awq"
    scales_of = smoothing.awq_scales if is_awq else smoothing.smooth_scales
    dtype = np.dtype(runner.manifest.arrays[stored[0]].dtype)
    return smoothing.search(
        statistics,
        [np.asarray(weights[name]).reshape(width, -1) for name in names],
        fold,
        lambda *given: fold.settled(scales_of(*given), dtype),
        round_weights,
        (lambda x: x) if is_awq else smoothing.rounded_by_token,
    )
