"""The base class of encoders of images and sounds."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.across import Across
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, exact_product, gelu, gelu_tanh
from tpuconv.models.common.mrope import mrope_positions
from tpuconv.models.common.seen import Deep, Prepared


def quick_gelu(x: jax.Array) -> jax.Array:
    """Returns x times the sigmoid of 1.702 x, an approximation of GELU (arXiv:1606.08415)."""
    return x * nnx.sigmoid(1.702 * x)


ACTS_BY_NAME = {
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), gelu_tanh),
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    **dict.fromkeys(("silu", "swish"), nnx.silu),
    "relu": nnx.relu,
}
"""Activations by `hidden_act` of config.json."""


Grids = Sequence[tuple[int, int]]
"""The rows and columns of the features of images."""

EXAMPLE_GRIDS: Grids = ((3, 5), (4, 2))
USUAL_SIDE = 1024
"""The rows, and columns, of pixels of an image that encoders of any size are judged by."""
SAMPLE_MASK = "padding_mask"
"""The feature that tells the samples of sounds from padding."""


class FeatureEncoder(nnx.Module):
    """An encoder with its projector. A tower's own class builds its layers in `build`.

    Attributes:
        takes: the names of the features that `prepare` reads, as processors have them.
        beside: the names of features of other parts that it reads too, where there are any.
    """

    takes: ClassVar[tuple[str, ...]] = ("pixel_values",)
    beside: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.build(config, dtype, keys)
        self.projector = config.projector_class(config, dtype=dtype, keys=keys)

    def build(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        """Sets the layers."""
        raise NotImplementedError

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        """Returns the features as a call takes them, by numpy.

        Raises:
            UsageError: a feature is missing, or has another shape.
        """
        raise NotImplementedError

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        """Returns random features of two small images or sounds, to compare with another program; None where the
        features depend on more than the config."""
        return self.random_images(rng, EXAMPLE_GRIDS)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray] | None:
        """Returns random features of images; None if this is no encoder of images, or they depend on more than the
        config. `grids` are the rows and columns of the features of each; an encoder of images of one size reads their
        number alone."""
        return None

    @property
    def pixels_per_feature(self) -> int:
        """The pixels along a side of what one feature stands for; of encoders of images of one size `USUAL_SIDE`."""
        return USUAL_SIDE

    def usual_images(self, count: int) -> dict[str, np.ndarray] | None:
        """Returns random features of images of the encoder's size, or of `USUAL_SIDE` pixels a side where it takes any;
        None like `random_images`."""
        side = max(1, USUAL_SIDE // self.pixels_per_feature)
        return self.random_images(np.random.default_rng(0), [(side, side)] * count)

    def in_text(self, features: Mapping[str, np.ndarray], ids_BT: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the features of images with what depends on the tokens of the texts."""
        return dict(features)

    def slots(self, features: Mapping[str, np.ndarray]) -> int:
        """Returns how many features of each text layers attend to; 0 where features have places among the tokens."""
        return 0

    def across(self, features: Mapping[str, np.ndarray], ids_BT: np.ndarray, features_XO: jax.Array) -> Across:
        """Returns the images that layers attend to, of features [X, O] that are encoded.

        Raises:
            UsageError: features have another shape than the texts.
        """
        raise NotImplementedError

    def placed(self, prepared: Prepared, runs: Sequence[int]) -> Prepared:
        """Returns the features with what depends on the text: `runs` are the numbers of placeholders without another
        token between."""
        return prepared

    def tokens_of(self, grid: tuple[int, int, int]) -> int:
        """Returns the number of placeholders of an image, of which `grid` is in `Prepared.grids`."""
        return prod(grid)

    def rotary_places(self, ids_T: np.ndarray, grids: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
        """Returns the rotary positions [A, T] of the tokens of one text without padding, by the axes of `Mrope`, and
        the difference between the position and the number of a later token. `grids` are as in `Prepared`, of the images
        of this text.

        Raises:
            UsageError: grids and placeholders do not match.
        """
        return mrope_positions(ids_T == self.config.placeholder, grids, 1)

    def __call__(self, *arrays: Any) -> tuple[jax.Array, Deep]:
        """Returns the features [..., O], and those that are added to the outputs of the first layers of the text."""
        raise NotImplementedError


class OneMatrix(nnx.Module):
    """One matrix with a bias, [B, P, W] to [B, P, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPW,WO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPW: jax.Array) -> jax.Array:
        return self.matrix(x_BPW)


def given(features: Mapping[str, np.ndarray], name: str, *dims: int) -> np.ndarray:
    """Returns a feature.

    Raises:
        UsageError: it is missing, or the number of its axes is not one of `dims`.
    """
    if name not in features:
        raise UsageError(f"the feature {name} is missing", hint="give all that the release's processor returns")
    if (array := features[name]).ndim not in dims:
        raise UsageError(f"{name} has shape {array.shape}, not {' or '.join(map(str, dims))} axes")
    return array


def samples_of(features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples [B, S] of sounds, and how many each has.

    Raises:
        UsageError: a feature is missing, or has another shape.
    """
    values = given(features, "input_values", 2, 3)
    if values.ndim == 3 and values.shape[1] != 1:
        raise UsageError(f"input_values has shape {values.shape}, {values.shape[1]} channels, not one")
    B, S = len(values), values.shape[-1]
    mask = given(features, SAMPLE_MASK, 2) if SAMPLE_MASK in features else np.ones((B, S))
    if mask.shape != (B, S):
        raise UsageError(f"{SAMPLE_MASK} has shape {mask.shape}, input_values {values.shape}")
    return values.reshape(B, S), mask.astype(bool).sum(axis=1)


def check_squares(pixels_BCYX: np.ndarray, side: int, kind: str = "images") -> None:
    """Checks the sides of images or tiles.

    Raises:
        UsageError: they are not `side`.
    """
    if pixels_BCYX.shape[2:] != (side, side):
        raise UsageError(f"pixel_values has {kind} of {pixels_BCYX.shape[2:]}, the model {side} x {side}")


def random_patches(rng: np.random.Generator, grids: Grids, side: int, *shape: int) -> dict[str, np.ndarray]:
    """Returns random patches [P, ...] of this shape, and the grid of each image, of which side x side patches make a
    feature."""
    sizes = np.array([(1, h * side, w * side) for h, w in grids])
    return {"pixel_values": noise(rng, int(sizes.prod(axis=1).sum()), *shape), "image_grid_thw": sizes}


def patches_by_grid(features: Mapping[str, np.ndarray], *dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns patches [P, C], one image after the other, and the grid of each (frames, rows, columns). `dims` are the
    numbers of axes that patches may have.

    Raises:
        UsageError: a feature is missing, or the grids do not fit the patches.
    """
    patches, grids = given(features, "pixel_values", *dims), given(features, "image_grid_thw", 2)
    if (count := int(grids.prod(axis=1).sum())) != len(patches):
        raise UsageError(f"pixel_values has {len(patches)} patches, image_grid_thw {count}")
    return patches.reshape(len(patches), -1), grids


def feature_rows(counts: Iterable[int], width: int) -> np.ndarray:
    """Returns the numbers of the features that sounds have, where an encoder returns `width` of each. `counts` are how
    many each sound has."""
    return np.concatenate([sound * width + np.arange(count) for sound, count in enumerate(counts)])


def noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns random values in float32, as normalized pixels are distributed."""
    return rng.standard_normal(shape).astype(np.float32)


def padded(array: np.ndarray, length: int, value: float = 0) -> np.ndarray:
    """Returns an array with its first axis padded to a length."""
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1), constant_values=value)


def read_taps(table_RD: jax.Array, index_PA: jax.Array, weight_PA: jax.Array) -> jax.Array:
    """Returns rows [P, D] interpolated between those of a table, in float32 (`places.Taps`)."""
    return (table_RD[index_PA].astype(jnp.float32) * weight_PA[..., None]).sum(axis=1)


def resized(x: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """Returns rasters of another size [..., y, x, D], sums of the rows and columns of rasters [..., Y, X, D] with
    weights [y, Y] and [x, X], in float32."""
    by_rows = exact_product("...YXD,yY->...yXD", x, rows)
    return exact_product("...YXD,xX->...YxD", by_rows, columns)


def patches_of(pixels_BCYX: jax.Array, patch: int) -> jax.Array:
    """Returns the patches [B, P, C] of images, in raster order. The values of a patch are channel first, as a
    convolution has them. Of a numpy array they are one, too."""
    B, channels, Y, X = pixels_BCYX.shape
    h, w = Y // patch, X // patch
    x = pixels_BCYX[:, :, : h * patch, : w * patch].reshape(B, channels, h, patch, w, patch)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(B, h * w, channels * patch * patch)
