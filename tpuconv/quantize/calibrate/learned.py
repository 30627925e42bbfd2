"""Learned rounding of the weights of a layer, by signed gradients (arXiv:2309.05516). Each weight learns an offset of
at most half a step, and each group a factor of its scale; the loss is the squared error of the output of the layer.

It begins with the quantized values and scales that GPTQ leaves. The layer runs on the inputs that it has in the
quantized model, and its target is the output that the float model has on the same text: so a layer makes up for the
errors of the layers before it, too. Every step takes `SAMPLES_A_STEP` samples, one after the other, so that the
activations of one sample are in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.quantize.calibrate.layers import LayerRunner, Weights
from tpuconv.quantize.calibrate.rounding import Rounding
from tpuconv.quantize.config import INTEGER_QTYPES, QTYPES

SAMPLES_A_STEP = 4
"""Samples whose gradients are added up before a step."""
OFFSET_RATE = 1.0
"""The first step of an offset times the number of steps: all steps together move it by half of this."""
FACTOR_RATE = 0.2
"""The same of a factor."""
LEAST_FACTOR, MOST_FACTOR = 0.5, 1.2
NEARLY_HALF = 0.49
"""The most that a weight is away from its first quantized value, in steps."""

Learned = dict[str, dict[str, jax.Array]]
"""The offsets and factors of each parameter, by its name in a layer."""
Pair = tuple[np.ndarray, np.ndarray]
"""The states [T, W] before a layer in the quantized model, and those after it in the float model."""
Pairs = Callable[[int], Pair]
"""Returns the pair of a sample."""


@dataclass(frozen=True)
class BlockError:
    """The mean squared error of the output of a layer, over all samples, before and after it has learned."""

    before: float
    after: float

    def to_json(self) -> dict[str, float]:
        """Returns both."""
        return {"before": self.before, "after": self.after}


class BlockLearner:
    """Learns the rounding of the layers of a model, one by one.

    Args:
        runner: of the model.
        steps: of each layer.
        samples: how many samples there are.
    """

    def __init__(self, runner: LayerRunner, steps: int, samples: int):
        self.runner, self.steps, self.samples = runner, steps, samples
        static = ("number", "window", "kinds")
        self._gradient = jax.jit(partial(_by_layer, _gradient, runner), static_argnames=static)
        self._error = jax.jit(partial(_by_layer, _error, runner), static_argnames=static)
        self._step = jax.jit(_stepped, donate_argnums=(0,))

    def learn(self, stage: str, weights: Weights, roundings: Mapping[str, Rounding], pairs: Pairs) -> BlockError | None:
        """Replaces quantized values and scales of a layer, unless the error of its output grows.

        Args:
            stage: the name of the layer.
            weights: of the layer, in float.
            roundings: its quantized parameters as GPTQ leaves them, by their names in a model of separate layers.
            pairs: the samples.

        Returns:
            The errors; None if no parameter of the layer has a type that is learned.
        """
        chosen = {name: rounding for name, rounding in roundings.items() if is_learned(rounding)}
        if not chosen:
            return None
        prefix = f"{stage}."
        fixed, kinds = {}, []
        for name, rounding in sorted(chosen.items()):
            own, kind = _begin(rounding)
            fixed[name.removeprefix(prefix)] = own
            kinds.append((name.removeprefix(prefix), kind))
        others = {name: jnp.asarray(r.decoded) for name, r in roundings.items() if name not in chosen}
        plain = {n.removeprefix(prefix): x for n, x in (weights | others).items() if n not in chosen}
        first: Learned = {
            name: {"offset": jnp.zeros_like(own["latent"]), "factor": jnp.ones_like(own["scale"])}
            for name, own in fixed.items()
        }
        given = {"number": self.runner.graph_number(stage), "window": self.runner.window(stage), "kinds": tuple(kinds)}
        learned = self._learned(stage, first, (fixed, plain), pairs, given)
        before, after = (self._total(stage, x, (fixed, plain), pairs, given) for x in (first, learned))
        if not after < before:
            return BlockError(before, before)
        for name, rounding in chosen.items():
            key = name.removeprefix(prefix)
            values, scale = jax.jit(_rounded, static_argnums=2)(learned[key], fixed[key], dict(kinds)[key])
            rounding.replace(np.asarray(values).astype(np.int8).view(np.uint8), np.asarray(scale))
        return BlockError(before, after)

    def _learned(self, stage: str, first: Learned, arrays: Any, pairs: Pairs, given: Mapping[str, Any]) -> Learned:
        learned: Learned = jax.tree.map(jnp.copy, first)
        for step, samples in enumerate(self._batches(self.runner.layer(stage) or 0)):
            total = None
            for sample in samples:
                gradient = self._gradient(learned, *arrays, *self._arguments(stage, pairs(sample)), **given)
                total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
            learned = self._step(learned, total, (self.steps - step) / self.steps**2)
        return learned

    def _batches(self, seed: int) -> Iterator[Sequence[int]]:
        """Yields the samples of each step: all samples in a random order, then again in another one."""
        rng = np.random.default_rng(seed)
        left: list[int] = []
        for _ in range(self.steps):
            while len(left) < min(SAMPLES_A_STEP, self.samples):
                left += rng.permutation(self.samples).tolist()
            yield left[:SAMPLES_A_STEP]
            left = left[SAMPLES_A_STEP:]

    def _total(self, stage: str, learned: Learned, arrays: Any, pairs: Pairs, given: Mapping[str, Any]) -> float:
        """Returns the mean squared error over all samples."""
        errors = [
            float(self._error(learned, *arrays, *self._arguments(stage, pairs(sample)), **given))
            for sample in range(self.samples)
        ]
        return float(np.mean(errors))

    def _arguments(self, stage: str, pair: Pair) -> tuple[Any, ...]:
        states_TW, target_TW = pair
        return jnp.asarray(target_TW[:, : self.runner.hidden])[None], *self.runner.arguments(stage, states_TW)


def is_learned(rounding: Rounding) -> bool:
    """Returns True if a parameter can learn: it has integers without zero points."""
    return rounding.encoder.quant.qtype in INTEGER_QTYPES and not rounding.zero_points


def _begin(rounding: Rounding) -> tuple[dict[str, jax.Array], tuple[int, str]]:
    """Returns the arrays of a parameter that stay as they are, the weights in steps and the scales; and the number of
    integers below zero with the dtype of the scales."""
    scale = np.asarray(rounding.scale, np.float32)
    half = 1 << (int(QTYPES[rounding.encoder.quant.qtype]) - 1)
    values = rounding.qbytes.view(np.int8).astype(np.float32)
    steps = rounding.values / _spread(scale, values.shape)
    latent = values + np.clip(steps - values, -NEARLY_HALF, NEARLY_HALF)
    return {"latent": jnp.asarray(latent), "scale": jnp.asarray(scale)}, (half, rounding.encoder.scale_dtype.name)


def _spread(scale: Any, shape: Sequence[int]) -> Any:
    """Returns scales, each repeated for all weights of its group."""
    xp = np if isinstance(scale, np.ndarray) else jnp
    pairs = [(count, n // count) for n, count in zip(shape, scale.shape, strict=True)]
    wide = scale.reshape([size for count, _ in pairs for size in (count, 1)])
    return xp.broadcast_to(wide, [size for pair in pairs for size in pair]).reshape(shape)


def _straight(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns the rounded values, with the gradient of the values before."""
    return x + jax.lax.stop_gradient(rounded - x)


