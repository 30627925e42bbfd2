"""The stages of a model as functions of arrays, to be compiled: a layer is a graph and a state of its arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.models.common.observe import observing
from tpuconv.models.common.steps import Step
from tpuconv.quantize.calibrate.columns import LayerColumns
from tpuconv.quantize.values import Coded

Weights = dict[str, jax.Array]
"""The arrays of a stage, by the names that they have in a model of separate layers."""
CodedWeights = Mapping[str, Coded]
"""Quantized parameters of a stage, by these names: what is computed with are the weights that they stand for."""


class LayerKey(NamedTuple):
    """The key of a layer's compiled function: the number of its graph, its columns, its window."""

    graph: int
    columns: LayerColumns
    window: int


def split_state(part: Any, prefix: str, weights: Weights) -> tuple[Any, Any]:
    """Returns the graph of a module, and its state with these arrays."""
    graph, state = nnx.split(part)
    flat = [(p, v.replace(weights[_dotted((prefix, *p))])) for p, v in nnx.to_flat_state(state)]
    return graph, nnx.from_flat_state(flat)


def holding_arrays(part: Any, prefix: str, weights: Weights) -> Any:
    """Returns a module with its arrays."""
    return nnx.merge(*split_state(part, prefix, weights))


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def array_dtypes(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dtype of each array of modules, by its name in a model of separate layers."""
    return {
        _dotted((prefix, *path)): value.dtype
        for prefix, module in modules.items()
        for path, value in nnx.to_flat_state(nnx.state(module))
    }


def by_number(function: Callable[..., Any], graphs: Sequence[Any], number: int, *arguments: Any, window: int) -> Any:
    """Calls a function of a graph with this number of the graph, which may have attributes without a hash."""
    return function(graphs[number], *arguments, window)


def _run(graph: Any, state: Any, x_BTD: jax.Array, step: Any, kv: Any, window: int) -> tuple[jax.Array, Any]:
    result: tuple[jax.Array, Any] = nnx.merge(graph, state)(x_BTD, step, window, kv)
    return result


def run_layer(
    model: Any, graphs: Sequence[Any], state: Any, coded: CodedWeights, states_TW: jax.Array, step: Step, key: LayerKey
) -> jax.Array:
    """Returns the states [T, W] after a layer, whose coded parameters have names within it."""
    decoded = {name: each.decoded for name, each in coded.items()}
    flat = [(path, v.replace(decoded.get(_dotted(path), v[...]))) for path, v in nnx.to_flat_state(state)]
    arguments = key.columns.read(model, states_TW, step)
    y_BTD, result = _run(graphs[key.graph], nnx.from_flat_state(flat), *arguments, key.window)
    return key.columns.replaced(model, states_TW, y_BTD, result)


def pulled_back(
    run: Callable[..., jax.Array],
    state: Any,
    coded: CodedWeights,
    states_TW: jax.Array,
    step: Step,
    gradient_TW: jax.Array,
    key: LayerKey,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the gradients of the scales and of the states before a layer; `run` is `run_layer` of its model."""

    def after(scales: Mapping[str, jax.Array], states_TW: jax.Array) -> jax.Array:
        moved = {name: replace(coded[name], scale=scale) for name, scale in scales.items()}
        return run(state, moved, states_TW, step, key)

    _, pull = jax.vjp(after, scales_of(coded), states_TW)
    return pull(gradient_TW)  # type: ignore[no-any-return]


def scales_of(coded: CodedWeights) -> dict[str, jax.Array]:
    """Returns the scales of parameters, by their names."""
    return {name: each.scale for name, each in coded.items()}


def largest_cached(
    graph: Any, state: Any, x_BTD: jax.Array, step: Any, kv: Any, window: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest magnitudes [K] of the keys, and of the values, that a layer caches."""
    _, cached = _run(graph, state, x_BTD, step, kv, window)
    return jnp.abs(cached.k_BSKH).max((0, 1, 3)), jnp.abs(cached.v_BSKH).max((0, 1, 3))


def observed_inputs(
    graph: Any, state: Any, x_BTD: jax.Array, step: Any, kv: Any, window: int
) -> dict[str, tuple[jax.Array, jax.Array | None]]:
    """Returns the inputs [tokens, I] of a layer's products with the rows of each expert, if there are experts. By a key
    for each input, "0 attn.q.kernel:0 attn.k.kernel:0": the kernels and the axes that are summed over."""
    block = nnx.merge(graph, state)
    names = {id(module): ".".join(map(str, (*path, "kernel"))) for path, module in nnx.iter_modules(block)}
    inputs: dict[tuple[int, tuple[int, ...]], tuple[jax.Array, jax.Array, jax.Array | None, list[str]]] = {}
    products: list[str] = []

    def record(module: nnx.Module, equation: str, x: jax.Array, counts_E: jax.Array | None) -> None:
        operands, out = equation.split("->")
        left, right = operands.split(",")
        summed = [letter for letter in right if letter in left and letter not in out]
        name = names[id(module)]
        products.append(name)
        if any(letter in left and letter in out for letter in right):
            products.append(name)  # a product for each of a batch counts as two
            return
        axes = tuple(left.index(letter) for letter in summed)
        others = [axis for axis in range(x.ndim) if axis not in axes]
        if (id(x), axes) not in inputs:
            rows = jnp.transpose(x, (*others, *axes)).reshape(-1, *(x.shape[axis] for axis in axes))
            inputs[id(x), axes] = x, rows.reshape(len(rows), -1).astype(jnp.float32), counts_E, []  # x keeps its id
        places = ",".join(str(right.index(letter)) for letter in summed)
        inputs[id(x), axes][-1].append(f"{name}:{places}")

    with observing(record):
        block(x_BTD, step, window, kv)
    out = {}
    for i, (_, rows, counts_E, of_input) in enumerate(inputs.values()):
        if once := [key for key in of_input if products.count(key.rpartition(":")[0]) == 1]:
            out[" ".join([f"{i:04d}", *once])] = rows, counts_E
    return out
