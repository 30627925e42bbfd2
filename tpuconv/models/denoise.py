"""Generation of token ids in canvases, by a model that makes blocks of random tokens better step by step (`denoise` of
DiffusionGemma).

A step samples each token of the canvas from the logits, and accepts the samples that are certain together; the other
places get random tokens again (arXiv:2505.24857). Its logits are an input of the next step. When the most likely tokens
are certain and do not change any more, they are the text, and the cache gets them before the next canvas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tpuconv.errors import ConfigError, UsageError
from tpuconv.jsonfile import Optional, check
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.generate import Generator, Sampling, prefill_chunk
from tpuconv.models.seeing import SeeingGenerator
from tpuconv.sources.config import read_json

MOST_STEPS = 1 << 31
"""A device counts them in int32."""
GENERATION_CONFIG = "generation_config.json"
OPTIONAL_NUMBER, OPTIONAL_COUNT = Optional((float, int, None)), Optional((int, None))
SCHEDULE_KEYS = {
    "max_denoising_steps": OPTIONAL_COUNT,
    "sampler_config": Optional(({"entropy_bound": OPTIONAL_NUMBER}, None)),
    "t_min": OPTIONAL_NUMBER,
    "t_max": OPTIONAL_NUMBER,
    "stability_threshold": OPTIONAL_COUNT,
    "confidence_threshold": OPTIONAL_NUMBER,
}
"""The schema of generation_config.json: only these keys are read."""


@dataclass(frozen=True)
class Denoising:
    """How a canvas is denoised. transformers and DiffusionGemma's release have these defaults.

    Attributes:
        steps: the most steps of a canvas.
        entropy_bound: in nats: the samples of lowest entropy are accepted while the entropies of those before add up to
            this at most.
        coldest, hottest: the divisors of the logits; it falls from `hottest` in equal steps, and would be `coldest`
            after the last one.
        stable_steps: how many steps in a row the most likely tokens have to stay the same.
        confidence: the mean entropy of the canvas, in nats, below which it is finished.

    Raises:
        UsageError: a value is out of range.
    """

    steps: int = 48
    entropy_bound: float = 0.1
    coldest: float = 0.4
    hottest: float = 0.8
    stable_steps: int = 1
    confidence: float = 0.005

    def __post_init__(self) -> None:
        counts_in_range = 1 <= self.steps < MOST_STEPS and self.stable_steps >= 0
        in_range = 0 <= self.coldest < self.hottest and self.entropy_bound > 0 and self.confidence > 0  # false for NaN
        if not (counts_in_range and in_range):
            raise UsageError(
                f"{self} is invalid: 1 <= steps < {MOST_STEPS}, 0 <= coldest < hottest, stable_steps >= 0, "
                "entropy_bound > 0 and confidence > 0 are needed"
            )

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Returns what the generation_config.json of a folder says.

        Raises:
            ConfigError: the file cannot be read, or its values are malformed.
            UsageError: a value is out of range.
        """
        path = folder / GENERATION_CONFIG
        raw = check(read_json(path, ConfigError), SCHEDULE_KEYS, str(path), ConfigError) if path.exists() else {}
        named = {
            "steps": raw.get("max_denoising_steps"),
            "entropy_bound": (raw.get("sampler_config") or {}).get("entropy_bound"),
            "coldest": raw.get("t_min"),
            "hottest": raw.get("t_max"),
            "stable_steps": raw.get("stability_threshold"),
            "confidence": raw.get("confidence_threshold"),
        }
        return cls(**{name: value for name, value in named.items() if value is not None})

    def temperature(self, left: jax.Array) -> jax.Array:
        """Returns the divisor of the logits, of a canvas that has this number of steps left."""
        return self.coldest + (self.hottest - self.coldest) * (left / self.steps)

    def accepted(self, entropies_BC: jax.Array) -> jax.Array:
        """Returns which samples [B, C] of these entropies, in nats, are accepted."""
        order_BC = jnp.argsort(entropies_BC, axis=-1)
        sorted_BC = jnp.take_along_axis(entropies_BC, order_BC, axis=-1)
        before_BC = jnp.cumsum(sorted_BC, axis=-1) - sorted_BC
        return jnp.put_along_axis(
            jnp.zeros(order_BC.shape, bool), order_BC, before_BC <= self.entropy_bound, axis=-1, inplace=False
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Canvas:
    """A canvas between two steps.

    Attributes:
        ids_BC: its tokens.
        best_BC: the most likely tokens of the last step; -1 before the first.
        mean_BCD: the mean embeddings by the logits of the last step; zeros before the first.
        same_B: for how many steps in a row the most likely tokens have been the same.
        ended_B: whether it is finished.
        left: the number [1] of steps that are left. Of another shape than `used` of a cache, for which XLA would take
            its memory.
    """

    ids_BC: Any
    best_BC: Any
    mean_BCD: Any
    same_B: Any
    ended_B: Any
    left: Any


def entropies(logits_BCV: jax.Array) -> jax.Array:
    """Returns the entropies [B, C] in nats of tokens with these logits."""
    logp_BCV = jax.nn.log_softmax(logits_BCV)
    return -jnp.sum(jnp.exp(logp_BCV) * logp_BCV, axis=-1)


class Denoiser(Generator):
    """A `Generator` of a model that writes canvases.

    - `decode(batch, length)` returns the compiled (weights, canvas, cache, key) -> (canvas, cache), one step; the cache
      has the text before the canvas.

    Args:
        model: a model from `tpuconv.load`.
        sampling: how a canvas is denoised.
        cache_dtype, free_layouts: as of `Generator`.

    Raises:
        UsageError: `sampling` has a temperature, or chooses among the most likely tokens.
    """

    def __init__(
        self,
        model: Any,
        sampling: Sampling | Denoising = Denoising(),
        cache_dtype: DTypeLike | None = None,
        *,
        free_layouts: bool = False,
    ):
        self.denoising = denoising_by(sampling)
        super().__init__(model, Sampling(), cache_dtype, free_layouts=free_layouts)
        self.ids_of_step, self.most_steps = model.config.canvas_length, self.denoising.steps

    def new_canvas(self, ids_BC: np.ndarray) -> Canvas:
        """Returns a canvas before its first step."""
        batch, width = ids_BC.shape
        embedding = self.model.embed.embedding
        return Canvas(
            ids_BC.astype(np.int32),
            np.full((batch, width), -1, np.int32),
            np.zeros((batch, width, self.model.config.hidden_size), embedding.dtype),
            np.zeros(batch, np.int32),
            np.zeros(batch, bool),
            np.full(1, self.denoising.steps, np.int32),
        )

    def _step_input(self, batch: int) -> Any:
        return jax.eval_shape(lambda: self.new_canvas(np.zeros((batch, self.ids_of_step), np.int32)))

    def _decode_step(  # type: ignore[override]
        self, weights: list[jax.Array], canvas: Canvas, cache: Cache, key: jax.Array
    ) -> Any:
        model, how = self._merged(weights), self.denoising
        left = canvas.left[0]
        sample_key, random_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, cache.used), left))
        logits_BCV, cache = model.denoise(canvas.ids_BC, cache, canvas.mean_BCD)
        logits_BCV /= how.temperature(left)
        entropies_BC = entropies(logits_BCV)
        sampled_BC = jax.random.categorical(sample_key, logits_BCV).astype(jnp.int32)
        random_BC = jax.random.randint(random_key, sampled_BC.shape, 0, logits_BCV.shape[-1], jnp.int32)
        best_BC = jnp.argmax(logits_BCV, axis=-1).astype(jnp.int32)
        is_same_B = jnp.all(best_BC == canvas.best_BC, axis=-1)
        same_B = jnp.where(is_same_B, canvas.same_B + 1, 0)
        ends_B = (same_B >= how.stable_steps) & (entropies_BC.mean(axis=-1) < how.confidence)

        def unless_ended(new_BC: jax.Array, old_BC: jax.Array) -> jax.Array:
            return jnp.where(canvas.ended_B[:, None], old_BC, new_BC)

        new = Canvas(
            unless_ended(jnp.where(how.accepted(entropies_BC), sampled_BC, random_BC), canvas.ids_BC),
            unless_ended(best_BC, canvas.best_BC),
            model.mean_embeddings(logits_BCV),
            same_B,
            canvas.ended_B | ends_B,
            canvas.left - 1,
        )
        return new, cache

    def steps(
        self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int, seed: int = 0
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yields the most likely tokens of each step [B, C], and how many of them are text: all after the last step of
        a canvas, none after others; first none of the prefill. Ends with `new_tokens`. Prompts are as for `read`."""
        (batch, tokens), width = ids_BT.shape, self.ids_of_step
        key, rng = jax.random.key(seed), np.random.default_rng(seed)
        length = self.slots(batch, tokens, new_tokens)
        decode = self.decode(batch, length)
        ids_B1, cache = self.read(ids_BT, mask_BT, new_tokens, key)
        yield np.asarray(ids_B1)[:, :0], 0
        best_BC = np.zeros((batch, 0), np.int32)
        for done in range(0, new_tokens, width):
            if done:
                cache = self._with_canvas(cache, best_BC, length, key)
            canvas = self.new_canvas(rng.integers(0, self.model.config.vocab_size, (batch, width), np.int32))
            for left in reversed(range(self.denoising.steps)):
                canvas, cache = decode(self.weights, canvas, cache, key)
                best_BC = np.asarray(canvas.best_BC)
                is_text = not left or bool(np.asarray(canvas.ended_B).all())
                yield best_BC, min(width, new_tokens - done) if is_text else 0
                if is_text:
                    break

    def _with_canvas(self, cache: Cache, ids_BC: np.ndarray, length: int, key: jax.Array) -> Cache:
        """Returns the cache, of `length` slots, with the tokens of a canvas."""
        batch, width = ids_BC.shape
        chunk = next(n for n in range(prefill_chunk(batch, width), 0, -1) if width % n == 0)
        prefill, mask_BT = self.prefill(batch, chunk, length), np.ones((batch, chunk), bool)
        for start in range(0, width, chunk):
            _, cache = prefill(self.weights, ids_BC[:, start : start + chunk], mask_BT, cache, key)
        return cache

    def slots(self, batch: int, tokens: int, new_tokens: int) -> int:
        """Returns the `length` of the cache: new tokens are complete canvases."""
        return super().slots(batch, tokens, new_tokens + -new_tokens % self.ids_of_step)

    def _chosen(self, ids_BT: np.ndarray, mask_BT: np.ndarray, new_tokens: int, seed: int) -> Iterator[np.ndarray]:
        for best_BC, count in self.steps(ids_BT, mask_BT, new_tokens, seed):
            yield from best_BC.T[:count]


class SeeingDenoiser(SeeingGenerator, Denoiser):
    """A `Denoiser` of prompts with images."""


def denoising_by(sampling: Sampling | Denoising, folder: Path | None = None) -> Denoising:
    """Returns how a canvas is denoised: as the generation_config.json of a folder says, or as `Denoising` does.

    Raises:
        UsageError: `sampling` has a temperature, or chooses among the most likely tokens.
        ConfigError: see `Denoising.from_folder`.
    """
    if isinstance(sampling, Denoising):
        return sampling
    if sampling != Sampling():
        raise UsageError(
            "this model chooses all tokens of a canvas together, by a schedule of temperatures of its own",
            hint=f"leave out `temperature=`, `top_k=` and `top_p=`; {GENERATION_CONFIG} has the schedule",
        )
    return Denoising() if folder is None else Denoising.from_folder(folder)


def choice_of(config: DecoderConfig, sampling: Sampling, folder: Path) -> Sampling | Denoising:
    """Returns how the model of a config chooses tokens: as `sampling` says, or of one that writes canvases, as the
    generation_config.json of a folder does. Errors are as of `denoising_by`."""
    return denoising_by(sampling, folder) if writes_canvases(config) else sampling


def writes_canvases(config: DecoderConfig) -> bool:
    """Returns whether the model of a config writes canvases."""
    return config.canvas_length > 0