def _rounded(
    learned: Mapping[str, jax.Array], fixed: Mapping[str, jax.Array], kind: tuple[int, str]
) -> tuple[jax.Array, jax.Array]:
    """Returns the quantized values and the scales of a parameter, in float32."""
    half, dtype = kind
    scale = fixed["scale"] * learned["factor"]
    scale = _straight(scale, scale.astype(dtype).astype(jnp.float32))
    latent = fixed["latent"]
    steps = latent * _spread(fixed["scale"] / scale, latent.shape) + learned["offset"]
    steps = jnp.clip(steps, -half - NEARLY_HALF, half - 1 + NEARLY_HALF)  # before rounding: values at an end can move
    return _straight(steps, jnp.round(steps)), scale


def _error(
    output: Callable[..., jax.Array],
    learned: Learned,
    fixed: Mapping[str, Mapping[str, jax.Array]],
    plain: Weights,
    target_BTD: jax.Array,
    *arguments: Any,
    kinds: Sequence[tuple[str, tuple[int, str]]],
) -> jax.Array:
    weights = dict(plain)
    for name, kind in kinds:
        values, scale = _rounded(learned[name], fixed[name], kind)
        weights[name] = values * _spread(scale, values.shape)
    return jnp.mean(jnp.square(output(weights, *arguments) - target_BTD))


def _gradient(output: Callable[..., jax.Array], learned: Learned, *arguments: Any, kinds: Any) -> Learned:
    gradient: Learned = jax.grad(lambda learned: _error(output, learned, *arguments, kinds=kinds))(learned)
    return gradient


def _by_layer(
    function: Callable[..., Any], runner: LayerRunner, *arguments: Any, number: int, window: int, kinds: Any
) -> Any:
    with jax.default_matmul_precision("highest"):
        return function(runner.output_of(number, window), *arguments, kinds=kinds)


def _stepped(learned: Learned, gradient: Learned, rate: Any) -> Learned:
    """Moves everything that is learned by the sign of its gradient."""
    return {
        name: {
            "offset": jnp.clip(own["offset"] - OFFSET_RATE * rate * jnp.sign(gradient[name]["offset"]), -0.5, 0.5),
            "factor": jnp.clip(
                own["factor"] - FACTOR_RATE * rate * jnp.sign(gradient[name]["factor"]), LEAST_FACTOR, MOST_FACTOR
            ),
        }
        for name, own in learned.items()
    }
