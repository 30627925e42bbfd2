"""AWQ (arXiv:2306.00978) and SmoothQuant (arXiv:2211.10438): inputs of products are divided by scales, and the weights
multiplied by them, so that rounding costs the outputs less.

The scales are folded into what makes the inputs: the scale of a norm, or the outputs of another kernel. So the result
is a plain model of the same family. Which arrays can take the scales of an input is not read from the family:
candidates are tried with powers of two, and a fold counts only if the output of the layer stays the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuconv.quantize.calibrate.layer_functions import Weights
from tpuconv.quantize.calibrate.triangular import product

ROWS = 1024
"""Tokens of an input on which scales are compared, evenly spaced over all samples."""
STEPS = 20
"""Exponents that are tried, from 0, which leaves the weights alone, to 1."""
SAME = 1e-4
"""The largest relative difference of a layer's output after an exact fold: rounding in float32 gives 1e-6, a wrong fold
0.1 or more."""
PRODUCERS = (("up.kernel", "down.kernel"), ("v.kernel", "o.kernel"), ("v_b.kernel", "o.kernel"))
"""Kernels whose outputs reach the inputs of another multiplied by something, by the ends of their names."""


@dataclass(frozen=True)
class InputStatistics:
    """The statistics of an input [tokens, I]: mean and largest absolute value of each element, and some rows."""

    mean_I: np.ndarray
    largest_I: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class Fold:
    """An array that takes the scales of an input.

    Attributes:
        divide: the arrays that make the input, by name, for scales [J]: what they become.
        repeat: the scales [I] of the input's elements, from those [J] that can differ.
        mean: [J] of [I]: the mean over the elements that share a scale.
        settled: scales [J] near those that are given, by which the arrays are divided exactly in the dtype that they
            are stored in.
    """

    divide: Callable[[np.ndarray], dict[str, np.ndarray]]
    repeat: Callable[[np.ndarray], np.ndarray]
    mean: Callable[[np.ndarray], np.ndarray]
    settled: Callable[[np.ndarray, np.dtype[Any]], np.ndarray] = lambda s, _: s


def folds(weights: Weights, kernels: Mapping[str, Sequence[int]]) -> Iterator[Fold]:
    """Yields what might make the input of products, from names and shapes.

    Args:
        weights: of the layer.
        kernels: the kernels of the products, by name, with the axes that they sum over.
    """
    name, summed = next(iter(kernels.items()))
    sizes = tuple(weights[name].shape[axis] for axis in summed)
    for norm, value in weights.items():
        if norm.endswith(".scale") and value.shape == sizes:
            for offset in (0.0, 1.0):  # norms of some families store their scale less 1
                yield _norm_fold(weights, norm, offset)
    if len(kernels) > 1:
        return
    for of_producer, of_consumer in PRODUCERS:
        producer = name.removesuffix(of_consumer) + of_producer
        if name.endswith(of_consumer) and producer in weights:
            shape = weights[producer].shape[-len(sizes) :]
            if shape[-1] == sizes[-1] and sizes[0] % shape[0] == 0:
                yield _kernel_fold(weights, producer, shape, sizes)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _norm_fold(weights: Weights, norm: str, offset: float) -> Fold:
    bias = norm.removesuffix("scale") + "bias"

    def divide(s: np.ndarray) -> dict[str, np.ndarray]:
        value = np.asarray(weights[norm])
        out = {norm: (value + offset) / s.reshape(value.shape) - offset}
        return out | ({bias: np.asarray(weights[bias]) / s.reshape(value.shape)} if bias in weights else {})

    def settled(s: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        value = np.asarray(weights[norm])
        stored = divide(s)[norm].astype(dtype).astype(np.float32) + offset
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = ((value + offset) / stored).reshape(s.shape)
        return np.where(np.isfinite(exact) & (exact > 0), exact, s)

    return Fold(divide, _same, _same, settled)


def _kernel_fold(weights: Weights, producer: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Fold:
    """`shape` are the outputs of the producer, (K H) of `v`, where the input has the `sizes` (N H)."""
    bias, groups = producer.removesuffix("kernel") + "bias", sizes[0] // shape[0]

    def divide(s: np.ndarray) -> dict[str, np.ndarray]:
        scales = s.reshape(shape)
        out = {producer: np.asarray(weights[producer]) / scales}
        return out | ({bias: np.asarray(weights[bias]) / scales} if bias in weights else {})

    def repeat(s: np.ndarray) -> np.ndarray:
        return np.repeat(s.reshape(shape), groups, axis=0).reshape(-1)

    def mean(x_I: np.ndarray) -> np.ndarray:
        means: np.ndarray = x_I.reshape(shape[0], groups, *shape[1:]).mean(1).reshape(-1)
        return means

    return Fold(divide, repeat, mean)


def multiplied(kernel: np.ndarray, summed: Sequence[int], scales_I: np.ndarray) -> np.ndarray:
    """Returns a kernel times scales [I] of the axes that it sums over."""
    sizes = [kernel.shape[axis] for axis in summed]
    places = [size if axis in summed else 1 for axis, size in enumerate(kernel.shape)]
    assert list(summed) == sorted(summed)
    out: np.ndarray = kernel * scales_I.reshape(sizes).reshape(places)
    return out


def find_fold(
    weights: Weights, kernels: Mapping[str, Sequence[int]], run: Callable[[Weights], np.ndarray]
) -> Fold | None:
    """Returns the fold of an input that leaves the output of the layer the same, if there is one.

    Args:
        weights: of the layer.
        kernels: all kernels that the input is multiplied with, with the axes that they sum over.
        run: the output of the layer with other weights.
    """
    before = None
    for fold in folds(weights, kernels):
        before = run(weights) if before is None else before
        name, summed = next(iter(kernels.items()))
        width = len(fold.mean(np.ones(int(np.prod([weights[name].shape[axis] for axis in summed])), np.float32)))
        powers = np.exp2(np.random.default_rng(0).integers(-2, 3, width)).astype(np.float32)
        after = run(folded(weights, fold, kernels, powers))
        if np.linalg.norm(after - before) <= SAME * np.linalg.norm(before):
            return fold
    return None


def folded(weights: Weights, fold: Fold, kernels: Mapping[str, Sequence[int]], scales: np.ndarray) -> Weights:
    """Returns the weights of a layer, in float32, with an input divided by scales [J]."""
    changed = fold.divide(scales)
    every = fold.repeat(scales)
    changed |= {name: multiplied(np.asarray(weights[name]), summed, every) for name, summed in kernels.items()}
    return weights | {name: jnp.asarray(value, jnp.float32) for name, value in changed.items()}


def awq_scales(statistics: InputStatistics, kernels: Sequence[np.ndarray], fold: Fold, exponent: float) -> np.ndarray:
    """Returns the scales [J] of AWQ: the mean absolute input to a power, around 1."""
    scales = np.maximum(fold.mean(statistics.mean_I), 1e-6) ** exponent
    return _centered(scales)


def smooth_scales(
    statistics: InputStatistics, kernels: Sequence[np.ndarray], fold: Fold, exponent: float
) -> np.ndarray:
    """Returns the scales [J] of SmoothQuant: the largest input to a power, by the largest weight to 1 less that power.
    `kernels` are matrices [I, O]."""
    largest = np.max([np.abs(kernel).max(1) for kernel in kernels], axis=0)
    inputs, weights = (np.maximum(fold.mean(x), 1e-6) for x in (statistics.largest_I, largest))
    return _centered(inputs**exponent / weights ** (1 - exponent))


def _centered(scales: np.ndarray) -> np.ndarray:
    out: np.ndarray = scales / np.sqrt(scales.max() * scales.min())
    return out.astype(np.float32)


def rounded_by_token(x: np.ndarray) -> np.ndarray:
    """Inputs [tokens, I] rounded to int8 with a scale for each token, as Qwix rounds activations."""
    scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-30) / 127.5
    out: np.ndarray = np.clip(np.rint(x / scale), -128, 127) * scale
    return out.astype(np.float32)


def search(
    statistics: InputStatistics,
    kernels: Sequence[np.ndarray],
    fold: Fold,
    scales_of: Callable[..., np.ndarray],
    round_weights: Callable[[int, np.ndarray], np.ndarray],
    round_inputs: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray | None, list[float], list[float]]:
    """Searches for the power with the smallest squared error of the outputs, of those with which no kernel has a
    larger error than without scales.

    Args:
        statistics: of the input.
        kernels: the matrices [I, O] that are quantized.
        fold: what takes the scales.
        scales_of: `awq_scales` or `smooth_scales`.
        round_weights: rounds kernel i times scales [I], given these: [I, O].
        round_inputs: rounds inputs [tokens, I].

    Returns:
        The scales [J], None to leave the weights alone; the errors of each kernel without scales, and with them.
    """
    want = [product(statistics.rows, kernel) for kernel in kernels]

    def errors(scales: np.ndarray | None) -> list[float]:
        every = np.ones(len(statistics.mean_I), np.float32) if scales is None else fold.repeat(scales)
        x = round_inputs(statistics.rows / every)
        found = (product(x, round_weights(i, every)) - y for i, y in enumerate(want))
        return [float(np.square(lost, dtype=np.float64).sum()) for lost in found]

    before = errors(None)
    best: np.ndarray | None = None
    least = before
    for step in range(1, STEPS + 1):
        scales = scales_of(statistics, kernels, fold, step / STEPS)
        if not np.isfinite(scales).all():
            continue
        now = errors(scales)
        if sum(now) < sum(least) and all(after <= alone for after, alone in zip(now, before, strict=True)):
            best, least = scales, now
    return best, before, least
