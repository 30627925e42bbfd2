"""Scales that are distilled after all layers are rounded, as mlx-lm's DWQ does: the quantized values stay, and each
scale moves so that the logits come nearer to the logits of the model that is not quantized.

A step runs a few samples through the quantized model, and goes back through its layers with the gradient of the mean KL
divergence of their tokens. The hidden states before each layer are files, so that one layer at a time is in memory,
with the gradients of the whole model. Adam (arXiv:1412.6980) moves the logarithm of each scale. The scales and
Adam's moments before a step are files too, until the step is in the journal: a killed run goes on to the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, cos, pi, prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuconv.convert.run.calibrated import QVALUES, SCALES, VALUES, ZERO_POINTS, CalibratedValues
from tpuconv.errors import GateError, UnsupportedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.notation.layout import Shape
from tpuconv.quantize.calibrate.data import CalibrationData
from tpuconv.quantize.calibrate.layer_functions import Weights
from tpuconv.quantize.calibrate.layers import HEAD_STAGE, LayerRunner
from tpuconv.quantize.calibrate.states import HiddenStates
from tpuconv.quantize.config import REQUIRED_TILE_SIZES
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.values import Coded
from tpuconv.storage import disk
from tpuconv.storage.journal import CALIBRATED, Journal

SAMPLES_AT_ONCE = 2
"""Samples of a step."""
RATE = 5e-4
"""How much the logarithm of a scale changes in the first steps. It falls to 0 by a cosine."""
DECAYS = 0.9, 0.999
"""The part of each of Adam's moments that a step leaves."""
SMALLEST = 1e-12
"""Added to the root of Adam's second moment."""
STEP_ENTRY = {"kl": float}
"""Schema of the journal's entry for a step: the mean KL divergence of its samples in nats, before the scales move."""
DISTILLED = f"{CALIBRATED}-distilled"
"""The entry after the last step."""


def steps_of(samples: int, passes: int) -> int:
    """Returns the number of steps for some passes over so many samples."""
    return passes * ceil(samples / SAMPLES_AT_ONCE)


def distillation_entries(steps: int) -> list[str]:
    """Returns the journal's entries of a distillation."""
    return [*(step_entry(number) for number in range(steps)), *([DISTILLED] if steps else [])]


def step_entry(number: int) -> str:
    """Returns the journal's entry for a step."""
    return f"{DISTILLED}-{number:05d}"


def check_distilled(config: DecoderConfig, encoders: Mapping[str, QwixEncoder]) -> None:
    """Raises UnsupportedConfig if a model returns no logits, or all scales are numbers of few bits."""
    if config.head.kind:
        raise UnsupportedConfig(
            "scales are distilled by logits, and this model returns none", hint="leave out `distill` of the calibration"
        )
    if not any(map(_is_moved, encoders.values())):
        raise UnsupportedConfig(
            "there are no scales to distill: all are powers of two, or numbers of 8 bits",
            hint="leave out `distill` of the calibration, or add a rule with another type, such as int4",
        )


def _is_moved(encoder: QwixEncoder) -> bool:
    """Returns whether scales have a type that small changes show in."""
    return encoder.quant.qtype not in REQUIRED_TILE_SIZES


@dataclass(frozen=True)
class _Parameter:
    """A quantized parameter of one layer: its names in a model of separate layers and in the checkpoint, its number
    within stacked layers, its encoder, and the shapes of its values and scales."""

    name: str
    stored: str
    layer: int | None
    encoder: QwixEncoder
    shape: Shape
    scales: Shape


