"""Encoders of images of one size, as vision transformers are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.models.common.beside import VISION
from tpuconv.models.common.seen import Deep, Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.encoder import FeatureEncoder, Grids, check_squares, noise, padded


def states_of(
    layers: Sequence[Any],
    x_BPD: jax.Array,
    segment_BP: jax.Array,
    angles: Any = None,
    is_key_BP: jax.Array | None = None,
    *,
    wanted: Sequence[int],
    norm: Any = None,
) -> jax.Array:
    """Returns hidden states of layers, side by side [B, P, D].

    Args:
        layers: the layers of a tower.
        x_BPD, segment_BP, angles, is_key_BP: the input of the first, and the other arguments of each.
        wanted: as `ProjectorConfig.feature_layers`.
        norm: the norm behind the last layer.
    """
    states = [x_BPD]
    for layer in layers:
        states.append(layer(states[-1], segment_BP, angles, is_key_BP))
    if not wanted:
        return states[-1] if norm is None else norm(states[-1])
    return jnp.concatenate([states[number] for number in wanted], axis=-1)


class Arranged(NamedTuple):
    """The features of images, as the text has them.

    Attributes:
        counts: how many features each image has.
        arrays: further arguments of the projector.
    """

    counts: Sequence[int]
    arrays: tuple[np.ndarray, ...] = ()


def joined_squares(x_BPD: jax.Array, h: int, w: int, s: int) -> jax.Array:
    """Returns s x s patches of a raster of h x w side by side [B, P / s^2, s^2 D]."""
    B, _, D = x_BPD.shape
    return x_BPD.reshape(B, h // s, s, w // s, s, D).swapaxes(2, 3).reshape(B, -1, s * s * D)


class ImageEncoder(FeatureEncoder):
    """Images [B, X, Y, X] of one size to features [B, tokens, O]. The projector returns them, or both results of the
    call."""

    config: Any
    layers: Any
    norm: Any

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features: the images, and what the projector reads."""
        return ("pixel_values", *self.projector.takes)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels_BCYX, arranged = self.projector.arranged(features)
        check_squares(pixels_BCYX, self.config.tower.image_size)
        rows = np.arange(sum(arranged.counts))
        return Prepared((padded(pixels_BCYX, padded_rows(len(pixels_BCYX))), *arranged.arrays), rows, arranged.counts)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray] | None:
        if self.config.part != VISION:
            return None
        if self.projector.takes:
            return dict(self.projector.random_tiles(rng, len(grids)))
        side = self.config.tower.image_size
        return {"pixel_values": noise(rng, len(grids), 3, side, side)}

    def embedded(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns the first layer's input [B, P, D]."""
        raise NotImplementedError

    def angles(self) -> Any:
        """Returns cosine and sine by which the queries and keys of each patch turn; None if they do not."""
        return None

    def __call__(self, pixels_BCYX: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, Deep]:
        x_BPD = self.embedded(pixels_BCYX)
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        wanted = self.config.feature_layers
        x_BPD = states_of(self.layers, x_BPD, segment_BP, self.angles(), wanted=wanted, norm=self.norm)
        found = self.projector(x_BPD[:, self.config.drops_first :], *arrays)
        return found if isinstance(found, tuple) else (found, ())
