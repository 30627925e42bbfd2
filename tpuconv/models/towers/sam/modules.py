"""SAM, and what GOT-OCR 2.0 and DeepSeek-VL 7B make of its features.

Letters: B images or windows, Y and X rows and columns of patches, P patches, R patches of a smaller raster, D width, N
heads, H their width, S and T the rows and columns of keys, E channels.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu, normal
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.attention import attend
from tpuconv.models.towers.convolutions import StridedConvolution
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given, noise, padded, patches_of, read_taps, resized
from tpuconv.models.towers.image_encoder import Arranged, ImageEncoder
from tpuconv.models.towers.places import antialiased_cubic_weights, bilinear_taps_of_centers
from tpuconv.models.towers.vit import MLP


class DistanceAttention(nnx.Module):
    """Attention of all patches of an image or window, [B, Y, X, D] to the same, whose scores are q k / sqrt(H) + q
    R[y - s] + q C[x - t] for a key at row s and column t, with learned vectors of distances R and C (arXiv:2112.01526).

    Args:
        config: a `SamConfig`.
        side: the rows, and columns, of patches.
    """

    def __init__(self, config: Any, side: int, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        product = partial(Einsum, "BPD,DNH->BPNH", sizes, bias=config.qkv_bias, dtype=dtype, keys=keys)
        self.q, self.k, self.v = product(), product(), product()
        self.o = Einsum("BPNH,NHD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        shape = 2 * side - 1, sizes["H"]
        self.rows = nnx.Param(normal(keys(), shape, dtype)) if config.use_rel_pos else None
        self.columns = nnx.Param(normal(keys(), shape, dtype)) if config.use_rel_pos else None

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        B, Y, X, D = x_BYXD.shape
        x_BPD = x_BYXD.reshape(B, Y * X, D)
        q_BPNH, k_BPNH, v_BPNH = self.q(x_BPD), self.k(x_BPD), self.v(x_BPD)
        N, H = q_BPNH.shape[2:]
        if self.rows is not None and self.columns is not None:
            # what a query gives each row and column, times a one where the key is: a product of longer heads
            q_BYXNH = q_BPNH.reshape(B, Y, X, N, H)
            row_BYXNS = jnp.einsum("BYXNH,YSH->BYXNS", q_BYXNH, _by_distance(self.rows[...], Y))
            column_BYXNT = jnp.einsum("BYXNH,XTH->BYXNT", q_BYXNH, _by_distance(self.columns[...], X))
            q_BYXNH = jnp.concatenate([q_BYXNH * H**-0.5, row_BYXNS, column_BYXNT], axis=-1)
            q_BPNH = q_BYXNH.reshape(B, Y * X, N, -1)
            ones = jnp.concatenate([np.repeat(np.eye(Y), X, axis=0), np.tile(np.eye(X), (Y, 1))], axis=-1)
            ones = jnp.broadcast_to(ones.astype(k_BPNH.dtype)[None, :, None], (B, Y * X, N, Y + X))
            k_BPNH = jnp.concatenate([k_BPNH, ones], axis=-1)
        scale = H**-0.5 if self.rows is None else 1.0
        y_BPNH = attend(q_BPNH, k_BPNH, v_BPNH, jnp.zeros((B, Y * X), jnp.int32), scale=scale)
        return self.o(y_BPNH).reshape(B, Y, X, D)


def _by_distance(table_VH: jax.Array, side: int) -> jax.Array:
    """Returns the vector of the distance of each query and key on an axis [side, side, H]. A table of more or fewer
    distances is interpolated."""
    if len(table_VH) != 2 * side - 1:
        taps = bilinear_taps_of_centers(2 * side - 1, 1, len(table_VH), 1)
        found_VH = read_taps(table_VH, jnp.asarray(taps.index_PA), jnp.asarray(taps.weight_PA))
        table_VH = found_VH.astype(table_VH.dtype)
    return table_VH[np.arange(side)[:, None] - np.arange(side) + side - 1]


class SamLayer(nnx.Module):
    """A layer of SAM, [B, Y, X, D] to the same: attention within windows of `window` x `window` patches or, if that is
    0, within the image, and an MLP. Windows at the border have zeros behind the norm, which are keys like others."""

    def __init__(self, config: Any, window: int, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        self.attn_norm, self.mlp_norm = norm(), norm()
        self.attn = DistanceAttention(config, window or config.side, dtype=dtype, keys=keys)
        self.mlp, self.window = MLP(config, ACTS_BY_NAME[config.hidden_act], dtype=dtype, keys=keys), window

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        B, Y, X, D = x_BYXD.shape
        y_BYXD = self.attn_norm(x_BYXD)
        if w := self.window:
            h, v = -(-Y // w), -(-X // w)
            y_BYXD = jnp.pad(y_BYXD, [(0, 0), (0, h * w - Y), (0, v * w - X), (0, 0)])
            y_BYXD = y_BYXD.reshape(B, h, w, v, w, D).swapaxes(2, 3).reshape(-1, w, w, D)
            y_BYXD = self.attn(y_BYXD).reshape(B, h, v, w, w, D).swapaxes(2, 3)
            x_BYXD = x_BYXD + y_BYXD.reshape(B, h * w, v * w, D)[:, :Y, :X]
        else:
            x_BYXD = x_BYXD + self.attn(y_BYXD)
        y_BPD = self.mlp(self.mlp_norm(x_BYXD).reshape(B, Y * X, D))
        return x_BYXD + y_BPD.reshape(x_BYXD.shape)


class Neck(nnx.Module):
    """A matrix, a convolution and a norm behind each, [B, Y, X, D] to [B, Y, X, E]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        norm = partial(LayerNorm, "E", sizes, 1e-6, dtype=dtype)
        self.matrix = Einsum("BYXD,DE->BYXE", sizes, dtype=dtype, keys=keys)
        self.convolution = convolution(sizes["E"], sizes["E"], stride=1, dtype=dtype, keys=keys)
        self.first_norm, self.last_norm = norm(), norm()

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        return self.last_norm(self.convolution(self.first_norm(self.matrix(x_BYXD))))