@dataclass(frozen=True)
class Distillation:
    """See the module.

    Args:
        runner: of the model.
        encoders: of the parameters that are rounded, by their names in the checkpoint.
        data: the samples.
        passes: over all samples.
        journal: has what the layers were rounded to in its work folder.
        embedded: the states before the first layer.
        exact: the states after the last layer of the model that is not quantized.
    """

    runner: LayerRunner
    encoders: Mapping[str, QwixEncoder]
    data: CalibrationData
    passes: int
    journal: Journal
    embedded: HiddenStates
    exact: HiddenStates

    @property
    def room(self) -> int:
        """Bytes on the disk that it needs: the states of a step, and twice the scales with Adam's moments."""
        states = len(self._layers) * SAMPLES_AT_ONCE * self.data.length * self.runner.width
        return 4 * states + 2 * 4 * 3 * sum(prod(each.scales) for each in self._all_parameters)

    def run(self) -> Iterator[str]:
        """Does what is left to do. Yields the name of each step before it.

        Raises:
            GateError: hidden states or divergences are not finite.
        """
        if self.journal.done(DISTILLED, {}) is not None:
            return
        steps, last = steps_of(self.data.samples, self.passes), ""
        for number in range(steps):
            done = self.journal.done(step_entry(number), STEP_ENTRY)
            if done is None:
                yield f"distillation, step {number + 1} of {steps}{last}"
                done = {"kl": self._step(number, RATE * (1 + cos(pi * number / steps)) / 2)}
                self.journal.record(step_entry(number), done)
            last = f", KL {done['kl']:.4f}"
        for each in self._all_parameters:
            if _is_moved(each.encoder):
                scale, _, _ = self._moments(each, steps)
                self._found.write(each.stored, each.layer, SCALES, scale.astype(each.encoder.scale_dtype))
        self.journal.record(DISTILLED, {})
        for each in self._all_parameters:
            for kind in (_moments_kind(0), _moments_kind(1), ZERO_POINTS):
                self._found.remove(each.stored, each.layer, kind)
        for states in (self.embedded, self.exact, *map(self._before, range(1, len(self._layers) + 1))):
            disk.remove(states.path)

    @property
    def _found(self) -> CalibratedValues:
        return CalibratedValues(self.journal.folder)

    @cached_property
    def _layers(self) -> Sequence[str]:
        return [stage for stage in self.runner.stages if stage != HEAD_STAGE]

    @cached_property
    def _parameters(self) -> Mapping[str, Sequence[_Parameter]]:
        """The quantized parameters of each stage."""
        return {stage: list(self._of_stage(stage)) for stage in (*self._layers, HEAD_STAGE)}

    def _of_stage(self, stage: str) -> Iterator[_Parameter]:
        """Yields the quantized parameters of a stage: none of a head that is the embedding."""
        for name in self.runner.names(stage) if stage in self.runner.stages else ():
            stored, layer = self.runner.stored_name(name)
            if (encoder := self.encoders.get(stored)) is not None:
                shape, groups = self.runner.manifest.arrays[stored].shape, encoder.quant.group_shape
                first = 0 if layer is None else 1
                scales = tuple(n // group for n, group in zip(shape, groups, strict=True))
                yield _Parameter(name, stored, layer, encoder, shape[first:], scales[first:])

    @property
    def _all_parameters(self) -> list[_Parameter]:
        return [each for of_stage in self._parameters.values() for each in of_stage]

    def _before(self, layer: int) -> HiddenStates:
        """Returns the states of a step's samples before a layer other than the first."""
        return HiddenStates(self.embedded.path.with_name(f"distilled-{layer}"), self.data.length)

    def _moments(self, parameter: _Parameter, number: int) -> np.ndarray:
        """Returns the scales in float32 and Adam's two moments before a step [3, groups]."""
        of_layer = parameter.stored, parameter.layer
        if number:
            kind, shape = _moments_kind(number), (3, *parameter.scales)
            return self._read(*of_layer, kind, shape, np.dtype(np.float32))
        scale = self._read(*of_layer, SCALES, parameter.scales, parameter.encoder.scale_dtype)
        return np.stack([scale.astype(np.float32), *np.zeros((2, *parameter.scales), np.float32)])

    def _read(self, stored: str, layer: int | None, kind: str, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
        """Returns a file that the rounding or an earlier step has written."""
        found = self._found.read_layer(stored, layer, kind, shape, dtype)
        assert found is not None
        return found

    def _coded(self, stage: str, number: int) -> dict[str, Coded]:
        """Returns the quantized parameters of a stage in a step, with scales as they are stored."""
        coded = {}
        for each in self._parameters[stage]:
            of_layer = each.stored, each.layer
            qvalues = self._read(*of_layer, QVALUES, each.shape, np.dtype(np.uint8))
            zeros = self._found.read_layer(*of_layer, ZERO_POINTS, each.scales, np.dtype(np.uint8))
            moments = self._moments(each, number if _is_moved(each.encoder) else 0)
            scale = moments[0].astype(each.encoder.scale_dtype).astype(np.float32)
            zero_points = () if zeros is None else (jnp.asarray(zeros),)
            coded[each.name] = Coded(jnp.asarray(qvalues), jnp.asarray(scale), zero_points, each.encoder.quant.qtype)
        return coded

    def _weights(self, stage: str, number: int) -> tuple[Weights, dict[str, Coded]]:
        """Returns the arrays of a layer as the calibration left them, and its quantized parameters in a step."""
        coded = self._coded(stage, number)
        weights = self.runner.read(stage, without=coded)
        for name in weights:
            stored, layer = self.runner.stored_name(name)
            array = self.runner.manifest.arrays[stored]
            shape = array.shape if layer is None else array.shape[1:]
            changed = self._found.read_layer(stored, layer, VALUES, shape, np.dtype(array.dtype))
            if changed is not None:
                weights[name] = jnp.asarray(changed.astype(np.float32))
        return weights, coded

    def _step(self, number: int, rate: float) -> float:
        """Moves the scales by the gradients of a few samples. Returns the mean KL divergence of their tokens before."""
        count, width = self.data.samples, self.runner.width
        per_pass = steps_of(count, 1)
        start = number % per_pass * SAMPLES_AT_ONCE
        samples = range(start, min(start + SAMPLES_AT_ONCE, count))

        def states_before(layer: int) -> Iterator[np.ndarray]:
            if layer == 0:
                return (self.embedded.read(sample, width) for sample in samples)
            return (self._before(layer).read(place, width) for place in range(len(samples)))

        for layer, stage in enumerate(self._layers):
            weights, coded = self._weights(stage, number)
            after = (self.runner.run(stage, weights, x_TW, coded) for x_TW in states_before(layer))
            self._before(layer + 1).write(after, stage)
        head, weights = self._coded(HEAD_STAGE, number), self.runner.logits_weights()
        found = [
            self.runner.divergence(weights, head, x_TW, self.exact.read(sample, width))
            for sample, x_TW in zip(samples, states_before(len(self._layers)), strict=True)
        ]
        del weights
        kl = float(np.mean([each for each, *_ in found]))
        if not np.isfinite(kl):
            raise GateError(f"the logits of a step of the distillation are not finite: step {number + 1}")
        self._move(HEAD_STAGE, number, rate, [scales for _, scales, _ in found])
        gradients = [before_TW for *_, before_TW in found]
        for layer, stage in reversed(list(enumerate(self._layers))):
            weights, coded = self._weights(stage, number)
            pulled = [
                self.runner.pulled(stage, weights, x_TW, coded, gradient_TW)
                for x_TW, gradient_TW in zip(states_before(layer), gradients, strict=True)
            ]
            gradients = [before_TW for _, before_TW in pulled]
            self._move(stage, number, rate, [scales for scales, _ in pulled])
        return kl

    def _move(self, stage: str, number: int, rate: float, gradients: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Writes the scales of a stage after a step, and Adam's moments, given the gradients of each sample."""
        first, second = DECAYS
        for each in self._parameters[stage]:
            if not _is_moved(each.encoder):
                continue
            scale, mean, square = self._moments(each, number)
            slope = np.mean([of_sample[each.name] for of_sample in gradients], 0) * scale  # of its logarithm
            mean = first * mean + (1 - first) * slope
            square = second * square + (1 - second) * np.square(slope)
            size = np.sqrt(square / (1 - second ** (number + 1))) + SMALLEST
            scale = scale * np.exp(-rate * mean / (1 - first ** (number + 1)) / size)
            moved = np.stack([scale, mean, square]).astype(np.float32)
            self._found.write(each.stored, each.layer, _moments_kind(number + 1), moved)


def _moments_kind(number: int) -> str:
    """Returns the kind of the files with the scales before a step."""
    return f"moments-{number % 2}"
