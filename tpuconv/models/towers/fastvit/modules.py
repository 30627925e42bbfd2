"""FastViT (arXiv:2303.14189) with its branches joined to one convolution each.

Letters: B images, Y rows, X columns, C channels of the input, D of a stage, P places, W channels of the output.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import BatchNorm, StridedConvolution
from tpuconv.models.towers.encoder import FeatureEncoder, Grids, given, noise, padded
from tpuconv.models.towers.fastvit.family import FAST_STAGES, WITH_ATTENTION
from tpuconv.models.towers.sam.modules import rows_left
from tpuconv.models.towers.vit import MLP, Attention

FAST_EPS = 1e-5
"""The eps of all norms."""
HALVINGS = 6
"""How often rows and columns are halved."""


class EachChannel(StridedConvolution):
    """A convolution whose outputs read one channel each, [B, Y, X, C] to [B, Y', X', D]; D is a multiple of C."""

    def __init__(
        self, side: int, width: int, out: int, *, stride: int = 1, bias: bool = True, dtype: DTypeLike, keys: Keys
    ):
        shape = (side, side, 1, out)
        super().__init__(shape, stride=stride, pad=side // 2, bias=bias, groups=width, dtype=dtype, keys=keys)


class NearMlp(MLP):
    """A convolution of each channel, a batch norm and an MLP, [B, Y, X, D] to the same."""

    def __init__(self, width: int, mlp: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(SimpleNamespace(sizes={"D": width, "F": mlp}), gelu, dtype=dtype, keys=keys)
        self.near = EachChannel(7, width, width, bias=False, dtype=dtype, keys=keys)
        self.norm = BatchNorm(width, FAST_EPS, dtype=dtype)

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        y_BYXD = self.norm(self.near(x_BYXD))
        return super().__call__(y_BYXD.reshape(len(y_BYXD), -1, y_BYXD.shape[-1])).reshape(x_BYXD.shape)


class MixedBlock(nnx.Module):
    """A convolution of each channel, which has its residual connection in its kernel, and an MLP, [B, Y, X, D] to the
    same."""

    def __init__(self, width: int, mlp: int, *, dtype: DTypeLike, keys: Keys):
        self.mixer = EachChannel(3, width, width, dtype=dtype, keys=keys)
        self.mlp = NearMlp(width, mlp, dtype=dtype, keys=keys)
        self.scale = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        x_BYXD = self.mixer(x_BYXD)
        return x_BYXD + self.mlp(x_BYXD) * self.scale[...]


class PlacesBlock(nnx.Module):
    """Attention of all places to each other and an MLP, [B, Y, X, D] to the same."""

    def __init__(self, width: int, mlp: int, heads: int, head_dim: int, *, dtype: DTypeLike, keys: Keys):
        sizes = {"D": width, "N": heads, "H": head_dim}
        self.norm = LayerNorm("D", sizes, FAST_EPS, dtype=dtype)
        self.attn = Attention(SimpleNamespace(sizes=sizes), bias=False, dtype=dtype, keys=keys)
        self.mlp = NearMlp(width, mlp, dtype=dtype, keys=keys)
        self.attn_scale, self.scale = (nnx.Param(jnp.ones(width, dtype)) for _ in range(2))

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        y_BPD = self.norm(x_BYXD).reshape(len(x_BYXD), -1, x_BYXD.shape[-1])
        y_BPD = self.attn(y_BPD, jnp.zeros(y_BPD.shape[:2], jnp.int32))
        x_BYXD = x_BYXD + y_BPD.reshape(x_BYXD.shape) * self.attn_scale[...]
        return x_BYXD + self.mlp(x_BYXD) * self.scale[...]


class FastStage(nnx.Module):
    """A stage: [B, Y, X, C] to [B, Y', X', D]."""

    def __init__(self, config: Any, i: int, *, dtype: DTypeLike, keys: Keys):
        sizes, before, width = config.sizes, config.sizes[f"fast{max(i - 1, 0)}"], config.sizes[f"fast{i}"]
        mlp, numbers = sizes[f"fast{i}_mlp"], config.layer_sets[f"fast{i}_blocks"]
        self.large = EachChannel(7, before, width, stride=2, dtype=dtype, keys=keys) if i else None
        matrix = {"C": width, "D": width}
        self.point = Einsum("BYXC,CD->BYXD", matrix, bias=True, dtype=dtype, keys=keys) if i else None
        self.places = EachChannel(7, width, width, dtype=dtype, keys=keys) if i in WITH_ATTENTION else None

        def block() -> nnx.Module:
            if i in WITH_ATTENTION:
                return PlacesBlock(width, mlp, sizes[f"fast{i}_heads"], sizes["H"], dtype=dtype, keys=keys)
            return MixedBlock(width, mlp, dtype=dtype, keys=keys)

        self.blocks = nnx.List([block() for _ in numbers])

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.large is not None and self.point is not None:
            x = gelu(self.point(gelu(self.large(x))))
        if self.places is not None:
            x = self.places(x)
        for block in self.blocks:
            x = block(x)
        return x


class Squeezed(nnx.Module):
    """The factor of each channel, between 0 and 1, by the means of all (arXiv:1709.01507): [B, Y, X, W] to [B, 1, 1,
    W]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.up = Einsum("BYXW,WG->BYXG", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BYXG,GW->BYXW", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BYXW: jax.Array) -> jax.Array:
        means_BYXW = jnp.mean(x_BYXW, axis=(1, 2), keepdims=True)
        return nnx.sigmoid(self.down(nnx.relu(self.up(means_BYXW))))


class FastVit(FeatureEncoder):
    """Images [B, X, Y, X] of one size, any, to features [Z, O]."""

    takes = ("pixel_values",)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, width = config.sizes, config.sizes["fast0"]
        self.stem = nnx.List(
            [
                StridedConvolution((3, 3, sizes["X"], width), stride=2, dtype=dtype, keys=keys),
                EachChannel(3, width, width, stride=2, dtype=dtype, keys=keys),
                Einsum("BYXC,CD->BYXD", {"C": width, "D": width}, bias=True, dtype=dtype, keys=keys),
            ]
        )
        self.stages = nnx.List([FastStage(config, i, dtype=dtype, keys=keys) for i in FAST_STAGES])
        self.last = EachChannel(3, sizes[f"fast{FAST_STAGES[-1]}"], sizes["W"], dtype=dtype, keys=keys)
        self.gate = Squeezed(config, dtype=dtype, keys=keys)

    @property
    def pixels_per_feature(self) -> int:
        return 1 << HALVINGS

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        rows, columns = (max(sides) * self.pixels_per_feature for sides in zip(*grids, strict=True))
        return {"pixel_values": noise(rng, len(grids), 3, rows, columns)}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels = given(features, "pixel_values", 4)
        rows, columns = pixels.shape[2:]
        for _ in range(HALVINGS):
            rows, columns = rows_left(rows), rows_left(columns)
        each = rows * columns
        return Prepared(
            (padded(pixels, padded_rows(len(pixels))),), np.arange(len(pixels) * each), [each] * len(pixels)
        )

    def __call__(self, pixels_BCYX: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x = pixels_BCYX.transpose(0, 2, 3, 1).astype(self.last.kernel.dtype)
        for convolution in self.stem:
            x = gelu(convolution(x))
        for stage in self.stages:
            x = stage(x)
        x_BYXW = self.last(x)
        x_BYXW = gelu(x_BYXW * self.gate(x_BYXW))
        x_BPO = self.projector(x_BYXW.reshape(len(x_BYXW), -1, x_BYXW.shape[-1]))
        return x_BPO.reshape(-1, x_BPO.shape[-1]), ()
