"""Measures the cost of rounding a group of parameters, layer by layer: the weights of one layer are in memory, and the
hidden states of each variant of the model, one for each option of each group, are files.

A variant begins at the first layer of its group, with the states of the unquantized model; until the last layer it runs
beside all others, on each layer's weights, which are read once. With GPTQ the weights of a layer are rounded by the
inputs that it has in the unquantized model, or, in a recipe as a whole, in the quantized one, as `quantize` does it.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import ReadArray
from tpuconv.errors import GateError, ResourceError, UsageError
from tpuconv.models.logits import divergences, log_softmax
from tpuconv.models.stored import model_config
from tpuconv.quantize.calibrate.data import CalibrationData, Sample
from tpuconv.quantize.calibrate.layer_functions import Weights
from tpuconv.quantize.calibrate.layers import HEAD_STAGE, LayerRunner
from tpuconv.quantize.calibrate.rounding import Rounding
from tpuconv.quantize.calibrate.scaled import rounded_by_scales, stage_inputs
from tpuconv.quantize.calibrate.stage import kept_bytes, rounded_by_gptq, rounding_of
from tpuconv.quantize.calibrate.states import HiddenStates
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.recipe.groups import Choices
from tpuconv.quantize.recipe.search import Option, ParamGroup
from tpuconv.storage import disk
from tpuconv.text import format_size

DTYPE = "float32"
"""The dtype of the model: the rounding of bfloat16 is larger than the effect of one group in int8."""

Decoded = Mapping[str, np.ndarray]
"""The weights of a stage that have other values when some are quantized, by their names in a model of separate layers:
those that the quantized values stand for, and with AWQ those that take scales."""


@dataclass(frozen=True)
class _Sequences:
    """Token sequences of one length that run through the model together, and the files of their states."""

    runner: LayerRunner
    samples: Callable[[], Iterable[Sample]]
    count: int
    length: int
    folder: Path
    numbers: Iterator[int]

    def begin(self) -> HiddenStates:
        """Returns the states before the first layer."""
        states = self._new()
        states.write(self.runner.embedded(self.samples()), "the embedding")
        return states

    def read(self, states: HiddenStates) -> Iterator[np.ndarray]:
        """Yields the states [T, D] of each sequence."""
        return (states.read(sample, self.runner.width) for sample in range(self.count))

    def after(self, stage: str, weights: Weights, states: HiddenStates) -> HiddenStates:
        """Returns the states after a layer."""
        out = self._new()
        out.write((self.runner.run(stage, weights, x_TD) for x_TD in self.read(states)), stage)
        return out

    def _new(self) -> HiddenStates:
        return HiddenStates(self.folder / f"states-{next(self.numbers)}", self.length)


@dataclass(frozen=True)
class _Streams:
    """The states of all samples that weights are rounded for, and the states in the unquantized model, where errors are
    propagated."""

    states: HiddenStates
    exact: HiddenStates | None = None

    def remove(self) -> None:
        """Removes the files."""
        for each in filter(None, (self.states, self.exact)):
            disk.remove(each.path)


class LayerwiseProbe:
    """Measures on a checkpoint, layer by layer.

    Args:
        manifest: the checkpoint, or the planned one of a release, not quantized.
        choices: what to measure.
        prompts: the token ids of each.
        folder: for the files, on a disk with room for the states of all variants.
        calibration: the settings of GPTQ or AWQ and what the model runs on for it; None to round to nearest.
        read: reads its arrays; None for a checkpoint, whose files are read.

    Its methods raise GateError if the states or the logits are not finite.

    Raises:
        ResourceError: the files do not fit on their disk.
        UsageError: the rotary positions of the model depend on the length of a prompt, and the prompts have several.
    """

    def __init__(
        self,
        manifest: Manifest,
        choices: Choices,
        prompts: Sequence[Sequence[int]],
        folder: Path,
        calibration: tuple[Calibration, CalibrationData] | None = None,
        read: ReadArray | None = None,
    ):
        length, numbers = max(map(len, prompts)), count()
        self._choices, self._prompts, self._calibration = choices, prompts, calibration
        changing = [rope for rope in model_config(manifest).ropes if rope is not None and rope.depends_on_length]
        limit = min((rope.original_max_position_embeddings for rope in changing), default=length)
        if length > limit and min(map(len, prompts)) < length:
            raise UsageError(
                f"the rotary positions of this model change beyond {limit} tokens, and prompts run in one batch",
                hint=f"give prompts of at most {limit} tokens",
            )
        ids_PT = np.array([[*ids, *[0] * (length - len(ids))] for ids in prompts], np.int32)
        self._runner = LayerRunner(manifest, length, read)
        self._texts = _Sequences(self._runner, partial(map, Sample, ids_PT), len(ids_PT), length, folder, numbers)
        self._samples = None
        if calibration:
            ids_ST = calibration[1].ids()  # once: the model may draw them
            data = replace(calibration[1], ids=lambda: ids_ST)
            runner = LayerRunner(manifest, data.length, read, data.example)
            self._samples = _Sequences(runner, data.each, data.samples, data.length, folder, numbers)
        tokens = ids_PT.size * (2 + sum(len(self._quantizing(group)) for group in choices.space.groups))
        propagates = calibration is not None and calibration[0].propagates
        streams = 2 if propagates else 1
        of_samples = 2 * streams * calibration[1].samples * calibration[1].length if calibration else 0
        needed = 4 * tokens * self._runner.width
        if self._samples:
            needed += 4 * of_samples * self._samples.runner.width
            tokens += of_samples
        if calibration and calibration[0].method == "gptq":
            needed += kept_bytes(self._runner, self._runner.stages, calibration[1].samples, propagates)
        if needed > (free := shutil.disk_usage(folder).free):
            raise ResourceError(
                f"the hidden states of {tokens} tokens need {format_size(needed)}, and {folder.parent} has "
                f"{format_size(free)} free",
                hint="measure on fewer or shorter prompts, or name a recipe on a larger disk",
            )
        self._layers = [stage for stage in self._runner.stages if stage != HEAD_STAGE]
        self._plain: HiddenStates | None = None

    def each(self, on_layer: Callable[[int, int], None] = lambda done, total: None) -> list[ParamGroup]:
        """Returns the groups with the cost of each option. `on_layer` is called with how many layers are done, and of
        how many."""
        groups = self._choices.space.groups
        plain = self._texts.begin()
        samples = _Streams(self._samples.begin()) if self._samples else None
        variants: dict[tuple[int, int], HiddenStates] = {}
        for done, stage in enumerate(self._layers):
            weights = self._runner.weights(stage)
            rounded = self._each_rounded(stage, weights, samples)
            begin = {(g, o) for g in self._groups_in(stage) for o in self._quantizing(groups[g])}
            for number, option in sorted({*variants, *begin}):
                own = _replaced(weights, rounded.get((number, option), {}))
                before = variants.get((number, option))
                variants[number, option] = self._texts.after(stage, own, before or plain)
                if before:
                    disk.remove(before.path)
            following = self._texts.after(stage, weights, plain)
            disk.remove(plain.path)
            plain = following
            samples = self._advanced(stage, weights, weights, samples)
            on_layer(done + 1, len(self._layers) + 1)
        costs = self._costs(plain, variants, samples)
        self._plain = plain
        on_layer(len(self._layers) + 1, len(self._layers) + 1)
        return [
            replace(group, options=tuple(replace(o, kl=costs.get((g, i), o.kl)) for i, o in enumerate(group.options)))
            for g, group in enumerate(groups)
        ]

    def together(self, options: Sequence[Option]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields for each prompt the logits [T, V] of the unquantized model, and of that with these options of all
        groups."""
        encoders = self._choices.chosen(options)
        states, samples = self._texts.begin(), None
        if self._samples and self._calibration:
            exact = self._samples.begin() if self._calibration[0].propagates else None
            samples = _Streams(self._samples.begin(), exact)
        for stage in self._layers:
            weights = self._runner.weights(stage)
            (rounded,) = self._rounded(stage, weights, samples, [encoders])
            own = _replaced(weights, rounded)
            following = self._texts.after(stage, own, states)
            disk.remove(states.path)
            states = following
            samples = self._advanced(stage, own, weights, samples)
        plain, quantized = self._runner.logits_weights(), self._head([encoders], samples)[0]
        pairs = zip(self._prompts, self._texts.read(self._reference()), self._texts.read(states), strict=True)
        for ids, x_TD, y_TD in pairs:
            yield tuple(  # type: ignore[misc]
                check_finite(self._runner.logits(weights, z_TD[: len(ids)]))
                for weights, z_TD in ((plain, x_TD), (quantized, y_TD))
            )
        disk.remove(states.path)

    def _reference(self) -> HiddenStates:
        """Returns the last states of the unquantized model, which `each` leaves."""
        if self._plain is None:
            states = self._texts.begin()
            for stage in self._layers:
                following = self._texts.after(stage, self._runner.weights(stage), states)
                disk.remove(states.path)
                states = following
            self._plain = states
        return self._plain

    def _groups_in(self, stage: str) -> dict[int, list[str]]:
        """Returns the parameters in a stage, of each group that has some there, by its number."""
        names = {name: self._runner.stored_name(name)[0] for name in self._runner.names(stage)}
        found = {
            number: [name for name, stored in names.items() if stored in group.names]
            for number, group in enumerate(self._choices.space.groups)
        }
        return {number: members for number, members in found.items() if members}

    @staticmethod
    def _quantizing(group: ParamGroup) -> list[int]:
        return [number for number, option in enumerate(group.options) if option.qtype]

    def _each_rounded(self, stage: str, weights: Weights, samples: _Streams | None) -> dict[tuple[int, int], Decoded]:
        """Returns the weights of a stage with each option of each group alone, by the numbers of both. Rounding to
        nearest and GPTQ change a parameter by itself, so that all groups are rounded at once; AWQ scales what makes an
        input, which other groups may read."""
        encoders, groups, here = self._choices.encoders, self._choices.space.groups, self._groups_in(stage)
        alone = [
            (g, o, str(groups[g].options[o]), names) for g, names in here.items() for o in self._quantizing(groups[g])
        ]
        if self._scales:
            sets = [
                {name: encoders[kind][name] for name in groups[g].names if name in encoders[kind]}
                for g, _, kind, _ in alone
            ]
            found = self._rounded(stage, weights, samples, sets)
            return {(g, o): decoded for (g, o, _, _), decoded in zip(alone, found, strict=True)}
        kinds = list(encoders)
        found = self._rounded(stage, weights, samples, [encoders[kind] for kind in kinds])
        return {(g, o): {name: found[kinds.index(kind)][name] for name in names} for g, o, kind, names in alone}

    @property
    def _scales(self) -> bool:
        """True if inputs are scaled before weights are rounded."""
        return self._calibration is not None and self._calibration[0].method == "awq"

    def _rounded(
        self,
        stage: str,
        weights: Weights,
        samples: _Streams | None,
        encoder_sets: Sequence[Mapping[str, QwixEncoder]],
    ) -> Sequence[Decoded]:
        """Returns the weights of a stage, for each set of encoders, which are by stored names."""
        if self._scales and samples is not None:
            return self._by_awq(stage, weights, samples.states, encoder_sets)
        calibrated = (
            [{} for _ in encoder_sets] if samples is None else self._by_gptq(stage, weights, samples, encoder_sets)
        )
        out = []
        for encoders, found in zip(encoder_sets, calibrated, strict=True):
            names = [name for name in weights if self._runner.stored_name(name)[0] in encoders]
            out.append(
                {
                    name: (
                        found.get(name)
                        or rounding_of(self._runner, encoders[self._runner.stored_name(name)[0]], name, weights)
                    ).decoded
                    for name in names
                }
            )
        return out

    def _by_awq(
        self, stage: str, weights: Weights, samples: HiddenStates, encoder_sets: Sequence[Mapping[str, QwixEncoder]]
    ) -> list[Decoded]:
        assert self._samples is not None
        assert self._calibration is not None
        sequences, (settings, data) = self._samples, self._calibration
        inputs = stage_inputs(sequences.runner, stage, weights, lambda: sequences.read(samples), data.samples)
        out: list[Decoded] = []
        for encoders in encoder_sets:
            roundings, changed = rounded_by_scales(sequences.runner, stage, weights, inputs, encoders, settings)
            scaled = {name: values.astype(np.float32) for name, values in changed.items()}
            out.append(scaled | {name: rounding.decoded for name, rounding in roundings.items()})
        return out

    def _by_gptq(
        self, stage: str, weights: Weights, samples: _Streams, encoder_sets: Sequence[Mapping[str, QwixEncoder]]
    ) -> list[dict[str, Rounding]]:
        assert self._samples is not None
        assert self._calibration is not None
        sequences, settings = self._samples, self._calibration[0]
        return rounded_by_gptq(
            sequences.runner,
            stage,
            weights,
            partial(sequences.read, samples.states),
            encoder_sets,
            settings,
            samples.states.path.parent,
            None if samples.exact is None else partial(sequences.read, samples.exact),
        )

    def _advanced(self, stage: str, weights: Weights, exact: Weights, samples: _Streams | None) -> _Streams | None:
        """Returns the states after a layer with these weights, and with its exact ones."""
        if samples is None or self._samples is None:
            return None
        following = _Streams(
            self._samples.after(stage, weights, samples.states),
            None if samples.exact is None else self._samples.after(stage, exact, samples.exact),
        )
        samples.remove()
        return following

    def _head(self, encoder_sets: Sequence[Mapping[str, QwixEncoder]], samples: _Streams | None) -> list[Weights]:
        """Returns the weights that make the logits, for each set of encoders. The last states of the samples are no
        longer needed."""
        weights = self._runner.logits_weights()
        if HEAD_STAGE in self._runner.stages:
            heads = [
                _replaced(weights, rounded) for rounded in self._rounded(HEAD_STAGE, weights, samples, encoder_sets)
            ]
        else:
            heads = [weights for _ in encoder_sets]
        if samples:
            samples.remove()
        return heads

    def _costs(
        self,
        plain: HiddenStates,
        variants: Mapping[tuple[int, int], HiddenStates],
        samples: _Streams | None,
    ) -> dict[tuple[int, int], float]:
        """Returns the mean KL of each variant, over all tokens, by the numbers of its group and option."""
        groups, weights, kinds = self._choices.space.groups, self._runner.logits_weights(), list(self._choices.encoders)
        heads = self._head([self._choices.encoders[kind] for kind in kinds], samples)
        places = {key: (states, weights) for key, states in variants.items()}
        for number in self._groups_in(HEAD_STAGE) if HEAD_STAGE in self._runner.stages else ():
            for option in self._quantizing(groups[number]):
                places[number, option] = plain, heads[kinds.index(str(groups[number].options[option]))]
        found: dict[tuple[int, int], list[np.ndarray]] = {key: [] for key in places}
        for sample, ids in enumerate(self._prompts):
            rows = slice(0, len(ids))

            def logp(states: HiddenStates, head: Weights, sample: int = sample, rows: slice = rows) -> np.ndarray:
                return log_softmax(
                    check_finite(self._runner.logits(head, states.read(sample, self._runner.width)[rows]))
                )

            reference = logp(plain, weights)
            for key, (states, head) in places.items():
                found[key].append(divergences([reference], [logp(states, head)]))
        for states in variants.values():
            disk.remove(states.path)
        return {key: float(np.concatenate(kl).mean()) for key, kl in found.items()}


def _replaced(weights: Weights, decoded: Decoded) -> Weights:
    return weights | {name: jnp.asarray(values) for name, values in decoded.items()}


def check_finite(logits: np.ndarray) -> np.ndarray:
    """Returns the logits.

    Raises:
        GateError: one is not finite.
    """
    if not np.isfinite(logits).all():
        raise GateError(
            "the logits of the model on these prompts are not finite: there is nothing to compare",
            hint="`tpuconv verify --compare-hf` says whether the unquantized model is right",
        )
    return logits
