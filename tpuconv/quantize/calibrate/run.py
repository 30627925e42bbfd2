"""The pass over a model that calibrates it, layer by layer, before its output is written.

For each layer: its weights are read; the layer runs on the hidden states of all samples, and the Hessian X^T X of each
distinct input of its products is added up (for GPTQ; for AWQ and SmoothQuant the size of each element); its parameters
are rounded; it runs again with these weights, which gives the inputs of the next layer. So each layer is rounded for
the inputs that it will have. With `propagate` the model that is not quantized runs beside it, and each layer makes up
for a part of the errors of those before it. With `distill` the scales of all layers are moved after that
(`tpuconv.quantize.calibrate.distill`). What is found, and the hidden states after a layer, are files in the work
folder, and the layer an entry in the journal: a killed run goes on after the last complete layer, to the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.schema import CALIBRATED_SCHEMA
from tpuconv.convert.plan.quantization import FoundArray
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.calibrated import QVALUES, SCALES, VALUES, ZERO_POINTS, CalibratedValues
from tpuconv.convert.run.made_arrays import made_bytes, reading
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional, Size
from tpuconv.models.stored import model_config
from tpuconv.names import CACHE_SCALES, INPUT_SCALE, collapse
from tpuconv.quantize.cache_scales import found_scales
from tpuconv.quantize.calibrate.data import CalibrationData
from tpuconv.quantize.calibrate.distill import Distillation, distillation_entries, steps_of
from tpuconv.quantize.calibrate.layer_functions import Weights
from tpuconv.quantize.calibrate.layers import HEAD_STAGE, LayerRunner
from tpuconv.quantize.calibrate.memory import calibration_memory, scale_bytes, widest_input
from tpuconv.quantize.calibrate.rounding import Rounding
from tpuconv.quantize.calibrate.scaled import rounded_by_scales, stage_inputs
from tpuconv.quantize.calibrate.stage import kept_bytes, rounded_by_gptq, rounding_of
from tpuconv.quantize.calibrate.states import HiddenStates
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.input_scale import InputScale, MeanScale
from tpuconv.storage import disk
from tpuconv.storage.journal import CALIBRATED, Journal

LAYER_ENTRY = {
    "parameters": Each(CALIBRATED_SCHEMA),
    "input_scales": Optional(Each({"place": Size, "value": float})),
    "cache_scales": Optional(Each({"place": Size, "values": [float]})),
}
"""Schema of the journal's entry for a layer: what `results` says of its parameters; the static scales, by the names of
their arrays, with the place of the layer in these."""


def layer_entry(number: int) -> str:
    """Returns the journal's entry for a layer, by the number of its stage."""
    return f"{CALIBRATED}-{number:05d}"


