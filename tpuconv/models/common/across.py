"""Images that layers of a text model attend to. They have no places among its tokens, as in Llama 3.2 Vision."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tpuconv.models.common.cache import KV, Cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Across:
    """The images of one call. S counts the features of all images of a text, U the tiles that these are cut into, of
    which each has S / U features.

    Attributes:
        features_BSD: the features, of padding too.
        sees_BTU: which tiles a token attends to.
    """

    features_BSD: jax.Array
    sees_BTU: jax.Array

    def sees(self) -> jax.Array:
        """Returns which features a token attends to [B, T, S]."""
        return self._of_features(self.sees_BTU)

    def later(self, pos_BT: jax.Array) -> jax.Array:
        """Returns which features the tokens after this call attend to [B, S], as its last token does. `pos_BT` are the
        positions of its tokens, -1 for padding."""
        last_B11 = pos_BT.argmax(axis=1)[:, None, None]
        return self._of_features(jnp.take_along_axis(self.sees_BTU, last_B11, axis=1)[:, 0])

    def _of_features(self, of_tiles: jax.Array) -> jax.Array:
        return jnp.repeat(of_tiles, self.features_BSD.shape[1] // self.sees_BTU.shape[-1], axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeenSlots:
    """Which slots of a cache of images later tokens attend to. `axes` are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S",)

    is_seen_BS: jax.Array


AcrossKV = tuple[KV, SeenSlots]
"""The cache of a layer that attends to images: their keys and values. It has no slots until a call has images."""


def with_room(cache: Cache, slots: int) -> Cache:
    """Returns an empty cache with so many slots for images in each layer that attends to them."""

    def grown(arrays: Any) -> Any:
        leaves, form = jax.tree.flatten(arrays)
        out = []
        for leaf, letters in zip(leaves, type(arrays).axes, strict=False):
            axes = letters.split()
            axis = leaf.ndim - len(axes) + axes.index("S")
            out.append(jnp.zeros((*leaf.shape[:axis], slots, *leaf.shape[axis + 1 :]), leaf.dtype))
        return jax.tree.unflatten(form, out)

    def of_layer(layer: Any) -> Any:
        return tuple(map(grown, layer)) if isinstance(layer, tuple) else layer

    return replace(cache, layers=jax.tree.map(of_layer, cache.layers, is_leaf=_is_of_layer))


def _is_of_layer(caches: Any) -> bool:
    return not isinstance(caches, tuple) or isinstance(caches[-1], SeenSlots)
