"""Generation of token ids: prefill of the prompts in chunks, then one decode step per token, with a cache that is
updated in place.

`Generator` compiles both programs. `tpuconv generate`, `benchmark` and `fit` use it: they judge the programs that run.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf, prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled
from jax.typing import DTypeLike

from tpuconv.errors import ResourceError, UsageError
from tpuconv.memory import available_memory
from tpuconv.models.common.across import with_room
from tpuconv.models.common.cache import Cache, cache_shardings
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.explicit import on_automatic_mesh
from tpuconv.models.common.layers import MASKED_SCORE

CACHE_SHARE = 0.6
"""The largest share of a CPU machine's memory that a cache may use."""

PREFILL_TOKENS = 2048
"""The most tokens of all sequences in one prefill step. With more, attention scores would not fit in memory."""

LEAST_TEMPERATURE = 1e-5
"""Below this temperature the most likely token is taken, since scaled logits would overflow float32."""

ENDED = -1
"""The id that is yielded for a sequence that has ended."""


def check_work(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Checks that there is something to generate.

    Raises:
        UsageError: there is no prompt, a prompt has no tokens, or `max_new_tokens` is less than 1.
    """
    if not prompts:
        raise UsageError("no prompt is given", hint="give one or more")
    if empty := [number for number, ids in enumerate(prompts, 1) if not ids]:
        raise UsageError(f"prompt {empty[0]} of {len(prompts)} has no tokens", hint="give a text that is not empty")
    if max_new_tokens < 1:
        raise UsageError(f"`max_new_tokens={max_new_tokens}` is less than 1", hint="ask for one new token or more")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only; None for all.
        top_p: sample from the fewest tokens that together have this probability (arXiv:1904.09751).

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        in_range = 0 <= self.temperature < inf and 0 < self.top_p <= 1  # false for NaN
        if not in_range or (self.top_k is not None and self.top_k < 1):
            raise UsageError(
                f"{self} is invalid: temperature >= 0 and finite, top_k >= 1 and 0 < top_p <= 1 are needed"
            )

    def __call__(self, logits_BV: jax.Array, key: jax.Array) -> jax.Array:
        """Returns a token id [B] for each row of logits."""
        if self.temperature < LEAST_TEMPERATURE:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, min(self.top_k, logits_BV.shape[-1]))[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, MASKED_SCORE, logits_BV)
        if self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
            before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # probability of all more likely tokens
            least_B1 = jnp.where(before_BV < self.top_p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, MASKED_SCORE, logits_BV)
        return jax.random.categorical(key, logits_BV).astype(jnp.int32)


TPU_OPTIONS: Mapping[str, str] = {
    "xla_tpu_msa_inefficient_use_to_copy_ratio": "0.6",
    "xla_tpu_enable_dot_strength_reduction": "false",
}
"""XLA options for TPU. Without the first, the compiler copies a layer's complete cache to VMEM, updates one token
there, and writes all of it back; with it, the compiler prefetches only arrays that are read more often than moved.
Without the second, it computes the products of a single token element by element; the matrix unit needs a third of that
time or less."""


def compiler_options(platform: str) -> dict[str, str | bool]:
    """Returns the XLA options that prefill and decode are compiled with on a platform ("tpu", "cpu")."""
    return dict(TPU_OPTIONS) if platform == "tpu" else {}


def prefill_chunk(batch: int, tokens: int) -> int:
    """Returns the tokens of each sequence in one prefill step, for `batch` prompts of `tokens` tokens."""
    return max(1, min(tokens, PREFILL_TOKENS // batch))


def refused_when_compiled(arrays: Sequence[Any]) -> bool:
    """Returns True if a compiled program would refuse one of these arrays, which `jax.jit` takes. With jax 0.10 an
    array on a CPU of less than 8 bits a value reports another layout than the programs compiled for it require."""
    loaded: list[Any] = [x for x in arrays if isinstance(x, jax.Array)]
    packed = {x.dtype: x for x in loaded if jax.dtypes.itemsize_bits(x.dtype) < 8}
    return any(_compiled_format(x).layout != x.format.layout for x in packed.values())


def _compiled_format(x: Any) -> Format:
    """Returns the format of the argument in a program that is compiled for this array."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)  # type: ignore[no-untyped-call]
    compiled = jax.jit(lambda x: x, in_shardings=x.format).lower(shape).compile()
    found: Format = compiled.input_formats[0][0]
    return found


@dataclass(frozen=True)
class JittedProgram:
    """A program that is called by `jax.jit`, with the attributes of a compiled one. jax compiles it once, since calls
    have the shapes and formats of the arguments that it was compiled for.

    Attributes:
        jitted: the function.
        compiled: the compiled program.
        context: makes the context of a call, which sets the mesh.
    """

    jitted: Any
    compiled: Compiled
    context: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any) -> Any:
        with self.context():
            return self.jitted(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


class Generator:
    """A model with its compiled prefill and decode steps, for the devices that hold its weights. A step is compiled
    once for each shape. Where jax would refuse the weights (`refused_when_compiled`), a step is a `JittedProgram`, and
    the cache has the default layout.

    - `decode(batch, length)` returns the compiled (weights, ids [B, 1], cache, key) -> (next ids [B, 1], cache).
    - `prefill(batch, tokens, length)` returns the compiled (weights, ids [B, T], mask [B, T], cache, key) -> the same.
    - `empty_cache(batch, length)` returns the cache of `length` slots that both take.

    Both steps donate the cache. The compiler chooses the cache's device layout for decoding; the weights keep their
    layouts. With `free_layouts` the compiler chooses the weights' layouts too, which are in
    `decode(...).input_formats`. The model may have shapes with shardings (`jax.ShapeDtypeStruct`) instead of arrays:
    then it can be compiled only.

    Args:
        model: a model from `tpuconv.load`.
        sampling: how the next token is chosen.
        cache_dtype: of keys and values; None for the model's dtype.
        free_layouts: let the compiler choose the layouts of the weights.
    """

    image_slots: int = 0
    """The features of images of each sequence that layers attend to."""

    ids_of_step: int = 1
    """The number of ids of each sequence that `decode` takes."""

    most_steps: int = 1
    """The most calls of `decode` that these tokens take."""

    ids_ahead: ClassVar[int] = 0
    """The ids of each sequence after its tokens that `prefill` takes."""

    def __init__(
        self,
        model: Decoder,
        sampling: Sampling = Sampling(),
        cache_dtype: DTypeLike | None = None,
        *,
        free_layouts: bool = False,
    ):
        self.model, self.sampling, self.cache_dtype, self.free_layouts = model, sampling, cache_dtype, free_layouts
        self.graph, state = nnx.split(model)
        state = on_automatic_mesh(state)
        # A flat list, since flattening the state takes as long as a step of a small model.
        self.weights, self.form = jax.tree.flatten(state)
        placement = self.weights[0].sharding
        self.mesh: Any = placement.mesh if isinstance(placement, NamedSharding) else None
        self.replicated = placement if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self.platform = next(iter(placement.device_set)).platform
        self.options = compiler_options(self.platform)
        self.by_jit = refused_when_compiled(self.weights)
        self.forget()

    def forget(self) -> None:
        """Forgets the compiled steps."""
        self.decode, self.prefill = functools.cache(self._decode), functools.cache(self._prefill)
        self._empty_cache = functools.cache(self._empty)

    def _decode(self, batch: int, length: int) -> Compiled | JittedProgram:
        cache = self.cache_shapes(batch, length)
        self._check_memory(cache)
        formats = self._cache_shardings(cache)
        if not self.by_jit:
            formats = jax.tree.map(lambda sharding: Format(Layout.AUTO, sharding), formats)
        given = self._step_input(batch)
        return self._compile(self._decode_step, self._weight_formats(), formats, given, cache=cache)

    def _step_input(self, batch: int) -> Any:
        """Returns the shape of what `decode` takes besides weights, cache and key."""
        return jax.ShapeDtypeStruct((batch, self.ids_of_step), jnp.int32)  # type: ignore[no-untyped-call]

    def _prefill(self, batch: int, tokens: int, length: int) -> Compiled | JittedProgram:
        weights, _, formats, _ = self.decode(batch, length).input_formats[0]
        ids = jax.ShapeDtypeStruct((batch, tokens + self.ids_ahead), jnp.int32)  # type: ignore[no-untyped-call]
        mask = jax.ShapeDtypeStruct((batch, tokens), bool)  # type: ignore[no-untyped-call]
        weights = weights if self.free_layouts else self._weight_formats()
        return self._compile(self._prefill_step, weights, formats, ids, mask, cache=self.cache_shapes(batch, length))

    def _weight_formats(self) -> list[Any]:
        """Returns the formats that `decode` is compiled for; by `jax.jit` those that the weights have."""
        if self.by_jit:
            return [x.sharding for x in self.weights]
        return [Format(Layout.AUTO, x.sharding) if self.free_layouts else x.format for x in self.weights]

    def _decode_step(self, weights: list[jax.Array], ids_B1: jax.Array, cache: Cache, key: jax.Array) -> Any:
        """Returns the function that `decode` compiles."""
        return self._prefill_step(weights, ids_B1, None, cache, key)

    def _prefill_step(
        self, weights: list[jax.Array], ids_BT: jax.Array, mask_BT: Any, cache: Cache, key: jax.Array
    ) -> Any:
        """Returns the function that `prefill` compiles. Returns the next token [B, 1] of each sequence after `ids_BT`,
        and the cache with these tokens."""
        model = self._merged(weights)
        logits_B1V, cache = model(ids_BT, mask_BT, cache=cache, first=-1)
        return self.sampling(logits_B1V[:, 0], jax.random.fold_in(key, cache.used))[:, None], cache

    def _merged(self, weights: list[jax.Array]) -> Any:
        """Returns the model with these weights."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.form, weights))

    def _compile(
        self, step: Callable[..., Any], weights: list[Any], cache_formats: Any, *inputs: Any, cache: Cache
    ) -> Compiled | JittedProgram:
        """Returns a step (weights, *inputs, cache, key) -> (ids, cache) for inputs and a cache of these shapes."""
        jitted = jax.jit(
            step,
            donate_argnums=1 + len(inputs),
            in_shardings=(weights, *[self.replicated] * len(inputs), cache_formats, self.replicated),
            out_shardings=(self.replicated, cache_formats),
            compiler_options=self.options if self.by_jit else None,
        )
        key = jax.eval_shape(jax.random.key, 0)
        with self.on_mesh():
            if self.by_jit:
                return JittedProgram(jitted, jitted.lower(self.weights, *inputs, cache, key).compile(), self.on_mesh)
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.weights]  # type: ignore[no-untyped-call]
            return jitted.lower(shapes, *inputs, cache, key).compile(self.options)

    def on_mesh(self) -> Any:
        """Returns the context of a call, which sets the mesh."""
        return nullcontext() if self.mesh is None else jax.sharding.set_mesh(self.mesh)

    def cache_shapes(self, batch: int, length: int) -> Cache:
        """Returns a cache with shapes instead of arrays."""
        shapes: Cache = jax.eval_shape(lambda: self._new_cache(batch, length))
        return shapes

    def _new_cache(self, batch: int, length: int) -> Cache:
        """Returns an empty cache. Generators of other caches override this."""
        cache = self.model.init_cache(batch, length, self.cache_dtype)
        return with_room(cache, self.image_slots) if self.image_slots else cache

    def _cache_shardings(self, cache: Cache) -> Any:
        return (
            jax.tree.map(lambda _: self.replicated, cache) if self.mesh is None else cache_shardings(cache, self.mesh)
        )

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Returns a cache of `length` slots, none of them in use."""
        cache: Cache = self._empty_cache(batch, length)()
        return cache

    def _empty(self, batch: int, length: int) -> Any:
        formats = self.decode(batch, length).input_formats[0][2]
        make = jax.jit(lambda: self._new_cache(batch, length), out_shardings=formats)
        with self.on_mesh():
            return make.lower().compile(self.options)

    def _check_memory(self, cache: Cache) -> None:
        """Raises ResourceError if the cache needs more than `CACHE_SHARE` of a CPU machine's memory. Other devices
        refuse such an allocation. A CPU grants it, and the process is killed when it writes to the memory."""
        need = sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
        _, memory = available_memory()
        if self.platform == "cpu" and need > CACHE_SHARE * memory:
            raise ResourceError(
                f"the cache of keys and values needs {need / 1e9:.3g} GB, the limit is {CACHE_SHARE:.0%} of this "
                f"machine's {memory / 1e9:.3g} GB",
                hint="use fewer tokens or sequences",
            )

    def read(self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int, key: jax.Array) -> tuple[Any, Cache]:
        """Runs `prefill` on prompts that are padded on the left, in chunks of `prefill_chunk` tokens.

        Args:
            ids_BT, mask_BT: token ids, and where they are not padding.
            new_tokens: slots of the cache after the prompts.
            key: random key for sampling.

        Returns:
            The next token [B, 1] of each prompt, and the cache.
        """
        batch, tokens = ids_BT.shape
        chunk = self.chunk(batch, tokens)
        more = -tokens % chunk  # pads the first chunk on the left, so that all chunks have one shape
        ids_BT, mask_BT = (np.pad(array, ((0, 0), (more, 0))) for array in (ids_BT, mask_BT))
        ids_BT = np.pad(ids_BT, ((0, 0), (0, self.ids_ahead)), constant_values=ENDED)
        length = self.slots(batch, tokens, new_tokens)
        prefill, cache = self.prefill(batch, chunk, length), self.empty_cache(batch, length)
        for start in range(0, tokens + more, chunk):
            columns, and_ahead = slice(start, start + chunk), slice(start, start + chunk + self.ids_ahead)
            ids_B1, cache = prefill(self.weights, ids_BT[:, and_ahead], mask_BT[:, columns], cache, key)
        return ids_B1, cache

    def slots(self, batch: int, tokens: int, new_tokens: int) -> int:
        """Returns the `length` of the cache for prompts of `tokens` tokens and `new_tokens` after them."""
        return tokens + -tokens % self.chunk(batch, tokens) + new_tokens

    def chunk(self, batch: int, tokens: int) -> int:
        """Returns the tokens of each sequence in one prefill step."""
        return prefill_chunk(batch, tokens)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        eos: Collection[int] = (),
        seed: int = 0,
        width: int = 0,
    ) -> Iterator[np.ndarray]:
        """Generates tokens. Yields the next token id [B] of each prompt; `ENDED` after a token of `eos`.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: stop after this number of tokens.
            eos: ids that end a sequence. Generation stops when all sequences have ended.
            seed: of the random key for sampling.
            width: pad prompts to this number of tokens at least: batches of one width are compiled once.

        Raises:
            UsageError: a prompt has no tokens, or `max_new_tokens` is less than 1.
            ResourceError: the cache needs too much memory.
        """
        check_work(prompts, max_new_tokens)
        ended_B = np.zeros(len(prompts), bool)
        for chosen_B in self._chosen(*left_padded(prompts, width), max_new_tokens, seed):
            out_B = np.where(ended_B, ENDED, chosen_B)
            yield out_B
            ended_B |= np.isin(out_B, list(eos))
            if ended_B.all():
                return

    def _chosen(self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int, seed: int) -> Iterator[np.ndarray]:
        """Yields the next token [B] of each prompt, also of those that have ended. Prompts are as for `read`."""
        key = jax.random.key(seed)
        batch, tokens = ids_BT.shape
        decode = self.decode(batch, self.slots(batch, tokens, new_tokens))
        ids_B1, cache = self.read(ids_BT, mask_BT, new_tokens, key)
        for step in range(new_tokens):
            chosen_B1 = ids_B1
            if step + 1 < new_tokens:  # the device computes the next token while the caller processes this one
                ids_B1, cache = decode(self.weights, ids_B1, cache, key)
            yield np.asarray(chosen_B1)[:, 0]


def left_padded(prompts: Sequence[Sequence[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as a batch of ids [B, T] that is padded on the left, and its mask [B, T], True for tokens. T is
    `width`, or the length of the longest prompt if that is more."""
    width = max(width, *map(len, prompts))
    ids_BT = np.array([[0] * (width - len(ids)) + list(ids) for ids in prompts], np.int32)
    mask_BT = np.arange(width) >= np.array([[width - len(ids)] for ids in prompts])
    return ids_BT, mask_BT
