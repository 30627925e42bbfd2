"""The layers of a checkpoint's model, run one at a time in float32, and the inputs of their products.

Only one layer's weights are in memory. The hidden states between two layers are the caller's. In some families layers
read more: inputs of their own (Gemma 4, DeepSeek V4), or what an earlier layer hands on (Gemma 4's keys and values,
GLM-5's selected tokens), or what images change. Then it is behind the hidden states of each token, as further columns.
"""

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import ReadArray, read_array
from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.common.seen import Seen, see
from tpuconv.models.common.steps import Step, Steps, windows_of
from tpuconv.models.registry import get_family
from tpuconv.models.stored import model_config
from tpuconv.quantize.calibrate.columns import Columns, LayerColumns, SeenColumns
from tpuconv.quantize.calibrate.data import Sample
from tpuconv.quantize.calibrate.layer_functions import (
    CodedWeights,
    LayerKey,
    Weights,
    array_dtypes,
    by_number,
    holding_arrays,
    largest_cached,
    observed_inputs,
    pulled_back,
    run_layer,
    scales_of,
    split_state,
)

HEAD_STAGE = "lm_head"
"""The stage after the last layer: the product with the head."""


def layer_of(stage: str) -> int:
    """Returns the number of the layer of a stage that is one."""
    return int(stage.rpartition(".")[2])


@dataclass(frozen=True)
class Observed:
    """The input of one or more products.

    Attributes:
        summed_axes: the axes of each kernel that the product sums over, by the kernel's name within the stage.
        x: [tokens, I], I in the order of these axes; or rows sorted by expert.
        counts_E: the rows of each expert; None without experts.
        change: by how much x differs in the model that is not quantized, where errors are propagated; else None.
    """

    summed_axes: Mapping[str, tuple[int, ...]]
    x: np.ndarray
    counts_E: np.ndarray | None
    change: np.ndarray | None = None


