"""The inputs of layers besides the hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common.across import Across
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.layers import is_visible, mrope_cos_sin, rope_cos_sin
from tpuconv.models.common.seen import Seen

NO_WINDOW = 2**31 - 1
"""The window of a layer without a sliding window: the largest int32, the dtype of positions."""


def windows_of(config: DecoderConfig) -> list[int]:
    """Returns the window of each layer, for layers without one `NO_WINDOW`."""
    return [min(window or NO_WINDOW, NO_WINDOW) for window in config.windows]


Entered = dict[int, jax.Array | None]
"""The hidden states [B, T, D] that enter layers, by the numbers of the layers; the number of layers stands for the
output of the last one. None until a layer runs."""


CANVAS = "canvas"
"""In place of the layers in which tokens of an image see each other: the tokens of the call are a canvas, and do so."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ImageBlocks:
    """The images of the call's tokens and of all keys.

    Attributes:
        block_BT, block_BS: number of the image that a token is of, -1 for none.
        layers: as `DecoderConfig.sees_images`; or `CANVAS`.
    """

    block_BT: jax.Array
    block_BS: jax.Array
    layers: str = field(metadata={"static": True})

    def seen(self, window: jax.Array | int, distance_BTS: jax.Array) -> jax.Array:
        """Returns which keys [B, T, S] a token sees because they are of its own image, in a layer with this window."""
        is_same_BTS = (self.block_BT[:, :, None] == self.block_BS[:, None, :]) & (self.block_BT[:, :, None] >= 0)
        if self.layers in ("beyond", CANVAS):
            return is_same_BTS
        is_near_BTS = distance_BTS < window
        return is_same_BTS & (is_near_BTS if self.layers == "all" else is_near_BTS & (window < NO_WINDOW))


class Step(NamedTuple):
    """The inputs of a layer besides the hidden states. All but `cos_sin` are the same for all layers of one call.

    Attributes:
        pos_BT: positions of the call's tokens, -1 for padding.
        pos_BS: positions of all keys, including the keys of the cache.
        slot: slot of the cache for the first token.
        cos_sin: cosine and sine [B, T, 1, H/2] of the tokens' rotary angles in this layer, in float32; [B, T, 1, H] of
            images where the two dimensions of a pair turn by different angles.
        input: what this layer reads besides the hidden states; None in most families.
        images: which tokens are of one image and see each other; None where all attention is causal.
        of_images_BT: which tokens are of images or of the tokens around them, in a call with images of a model whose
            layers route these apart; else None.
        at: rotary positions of the call's tokens, [B, T], or by time, row and column, or further axes, [A, B, T].
        across: the images of the call that layers attend to; None without any.
        both_ways: whether tokens see the tokens behind them too.
    """

    pos_BT: jax.Array
    pos_BS: jax.Array
    slot: jax.Array | int
    cos_sin: tuple[jax.Array, jax.Array]
    input: Any = None
    images: ImageBlocks | None = None
    of_images_BT: jax.Array | None = None
    at: jax.Array | None = None
    across: Across | None = None
    both_ways: jax.Array | bool = False

    def cos_sin_in(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Returns `cos_sin`, rounded to `dtype`."""
        cos, sin = self.cos_sin
        return cos.astype(dtype), sin.astype(dtype)

    @property
    def of_canvas(self) -> bool:
        """True if the call's tokens are a canvas."""
        return self.images is not None and self.images.layers == CANVAS

    def visible(self, window: jax.Array | int) -> jax.Array:
        """Returns the mask [B, T, S] of a layer with this window."""
        visible_BTS = is_visible(self.pos_BT, self.pos_BS, window, both_ways=self.both_ways)
        if self.images is None:
            return visible_BTS
        distance_BTS = self.pos_BT[:, :, None] - self.pos_BS[:, None, :]
        return visible_BTS | self.images.seen(window, distance_BTS)


class Block(Protocol):
    """One layer. Returns its output [B, T, D] and its cache with this call's tokens (`KV`, or the family's own
    class)."""

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None
    ) -> tuple[jax.Array, Any]: ...