def convolution(
    channels: int, out: int, *, stride: int = 2, bias: bool = False, dtype: DTypeLike, keys: Keys
) -> StridedConvolution:
    """Returns a convolution with 3 x 3 taps; by default one of two rows and columns stays."""
    return StridedConvolution((3, 3, channels, out), stride=stride, bias=bias, dtype=dtype, keys=keys)


def rows_left(size: int) -> int:
    """Returns the rows that a convolution with stride 2 leaves."""
    return (size - 1) // 2 + 1


class Sam(nnx.Module):
    """SAM without its neck: images [B, C, Y, X] of one size to the outputs [B, Y, X, D] of its layers, by rows and
    columns of patches. For images of another size than the config's, positions and distances are interpolated.

    Args:
        config: a `SamConfig`.
    """

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.config = config.sizes, config
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        shape = config.side, config.side, sizes["D"]
        self.positions = nnx.Param(normal(keys(), shape, dtype)) if config.use_abs_pos else None
        windows = [config.window_size if i in config.windowed else 0 for i in range(sizes["L"])]
        self.layers = nnx.List([SamLayer(config, window, dtype=dtype, keys=keys) for window in windows])
        self.neck = Neck(config, dtype=dtype, keys=keys)

    def __call__(self, pixels_BCYX: jax.Array) -> list[jax.Array]:
        patch = self.config.patch_size
        B, _, *sides = pixels_BCYX.shape
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), patch))
        x_BYXD = x_BPD.reshape(B, *(side // patch for side in sides), -1)
        if self.positions is not None:
            x_BYXD = x_BYXD + self.in_size(self.positions[...], *x_BYXD.shape[1:3])
        outputs = []
        for layer in self.layers:
            x_BYXD = layer(x_BYXD)
            outputs.append(x_BYXD)
        return outputs

    @staticmethod
    def in_size(table_STD: jax.Array, rows: int, columns: int) -> jax.Array:
        """Returns learned positions [rows, columns, D] of a table of another size."""
        if (rows, columns) == table_STD.shape[:2]:
            return table_STD
        weights = map(antialiased_cubic_weights, (rows, columns), table_STD.shape)
        return resized(table_STD, *weights).astype(table_STD.dtype)


class Upsampler(nnx.Module):
    """Two convolutions, each with stride 2, and a matrix, [B, Y, X, E] to [B, P, O]."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.tokens = rows_left(rows_left(config.side)) ** 2
        self.first = convolution(sizes["E"], sizes["M"], dtype=dtype, keys=keys)
        self.last = convolution(sizes["M"], sizes["O"], dtype=dtype, keys=keys)
        self.matrix = Einsum("BPO,OA->BPA", {**sizes, "A": sizes["O"]}, bias=True, dtype=dtype, keys=keys)

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.tokens] * len(pixels_BCYX))

    def __call__(self, x_BYXE: jax.Array) -> jax.Array:
        x_BYXO = self.last(self.first(x_BYXE))
        return self.matrix(x_BYXO.reshape(len(x_BYXO), self.tokens, -1))


class GotSam(ImageEncoder):
    """SAM as the tower of GOT-OCR 2.0."""

    def build(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        self.sam = Sam(config.tower, dtype=dtype, keys=keys)

    def __call__(self, pixels_BCYX: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(self.sam.neck(self.sam(pixels_BCYX)[-1])), ()


class HighResolution(nnx.Module):
    """Joins features of SigLIP [B, P, D] with SAM's of the same images in a higher resolution, to [B, P, O]: of SAM's
    last layer and, by a second neck and a learned factor, of its first layer without windows."""

    takes: ClassVar[tuple[str, ...]] = ("high_res_pixel_values",)

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config, sizes, sam = config, config.sizes, config.sam
        self.sam, self.neck = Sam(sam, dtype=dtype, keys=keys), Neck(sam, dtype=dtype, keys=keys)
        self.first = convolution(sizes["E"], sizes["M"], dtype=dtype, keys=keys)
        self.last = convolution(sizes["M"], sizes["Z"], dtype=dtype, keys=keys)
        self.alpha = nnx.Param(jnp.zeros((1,), dtype))
        product = partial(Einsum, sizes={**sizes, "A": sizes["O"]}, bias=True, dtype=dtype, keys=keys)
        self.low, self.high, self.matrix = product("BPD,DY->BPY"), product("BPZ,ZY->BPY"), product("BPO,OA->BPA")

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX, high_BCYX = (given(features, name, 4) for name in ("pixel_values", *self.takes))
        side = self.config.sam.image_size
        if (shape := high_BCYX.shape) != (len(pixels_BCYX), 3, side, side):
            raise UsageError(
                f"{self.takes[0]} has the shape {shape}, the model takes 3 x {side} x {side} of each image"
            )
        high_BCYX = padded(high_BCYX, padded_rows(len(high_BCYX)))
        return pixels_BCYX, Arranged([self.config.positions] * len(pixels_BCYX), (high_BCYX,))

    def random_tiles(self, rng: np.random.Generator, images: int) -> dict[str, np.ndarray]:
        """Returns random features of images."""
        sides = self.config.tower.image_size, self.config.sam.image_size
        names = ("pixel_values", *self.takes)
        return {name: noise(rng, images, 3, side, side) for name, side in zip(names, sides, strict=True)}

    def reduced(self, x_BYXE: jax.Array) -> jax.Array:
        """Returns as many features [B, P, Z] as the tower has of an image: four times its side, interpolated, then two
        convolutions with stride 2."""
        B, Y, X, E = x_BYXE.shape
        side = 4 * self.config.side
        taps = bilinear_taps_of_centers(side, side, Y, X)
        x_BRE = x_BYXE.reshape(B, Y * X, E)
        x_BPE = (x_BRE[:, taps.index_PA] * taps.weight_PA[..., None].astype(x_BRE.dtype)).sum(axis=2)
        x_BYXZ = self.last(self.first(x_BPE.reshape(B, side, side, E)))
        return x_BYXZ.reshape(B, self.config.positions, -1)

    def __call__(self, x_BPD: jax.Array, high_BCYX: jax.Array) -> jax.Array:
        outputs = self.sam(high_BCYX)
        early = outputs[self.config.sam.global_attn_indexes[0]]
        x_BPZ = self.reduced(self.sam.neck(outputs[-1])) + self.reduced(self.neck(early)) * self.alpha[...]
        return self.matrix(gelu(jnp.concatenate([self.high(x_BPZ), self.low(x_BPD)], axis=-1)))