class LayerRunner:
    """Runs the stages of a model: its layers, and `HEAD_STAGE`, if it has a matrix of its own.

    Args:
        manifest: the checkpoint, or the planned one of a release, not quantized.
        length: tokens of each sample.
        read: reads its arrays; None for a checkpoint, whose files are read.
        example: a sample with images or sounds, if there are some.

    Raises:
        UnsupportedConfig: some layers run several times, share weights, or read what entered earlier ones; or they
            attend to images, and the example has some.

    Attributes:
        width: columns W of the states of a token between two layers.
        changing: how many of them, the first ones, layers change.
    """

    def __init__(self, manifest: Manifest, length: int, read: ReadArray | None = None, example: Sample | None = None):
        family = get_family(manifest.family)
        config = model_config(manifest)
        is_looped = len(config.executed_layers) > config.num_hidden_layers
        if is_looped or config.weight_sharing_layers or issubclass(family.model_class, LoopedDecoder):
            raise UnsupportedConfig(
                f"the layers of {config.model_type} cannot be calibrated or measured one by one: {config.inseparable}",
                hint="give a config of rules, without calibration",
            )
        self.manifest, self._read_array = manifest, read or partial(read_array, manifest)
        self.model = nnx.eval_shape(lambda: family.model_class(config, dtype=jnp.float32))
        layers = len(self.model.layers)
        self.stages = [f"layers.{i}" for i in range(layers)] + [HEAD_STAGE] * (self.model.lm_head is not None)
        self.windows = windows_of(config)
        pos_BT = jnp.arange(length)[None]
        self.steps = Steps.of(config, pos_BT, pos_BT, 0)
        self._graphs: list[Any] = []
        # Not by nnx.jit, whose modules are in cycles of references: they would hold the arrays of each sample.
        run = partial(run_layer, self.model, self._graphs)
        self._run = jax.jit(run, static_argnames="key")
        self._pull = jax.jit(partial(pulled_back, run), static_argnames="key")
        self._pull_logits = jax.jit(self._pulled_logits)
        self._observe = jax.jit(partial(by_number, observed_inputs, self._graphs), static_argnames=("number", "window"))
        self._largest = jax.jit(partial(by_number, largest_cached, self._graphs), static_argnames=("number", "window"))
        self._sources = [self.model.source_of(i) for i in range(layers)]
        self._plan_columns(length)
        self._seen = self._seen_columns(example)

    def _plan_columns(self, length: int) -> None:
        """Finds the columns of the states: of hidden states, of what each layer hands on, of inputs."""
        ids_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)  # type: ignore[no-untyped-call]
        self._input_of: Sequence[int] | None = None

        def first(ids_BT: jax.Array, model: Any) -> tuple[jax.Array, list[jax.Array]]:
            x_BTD = model.first_input(model.embed(ids_BT), jnp.zeros_like(ids_BT))
            inputs = model.layer_inputs(ids_BT, x_BTD)
            distinct = {id(each): each for each in inputs or ()}
            self._input_of = None if inputs is None else [list(distinct).index(id(each)) for each in inputs]
            return x_BTD, list(distinct.values())

        x_BTD, inputs = nnx.eval_shape(first, ids_BT, self.model)
        self.hidden = self.width = x_BTD.shape[-1]
        self._handed: dict[int, Columns] = {}
        shapes: dict[int, Any] = {}
        for i in sorted({source for source in self._sources if source is not None}):
            graph, state = nnx.split(self.model.layers[i])
            step, kv = self.steps[i]._replace(input=None if self._input_of is None else inputs[self._input_of[i]]), None
            if (source := self._sources[i]) is not None:
                step, kv = self.model.given(step, shapes[source])

            def handed(
                state: Any, x_BTD: jax.Array, step: Any, kv: Any, graph: Any = graph, window: int = self.windows[i]
            ) -> Any:
                result = nnx.merge(graph, state)(x_BTD, step, window, kv)[1]
                return self.model.by_token(self.model.handed_on(result))

            shapes[i] = jax.eval_shape(handed, state, x_BTD, step, kv)
            self._handed[i] = self._columns(shapes[i])
        self.changing = self.width
        self._inputs = [self._columns(each) for each in inputs]

    def _columns(self, shapes: Any) -> Columns:
        """Columns for arrays [1, T, ...]."""
        columns = Columns.of(self.width, shapes)
        self.width = columns.stop
        return columns

    def _seen_columns(self, example: Sample | None) -> SeenColumns | None:
        """Columns for images and sounds; None where the samples are texts."""
        if example is None:
            return None
        if self.model.config.attends_to_images:
            raise UnsupportedConfig(
                f"some layers of {self.model.config.model_type} attend to images, and a calibration keeps no images "
                "from layer to layer",
                hint="calibrate on texts alone: these layers are then rounded to the nearest values",
            )
        encoders = {part: getattr(self.model, part) for part in self.model.config.parts}
        columns = SeenColumns.of(self.width, nnx.eval_shape(partial(self._see, example), encoders))
        self.width = columns.stop
        return columns

    def _see(self, sample: Sample, encoders: Mapping[str, Any]) -> Seen:
        ids_BT = np.asarray(sample.ids)[None]
        return see(self.model.config, encoders, ids_BT, np.ones(ids_BT.shape, bool), sample.features)

    def _layer_columns(self, layer: int) -> LayerColumns:
        """Returns the columns that a layer reads and changes."""
        source = self._sources[layer]
        deep = self._seen.deep if self._seen is not None else ()
        return LayerColumns(
            self.hidden,
            input=None if self._input_of is None else self._inputs[self._input_of[layer]],
            given=None if source is None else self._handed[source],
            handed=self._handed.get(layer),
            deep=deep[layer] if layer < len(deep) else None,
        )

    def _step(self, layer: int, states_TW: np.ndarray) -> Step:
        """Returns the step of a layer, without what its columns hold."""
        if self._seen is None:
            return self.steps[layer]
        pos_BT = self.steps[layer].pos_BT
        return Steps.of(self.model.config, pos_BT, pos_BT, 0, seen=self._seen.read(states_TW))[layer]

    def _arguments(self, layer: int, states_TW: np.ndarray) -> tuple[jax.Array, Step, Any]:
        """Returns the hidden states, the step and the cache of a layer."""
        return self._layer_columns(layer).read(self.model, states_TW, self._step(layer, states_TW))

    def layer(self, stage: str) -> int | None:
        """Returns the number of a stage's layer; None of the head."""
        return None if stage == HEAD_STAGE else layer_of(stage)

    def stored_name(self, name: str) -> tuple[str, int | None]:
        """Returns the parameter of the checkpoint that holds an array of a model of separate layers, and the layer
        within it, if layers are stacked."""
        top, number, *rest = name.split(".")
        if self.manifest.scan_layers and top == "layers":
            prefix, index = self.model.config.stacks.find(int(number))
            return ".".join([prefix, *rest]), index
        return name, None

    def embedded(self, samples: Iterable[Sample]) -> Iterator[np.ndarray]:
        """Yields the states [T, W] of each sample before the first layer."""
        names = ["embed", *self.model.input_modules]
        parts = self.model.config.parts if self._seen is not None else ()
        whole = {
            name: holding_arrays(getattr(self.model, name), name, self._read_input(name)) for name in (*names, *parts)
        }
        model = self._with_modules({name: whole[name] for name in names[1:]})
        for sample in samples:
            ids_BT = jnp.asarray(sample.ids)[None]
            with jax.default_matmul_precision("highest"):
                seen = self._see(sample, {part: whole[part] for part in parts}) if sample.features else None
                ids_BT = model.readable(ids_BT, seen)
                embedded = whole["embed"](ids_BT).astype(jnp.float32)
                x_BTD = model.first_input(embedded, jnp.arange(ids_BT.shape[1])[None], seen)
                inputs = model.layer_inputs(ids_BT, x_BTD)
            states_TW = np.zeros((ids_BT.shape[1], self.width), np.float32)
            states_TW[:, : self.hidden] = x_BTD[0]
            for number, each in zip(self._input_of or (), inputs or (), strict=True):
                self._inputs[number].write(states_TW, each)
            if self._seen is not None:
                self._seen.write(states_TW, seen)
            yield states_TW

    def _read_input(self, name: str) -> Weights:
        """Reads the arrays of a module before the layers: embeddings, which are large, in the dtype that they are
        stored in; all others in the model's dtype, in which functions of them are computed."""
        dtypes = array_dtypes({name: getattr(self.model, name)})
        arrays = {n: self._read_array(n, None) for n in dtypes}
        return {n: jnp.asarray(x if n.endswith(".embedding") else x.astype(dtypes[n])) for n, x in arrays.items()}

    def names(self, stage: str) -> dict[str, Any]:
        """Returns the names of a stage's arrays, with their dtypes in the model; the names of the head include the norm
        before it."""
        return array_dtypes(self._modules(stage))

    def weights(self, stage: str) -> Weights:
        """Reads the arrays of a stage, in float32. What is left of the stage before, in memory until garbage is
        collected since modules are in cycles of references, is freed."""
        gc.collect()
        return self.read(stage)

    def read(self, stage: str, without: Container[str] = ()) -> Weights:
        """Reads the arrays of a stage, in float32, but some by their names."""
        return self._read(self._modules(stage), without)

    def _modules(self, stage: str) -> dict[str, Any]:
        if stage == HEAD_STAGE:
            return {"norm": self.model.norm, HEAD_STAGE: self.model.lm_head}
        return {stage: self.model.layers[self.layer(stage)]}

    def _read(self, modules: Mapping[str, Any], without: Container[str] = ()) -> Weights:
        dtypes = {name: dtype for name, dtype in array_dtypes(modules).items() if name not in without}
        return {n: jnp.asarray(self._read_array(*self.stored_name(n)).astype(dtype)) for n, dtype in dtypes.items()}

    def observe(self, stage: str, weights: Weights, x_TD: np.ndarray) -> list[Observed]:
        """Runs a stage on the states [T, W] of one sample. Returns the inputs of its products with kernels. A kernel
        that has two of them is left out, and one whose product is for each of a batch of heads."""
        if stage == HEAD_STAGE:
            norm = holding_arrays(self.model.norm, "norm", weights)
            with jax.default_matmul_precision("highest"):
                x_BTD = norm(jnp.asarray(x_TD[:, : self.hidden])[None])
                return [Observed({"kernel": (0,)}, np.asarray(x_BTD[0]), None)]
        i = layer_of(stage)
        number, state = self._numbered(*split_state(self.model.layers[i], stage, weights))
        with jax.default_matmul_precision("highest"):
            seen = self._observe(number, state, *self._arguments(i, x_TD), window=self.windows[i])
        out = []
        for key, (x, counts_E) in seen.items():
            products = (product.rpartition(":") for product in key.split(" ")[1:])
            axes = {name: tuple(map(int, summed.split(","))) for name, _, summed in products}
            out.append(Observed(axes, np.asarray(x), None if counts_E is None else np.asarray(counts_E)))
        return out

    def seen(self, stage: str) -> set[str]:
        """Returns the names of the kernels whose inputs `observe` returns. Nothing is computed."""
        if stage == HEAD_STAGE:
            return {f"{HEAD_STAGE}.kernel"}
        return {
            f"{stage}.{product.rpartition(':')[0]}" for key in self._shapes(stage) for product in key.split(" ")[1:]
        }

    def input_bytes(self, stage: str) -> tuple[int, int]:
        """Returns the bytes of the inputs that `observe` returns of a sample, and the bytes of all their Hessians [I,
        I]. Nothing is computed."""
        if stage == HEAD_STAGE:
            return 4 * len(self.steps[0].pos_BT[0]) * self.hidden, 4 * self.hidden**2
        found = self._shapes(stage).values()
        hessians = sum(4 * rows.shape[1] ** 2 * (1 if counts_E is None else len(counts_E)) for rows, counts_E in found)
        return sum(4 * rows.size for rows, _ in found), hessians

    def _shapes(self, stage: str) -> Mapping[str, tuple[Any, Any]]:
        """Returns the shapes of what a stage's layer shows; see `_observe`."""
        i = layer_of(stage)
        graph, state = nnx.split(self.model.layers[i])
        nothing_TW = np.zeros((self.steps[i].pos_BT.shape[1], self.width), np.float32)
        shapes: Mapping[str, tuple[Any, Any]] = jax.eval_shape(
            lambda state, x_BTD, step, kv: observed_inputs(graph, state, x_BTD, step, kv, self.windows[i]),
            state,
            *self._arguments(i, nothing_TW),
        )
        return shapes

    def run(self, stage: str, weights: Weights, x_TD: np.ndarray, coded: CodedWeights | None = None) -> np.ndarray:
        """Returns the states [T, W] after a layer. Of `coded` parameters no weights are needed."""
        return np.asarray(self._called(self._run, stage, weights, x_TD, coded or {}))

    def pulled(
        self, stage: str, weights: Weights, x_TD: np.ndarray, coded: CodedWeights, gradient_TW: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the gradients of a layer's scales, and of the states [T, W] before it, from the gradient of the
        states after it."""
        scales, before_TW = self._called(self._pull, stage, weights, x_TD, coded, gradient_TW)
        return {f"{stage}.{name}": np.asarray(each) for name, each in scales.items()}, np.asarray(before_TW)

    def _called(
        self,
        function: Callable[..., Any],
        stage: str,
        weights: Weights,
        x_TD: np.ndarray,
        coded: CodedWeights,
        *others: np.ndarray,
    ) -> Any:
        """Calls `_run_columns` or `_pulled`, compiled."""
        i = layer_of(stage)
        nothing = dict.fromkeys(coded, jnp.zeros(()))
        number, state = self._numbered(*split_state(self.model.layers[i], stage, weights | nothing))
        within = {name.removeprefix(f"{stage}."): each for name, each in coded.items()}
        key = LayerKey(number, self._layer_columns(i), self.windows[i])
        with jax.default_matmul_precision("highest"):
            return function(state, within, x_TD, self._step(i, x_TD), *others, key=key)

    def largest_cached(self, stage: str, weights: Weights, x_TD: np.ndarray) -> list[np.ndarray]:
        """Returns the largest magnitudes [K] of the keys, and of the values, that a layer caches of one sample: of each
        head, after norms and rotary positions."""
        i = layer_of(stage)
        number, state = self._numbered(*split_state(self.model.layers[i], stage, weights))
        with jax.default_matmul_precision("highest"):
            largest = self._largest(number, state, *self._arguments(i, x_TD), window=self.windows[i])
        return list(map(np.asarray, largest))

    def _numbered(self, graph: Any, state: Any) -> tuple[int, Any]:
        """Returns the number of a graph, by which a function is compiled once for equal ones, and the state. A graph
        may have attributes without a hash, and cannot be a static argument then."""
        if graph not in self._graphs:
            self._graphs.append(graph)
        return self._graphs.index(graph), state

    def logits_weights(self) -> Weights:
        """Reads what makes logits of the last hidden states, in float32: the norm, and the head or, if it is tied, the
        embedding."""
        modules = {"norm": self.model.norm}
        modules |= {"embed": self.model.embed} if self.model.lm_head is None else {HEAD_STAGE: self.model.lm_head}
        modules |= {name: getattr(self.model, name) for name in self.model.output_modules}
        return self._read(modules)

    def logits(self, weights: Weights, x_TD: np.ndarray) -> np.ndarray:
        """Returns the logits [T, V] of the states [T, W] after the last layer, by the arrays of `logits_weights`."""
        with jax.default_matmul_precision("highest"):
            return np.asarray(self._logits(weights, x_TD))

    def _logits(self, weights: Weights, x_TD: np.ndarray | jax.Array) -> jax.Array:
        outer = {name: holding_arrays(getattr(self.model, name), name, weights) for name in self.model.output_modules}
        x_BTD = holding_arrays(self.model.norm, "norm", weights)(jnp.asarray(x_TD[:, : self.hidden])[None])
        if self.model.lm_head is None:
            logits_BTV = holding_arrays(self.model.embed, "embed", weights).attend(x_BTD)
        else:
            logits_BTV = holding_arrays(self.model.lm_head, HEAD_STAGE, weights)(x_BTD)
        adjusted_BTV: jax.Array = self._with_modules(outer).adjusted(logits_BTV)
        return adjusted_BTV.astype(jnp.float32)[0]

    def divergence(
        self, weights: Weights, coded: CodedWeights, x_TD: np.ndarray, exact_TD: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
        """Returns the mean KL divergence of the tokens of a sample in nats, the gradients of the scales of the head,
        and the gradient of the states.

        Args:
            weights: from `logits_weights`.
            coded: the head, if it is quantized.
            x_TD: the states [T, W] after the last layer.
            exact_TD: the same in the model that is not quantized.
        """
        with jax.default_matmul_precision("highest"):
            kl, (scales, before_TW) = self._pull_logits(weights, coded, x_TD, exact_TD)
        return float(kl), {name: np.asarray(each) for name, each in scales.items()}, np.asarray(before_TW)

    def _pulled_logits(
        self, weights: Weights, coded: CodedWeights, x_TD: jax.Array, exact_TD: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
        want_TV = jax.nn.log_softmax(self._logits(weights, exact_TD))

        def kl(scales: Mapping[str, jax.Array], x_TD: jax.Array) -> jax.Array:
            decoded = {name: replace(coded[name], scale=scale).decoded for name, scale in scales.items()}
            have_TV = jax.nn.log_softmax(self._logits(weights | decoded, x_TD))
            return (jnp.exp(want_TV) * (want_TV - have_TV)).sum(-1).mean()

        return jax.value_and_grad(kl, (0, 1))(scales_of(coded), x_TD)

    def _with_modules(self, modules: Mapping[str, Any]) -> Any:
        """Returns the model with modules that have arrays."""
        model = nnx.merge(*nnx.split(self.model))  # a module cannot be changed where a function is traced
        for name, module in modules.items():
            setattr(model, name, module)
        return model
