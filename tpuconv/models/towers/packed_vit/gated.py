"""The tower of LFM3-VL: gated convolutions over the patches of an image in most layers, attention in the other ones.

Letters: B is 1, P patches, D width, c taps of a convolution in two dimensions.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, apply_rope, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import cos_sin, rows_then_columns
from tpuconv.models.towers.encoder import ACTS_BY_NAME, padded, patches_by_grid
from tpuconv.models.towers.places import block_order, raster
from tpuconv.models.towers.qwen_vit.modules import QwenVit
from tpuconv.models.towers.vit import MLP, Attention, Block


class GatedConvolution(nnx.Module):
    """out(b conv(a x)) for the three products a, b and x of the input: a convolution of each channel over the rows and
    columns of a frame, [B, P, D] to [B, P, D]. It has the arguments of `Attention`: `angles` are the numbers of the
    patches [P, c] under its taps, where the number P is a zero outside of the frame."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, "BPD,DA->BPA", {**config.sizes, "A": config.sizes["D"]}, dtype=dtype, keys=keys)
        self.before, self.behind, self.x, self.o = product(), product(), product(), product()
        self.taps = nnx.Param(normal(keys(), (config.conv_kernel_size**2, config.sizes["D"]), dtype))

    def __call__(self, x_BPD: jax.Array, segment_BP: jax.Array, angles: Any = None, is_key_BP: Any = None) -> jax.Array:
        gated_BPD = self.before(x_BPD) * self.x(x_BPD)
        with_zero_BPD = jnp.pad(gated_BPD, ((0, 0), (0, 1), (0, 0)))
        y_BPD = jnp.einsum("BPcD,cD->BPD", with_zero_BPD[:, angles], self.taps[...])
        return self.o(self.behind(x_BPD) * y_BPD.astype(x_BPD.dtype))


def under_taps(h: int, w: int, side: int, order: np.ndarray) -> np.ndarray:
    """Returns the numbers of the patches under the taps of each patch of a frame [P, c], -1 outside of the frame.

    Args:
        h, w: rows and columns of patches.
        side: of the kernel, which has a patch in its middle.
        order: which patch of the raster is at each place.
    """
    at_P2, tap_c2 = raster(h, w)[order], raster(side, side) - side // 2
    at_Pc2 = at_P2[:, None] + tap_c2
    inside_Pc = ((at_Pc2 >= 0) & (at_Pc2 < (h, w))).all(axis=-1)
    place = np.argsort(order)
    row, column = np.clip(at_Pc2, 0, (h - 1, w - 1)).transpose(2, 0, 1)
    return np.where(inside_Pc, place[row * w + column], -1)


class GatedVit(QwenVit):
    """The tower of LFM3-VL."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.patch = Einsum("BPC,CD->BPD", config.sizes, dtype=dtype, keys=keys)
        self.norm = RMSNorm("D", config.sizes, config.norm_eps, dtype=dtype)
        self.layers = nnx.List([self.layer(config, kind, dtype, keys) for kind in config.kinds])

    def layer(self, config: Any, kind: str, dtype: DTypeLike, keys: Keys) -> Block:
        """Returns a layer of a kind of `layer_types`."""
        norm = partial(RMSNorm, "D", config.sizes, config.norm_eps, dtype=dtype)
        qk_norm = partial(RMSNorm, "H", config.sizes, config.norm_eps, dtype=dtype)
        attention = partial(Attention, bias=False, out_bias=False, rotate=apply_rope, norm=qk_norm, kv="K")
        mixer: Any = GatedConvolution if kind == "conv" else attention
        mlp = MLP(config, nnx.silu, gated=True, bias=False, dtype=dtype, keys=keys)
        return Block(config, norm, mixer(config, dtype=dtype, keys=keys), mlp, dtype=dtype)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        prepared = super().prepare(features)
        _, grids = patches_by_grid(features, 2)
        patches, _, _, at_P2, frames_P, _ = prepared.arrays
        size, first, taps = len(patches), 0, []
        for t, h, w in grids.tolist():
            frame = under_taps(h, w, self.config.conv_kernel_size, block_order(h, w, self.config.spatial_merge_size))
            for _ in range(t):
                taps.append(np.where(frame < 0, size, frame + first))
                first += h * w
        under = padded(np.concatenate(taps).astype(np.int32), size, size)
        return Prepared((patches, at_P2, frames_P, under), prepared.rows, prepared.counts)

    def __call__(  # type: ignore[override]
        self, patches_PC: jax.Array, at_P2: jax.Array, frames_P: jax.Array, under_Pc: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.norm(self.patch(patches_PC[None].astype(self.patch.kernel.dtype)))
        turns = cos_sin(rows_then_columns(at_P2[None], self.config.sizes["H"], self.config.rope_theta))
        for kind, layer in zip(self.config.kinds, self.layers, strict=True):
            x_BPD = layer(x_BPD, frames_P[None], under_Pc if kind == "conv" else turns)
        return self.ended(x_BPD), ()


class NormedMerger(nnx.Module):
    """A norm of each patch and two matrices of s x s patches, [B, P, D] to [B, P / s^2, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.projector_bias
        self.norm = LayerNorm("D", sizes, 1e-6, dtype=dtype)
        self.up = Einsum("BPM,MW->BPW", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, bias=bias, dtype=dtype, keys=keys)
        self.act, self.merged = ACTS_BY_NAME[config.projector_hidden_act], sizes["M"]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPM = self.norm(x_BPD).reshape(len(x_BPD), -1, self.merged)
        return self.down(self.act(self.up(x_BPM)))