@dataclass(frozen=True)
class LayerwiseCalibration:
    """See the module, and `tpuconv.convert.plan.quantization.CalibrationPass`.

    Args:
        manifest: the model that is quantized.
        encoders: of its parameters.
        settings: the method.
        data: what the model runs on.
        heads: of attention, in the layer with the most.
        cached: the arrays of static scales of KV caches; empty without these.
        plan: how a release, or a checkpoint for another program, is read; None for a checkpoint of ours.
    """

    manifest: Manifest
    encoders: Mapping[str, QwixEncoder]
    settings: Calibration
    data: CalibrationData
    heads: int
    cached: Mapping[str, FoundArray] = field(default_factory=dict)
    plan: Plan | None = None

    @property
    def memory(self) -> int:
        """The private memory in bytes that it needs at most."""
        settings = self.settings
        of_layer = calibration_memory(
            self.manifest, self.encoders, self.heads, self.data.length, settings.propagates, settings.distill > 0
        )
        return of_layer + (made_bytes(self.plan) if self.plan else 0)

    @property
    def entries(self) -> list[str]:
        """The entries of its journal: a stage for each layer, and the head."""
        layers = model_config(self.manifest).num_hidden_layers + 1
        steps = steps_of(self.data.samples, self.settings.distill)
        return [*(layer_entry(number) for number in range(layers)), *distillation_entries(steps)]

    @property
    def widest(self) -> int:
        """The most inputs of a product that it rounds the weights of."""
        return widest_input(self.manifest, self.encoders)

    def run(self, journal: Journal) -> Iterator[str]:
        """Does what is left to do. Yields the name of each layer before it is calibrated.

        Raises:
            UnsupportedConfig: the input of a product that has a static scale is not seen.
            ResourceError: there is too little disk space.
            GateError: activations are not finite.
        """
        with reading(self.plan) as read:
            yield from self._run_layers(LayerRunner(self.manifest, self.data.length, read, self.data.example), journal)

    def _run_layers(self, runner: LayerRunner, journal: Journal) -> Iterator[str]:
        """See `run`."""
        stages = self._stages(runner)
        self._check_inputs(runner, stages)
        distillation = self._distillation(runner, journal)
        if journal.done(layer_entry(0), LAYER_ENTRY) is None:
            shapes = {name: self.manifest.arrays[name].shape for name in self.encoders}
            rounded = sum(prod(shapes[name]) + scale_bytes(each, shapes[name]) for name, each in self.encoders.items())
            of_layer = 4 * self.data.samples * self.data.length * runner.width
            propagates = self.settings.propagates
            kept = kept_bytes(runner, stages, self.data.samples, propagates) if self.settings.method == "gptq" else 0
            room = rounded + (4 if self.settings.runs_exact else 2) * of_layer + kept
            room += distillation.room if distillation else 0
            disk.check_room(journal.folder, room, "the calibration", "an OUT or a `workspace=`")
        for number, stage in enumerate(stages):
            if journal.done(layer_entry(number), LAYER_ENTRY) is not None:
                continue
            yield f"layer {number + 1} of {len(stages)}" if stage != HEAD_STAGE else "the head"
            states, exact = self._states(journal, number), self._exact_states(journal, number)
            is_run = number + 1 < len(stages) and stage != HEAD_STAGE
            if number == 0:
                for each in filter(None, (states, exact)):
                    each.write(runner.embedded(self.data.each()), "the embedding")
            weights = runner.weights(stage)
            if exact is not None and stage != HEAD_STAGE and (is_run or distillation):  # before its weights are rounded
                self._run(runner, stage, weights, exact, self._exact_states(journal, number + 1))
            of_method: Mapping[str, Callable[..., dict[str, dict[str, Any]]]] = {
                "gptq": partial(self._calibrate, exact=exact),
                "nearest": self._round,
            }
            calibrate: Callable[..., dict[str, dict[str, Any]]] = of_method.get(self.settings.method, self._smooth)
            facts = calibrate(runner, stage, weights, states, CalibratedValues(journal.folder))
            scales = self._input_scales(runner, stage, weights, states)
            if is_run:
                self._run(runner, stage, weights, states, self._states(journal, number + 1))
            facts = {"parameters": facts} | ({"input_scales": scales} if scales else {})
            if self.cached and stage != HEAD_STAGE:
                facts["cache_scales"] = self._cache_scales(runner, stage, weights, states)
            journal.record(layer_entry(number), facts)
            for each in filter(None, (states, exact)):
                if distillation is None or each not in (distillation.embedded, distillation.exact):
                    disk.remove(each.path)
        if distillation:
            yield from distillation.run()

    def _distillation(self, runner: LayerRunner, journal: Journal) -> Distillation | None:
        """Returns the distillation that follows the rounding of all layers; None without one."""
        if not self.settings.distill:
            return None
        first, last = self._states(journal, 0), self._exact_states(journal, len(runner.windows))
        assert last is not None
        return Distillation(runner, self.encoders, self.data, self.settings.distill, journal, first, last)

    def results(self, journal: Journal) -> dict[str, dict[str, Any]]:
        """Returns the manifest's facts of each parameter: sums over the layers of stacked parameters."""
        out: dict[str, dict[str, Any]] = {}
        number = 0
        while (done := journal.done(layer_entry(number), LAYER_ENTRY)) is not None:
            for name, facts in done["parameters"].items():
                known = out.setdefault(name, {"nearest": 0.0, "calibrated": 0.0, "left": 0, "why": ""})
                known |= {key: known[key] + facts[key] for key in ("nearest", "calibrated", "left")}
                known["why"] = known["why"] or facts["why"]
            number += 1
        return {name: {"calibration": facts} for name, facts in out.items()}

    @property
    def found_arrays(self) -> Iterator[tuple[str, FoundArray]]:
        """The static scales: the name of each array, and its form. Those of stacked layers have an axis of layers."""
        for name, encoder in self.encoders.items():
            quant = encoder.quant
            if (scale := quant.input_scale) is not None:
                is_stacked = len(quant.shape) > len(quant.summed) + len(quant.qwix_how.channelwise_axes)
                layers, letters = (
                    (quant.shape[:1], self.manifest.arrays[name].axes.split()[:1]) if is_stacked else ((), [])
                )
                form = FoundArray((*layers, *[1] * scale.axes), " ".join([*letters, *["1"] * scale.axes]))
                yield _scale_name(name), form
        yield from self.cached.items()

    def found(self, journal: Journal) -> dict[str, np.ndarray]:
        """Returns the values of these arrays."""
        out = {name: np.zeros(form.shape, np.float32) for name, form in self.found_arrays}
        number = 0
        while (done := journal.done(layer_entry(number), LAYER_ENTRY)) is not None:
            for name, scale in done.get("input_scales", {}).items():
                out[name].reshape(-1)[scale["place"]] = scale["value"]
            for name, scale in done.get("cache_scales", {}).items():
                out[name].reshape(-1, len(scale["values"]))[scale["place"]] = scale["values"]
            number += 1
        return out

    def _stages(self, runner: LayerRunner) -> list[str]:
        """Returns the stages up to the last with a quantized parameter, or with cached keys and values to scale."""
        quantized = [
            i
            for i, stage in enumerate(runner.stages)
            if any(self._encoder(runner, name) for name in runner.names(stage))
        ]
        layers = len(runner.stages) if self.settings.distill else len(runner.windows) if self.cached else 0
        return runner.stages[: max(max(quantized, default=-1) + 1, layers)]

    def _encoder(self, runner: LayerRunner, name: str) -> QwixEncoder | None:
        return self.encoders.get(runner.stored_name(name)[0])

    def _states(self, journal: Journal, number: int) -> HiddenStates:
        return HiddenStates(journal.folder / CALIBRATED / f"states-{number}", self.data.length)

    def _exact_states(self, journal: Journal, number: int) -> HiddenStates | None:
        """Returns the states in the model that is not quantized, where it runs too."""
        if not self.settings.runs_exact:
            return None
        return HiddenStates(journal.folder / CALIBRATED / f"exact-{number}", self.data.length)

    def _samples(self, runner: LayerRunner, states: HiddenStates) -> Iterator[np.ndarray]:
        return (states.read(number, runner.width) for number in range(self.data.samples))

    def _run(
        self, runner: LayerRunner, stage: str, weights: Weights, states: HiddenStates, after: HiddenStates | None
    ) -> None:
        """Writes the states after a layer."""
        assert after is not None
        after.write((runner.run(stage, weights, x_TD) for x_TD in self._samples(runner, states)), stage)

    def _calibrate(
        self,
        runner: LayerRunner,
        stage: str,
        weights: Weights,
        states: HiddenStates,
        found: CalibratedValues,
        exact: HiddenStates | None,
    ) -> dict[str, dict[str, Any]]:
        """Rounds the quantized parameters of a stage: replaces them in `weights` by what their quantized values stand
        for, and writes these to `found`. Returns the facts of each parameter."""
        samples = partial(self._samples, runner, states)
        others = None if exact is None or not self.settings.propagates else partial(self._samples, runner, exact)
        folder = states.path.parent
        (roundings,) = rounded_by_gptq(runner, stage, weights, samples, [self.encoders], self.settings, folder, others)
        return self._finish(runner, stage, weights, roundings, found)

    def _smooth(
        self, runner: LayerRunner, stage: str, weights: Weights, states: HiddenStates, found: CalibratedValues
    ) -> dict[str, dict[str, Any]]:
        """As `_calibrate`, by AWQ or SmoothQuant: replaces weights by scaled ones and writes these, too."""
        inputs = stage_inputs(runner, stage, weights, partial(self._samples, runner, states), self.data.samples)
        roundings, changed = rounded_by_scales(runner, stage, weights, inputs, self.encoders, self.settings)
        for name, values in changed.items():
            stored, layer = runner.stored_name(name)
            weights[name] = jnp.asarray(values.astype(np.float32))
            found.write(stored, layer, VALUES, values)
        return self._finish(runner, stage, weights, roundings, found)

    def _round(
        self, runner: LayerRunner, stage: str, weights: Weights, states: HiddenStates, found: CalibratedValues
    ) -> dict[str, dict[str, Any]]:
        """As `_calibrate`, to the nearest values."""
        names = [name for name in weights if self._encoder(runner, name) is not None]
        roundings = {name: self._rounding(runner, name, weights, (), False) for name in names}
        return self._finish(runner, stage, weights, roundings, found)

    def _input_scales(
        self, runner: LayerRunner, stage: str, weights: Weights, states: HiddenStates
    ) -> dict[str, dict[str, Any]]:
        """Returns the static scales of a stage with the quantized weights, by the names of their arrays."""
        wanted = self._static_scales(runner, stage)
        means = {name: MeanScale(scale.qwix_how) for name, scale in wanted.items()}
        for x_TD in self._samples(runner, states) if wanted else ():
            for observed in runner.observe(stage, weights, x_TD):
                for name in (name for kernel in observed.summed_axes if (name := f"{stage}.{kernel}") in wanted):
                    means[name].add(observed.x)
        stored = {name: runner.stored_name(name) for name in wanted}
        return {
            _scale_name(stored[name][0]): {"place": stored[name][1] or 0, "value": mean.scale}
            for name, mean in means.items()
        }

    def _cache_scales(
        self, runner: LayerRunner, stage: str, weights: Weights, states: HiddenStates
    ) -> dict[str, dict[str, Any]]:
        """Returns the static scales of a layer's cached keys and values with the quantized weights, by the names of
        their arrays; nothing of a layer without them."""
        if runner.stored_name(f"{stage}.attn{CACHE_SCALES[0]}")[0] not in self.cached:
            return {}
        seen = [runner.largest_cached(stage, weights, x_TD) for x_TD in self._samples(runner, states)]
        found = {}
        for suffix, largest in zip(CACHE_SCALES, zip(*seen, strict=True), strict=True):
            name, place = runner.stored_name(f"{stage}.attn{suffix}")
            scales = found_scales(np.max(largest, axis=0), self.cached[name].shape[-1])
            found[name] = {"place": place or 0, "values": scales.tolist()}
        return found

    def _static_scales(self, runner: LayerRunner, stage: str) -> dict[str, InputScale]:
        """Returns the parameters of a stage whose products have inputs with static scales."""
        encoders = {name: self._encoder(runner, name) for name in runner.names(stage)}
        scales = {name: encoder.quant.input_scale for name, encoder in encoders.items() if encoder is not None}
        return {name: scale for name, scale in scales.items() if scale is not None}

    def _check_inputs(self, runner: LayerRunner, stages: Sequence[str]) -> None:
        """Raises UnsupportedConfig if the input of a product that has a static scale is not seen."""
        wanted = [(stage, self._static_scales(runner, stage)) for stage in stages]
        unseen = [name for stage, scales in wanted if scales for name in sorted(scales.keys() - runner.seen(stage))]
        if unseen:
            raise UnsupportedConfig(
                f"the inputs of {', '.join(collapse(unseen))} are not seen, so that they have no static scale",
                hint="put a rule without act_static_scale for these modules before it",
            )

    def _finish(
        self,
        runner: LayerRunner,
        stage: str,
        weights: Weights,
        roundings: dict[str, Rounding],
        found: CalibratedValues,
    ) -> dict[str, dict[str, Any]]:
        """Replaces the quantized parameters of a stage in `weights` by what their values stand for, and writes these.
        Returns the facts of each."""
        facts = {}
        for name in weights:
            encoder = self._encoder(runner, name)
            if encoder is None:
                continue
            stored, layer = runner.stored_name(name)
            if name not in roundings:  # the run rounds it to nearest, too
                rounding = self._rounding(runner, name, weights, (), False)
                rounding.leave("its inputs were not seen")
                roundings[name] = rounding
            rounding = roundings[name]
            found.write(stored, layer, QVALUES, rounding.qbytes)
            if self.settings.distill or (rounding.fits_scales and self.settings.method == "gptq"):
                found.write(stored, layer, SCALES, rounding.scale)
            for zero_points in rounding.zero_points if self.settings.distill else ():
                found.write(stored, layer, ZERO_POINTS, zero_points)
            weights[name] = jnp.asarray(rounding.decoded)
            facts[stored] = {
                "nearest": rounding.nearest,
                "calibrated": rounding.calibrated,
                "left": len(rounding.left),
                "why": next(iter(rounding.left), ""),
            }
        return facts

    def _rounding(
        self, runner: LayerRunner, name: str, weights: Weights, summed: Sequence[int], has_experts: bool
    ) -> Rounding:
        return rounding_of(runner, self.encoders[runner.stored_name(name)[0]], name, weights, summed, has_experts)


def _scale_name(parameter: str) -> str:
    """Returns the name of the array of the static scale of a parameter's input."""
    return parameter.rpartition(".")[0] + INPUT_SCALE