@dataclass(frozen=True)
class Steps:
    """The inputs of all layers: `of_layer` says for each layer which of `kinds` it gets, `inputs` has its own.
    `entered` takes the hidden states that enter the layers that it has as keys."""

    kinds: Sequence[Step]
    of_layer: Sequence[int]
    inputs: Sequence[Any] | None = None
    seen: Seen | None = None
    entered: Entered | None = None

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        pos_BT: jax.Array,
        pos_BS: jax.Array,
        slot: jax.Array | int,
        inputs: Sequence[Any] | None = None,
        seen: Seen | None = None,
        delta_B: jax.Array | None = None,
        entered: Entered | None = None,
    ) -> "Steps":
        """Returns the inputs of the layers of a model; the arguments are the fields of `Step`, and the `input` of each
        layer. Without a cache `pos_BS` is `pos_BT` itself.

        Args:
            seen: the images and sounds of the call.
            delta_B: what earlier images add to the rotary positions of later tokens; None without any.
            entered: takes the hidden states that enter some layers.
        """
        slots = None if pos_BS is pos_BT else pos_BS.shape[1]
        rotations = list(zip(config.ropes, config.rope_dims, strict=True))
        kinds = list(dict.fromkeys(rotations))
        at = rotary_positions(pos_BT, seen, delta_B)
        images = None if seen is None else _image_blocks(seen, pos_BS, slot, config.sees_images)
        of_images_BT = seen.of_images() if seen is not None and config.routes_images else None
        steps = []
        for rope, dim in kinds:
            if at.ndim == 2 or rope is None:
                cos_sin = rope_cos_sin(rope, dim, pos_BT if rope is None else at, slots)
            else:
                cos_sin = mrope_cos_sin(rope, dim, at, config.mrope)
            step = Step(pos_BT, pos_BS, slot, cos_sin, images=images, of_images_BT=of_images_BT, at=at)
            steps.append(step._replace(across=None if seen is None else seen.across, both_ways=config.sees_behind))
        return cls(steps, [kinds.index(rotation) for rotation in rotations], inputs, seen, entered)

    def __getitem__(self, layer: int) -> Step:
        step = self.kinds[self.of_layer[layer]]
        return step if self.inputs is None else step._replace(input=self.inputs[layer])

    def enter(self, layer: int, x_BTD: jax.Array) -> None:
        """Keeps the hidden states [B, T, D] that enter a layer, if they are asked for."""
        if self.entered is not None and layer in self.entered:
            self.entered[layer] = x_BTD

    @property
    def is_deep(self) -> bool:
        """True if images add something to the outputs of layers."""
        return self.seen is not None and bool(self.seen.deep)

    def deepened(self, x_BTD: jax.Array, layer: jax.Array | int) -> jax.Array:
        """Returns the output [B, T, D] of a layer with what images add to it."""
        return x_BTD if self.seen is None else self.seen.deepened(x_BTD, layer)


def _image_blocks(seen: Seen, pos_BS: jax.Array, slot: jax.Array | int, layers: str) -> ImageBlocks | None:
    """Returns the images of the call's tokens. All tokens of an image are of one call, so that the keys before have
    none. `layers` is as `DecoderConfig.sees_images`."""
    if seen.block_BT is None or not layers:
        return None
    none_BS = jnp.full(pos_BS.shape, -1, jnp.int32)
    return ImageBlocks(
        seen.block_BT,
        jax.lax.dynamic_update_slice_in_dim(none_BS, seen.block_BT, slot, 1),
        layers,
    )


def rotary_positions(pos_BT: jax.Array, seen: Seen | None, delta_B: jax.Array | None) -> jax.Array:
    """Returns the rotary positions of tokens: [B, T], or with images of a model that has them by time, row and column,
    or by further axes, [A, B, T]. `delta_B` is as in `Steps.of`."""
    before_B1 = 0 if delta_B is None else delta_B[:, None]
    if seen is None or seen.at_ABT is None:
        return pos_BT if delta_B is None else jnp.where(pos_BT < 0, pos_BT, pos_BT + before_B1)
    first_B1 = jnp.max(pos_BT, axis=1, keepdims=True) - jnp.sum(pos_BT >= 0, axis=1, keepdims=True) + 1
    return jnp.where(pos_BT < 0, pos_BT, seen.at_ABT + first_B1 + before_B1)
