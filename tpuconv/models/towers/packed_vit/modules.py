"""The towers of Cosmos 3 Edge, Hy4-VL, Hunyuan-VL and MiniMax-M3."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, gelu, normal
from tpuconv.models.common.mrope import positions_in_images
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import cos_sin
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given, padded, patches_by_grid
from tpuconv.models.towers.places import (
    Taps,
    antialiased_taps,
    bicubic_taps,
    bilinear_taps_of_centers,
    block_order,
    bucket,
    raster,
)
from tpuconv.models.towers.qwen_vit.modules import QwenVit, plain_block
from tpuconv.models.towers.vit import Block


class NormedVit(QwenVit):
    """A tower with a norm beside its layers, `norm`."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.norm = LayerNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)


class EdgeVit(NormedVit):
    """The tower of Cosmos 3 Edge: learned positions, interpolated with antialiasing, and a norm behind all layers."""

    has_patch_bias = True

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys, config.layer_norm_eps, rotate=None)

    def taps(self, h: int, w: int) -> Taps:
        return antialiased_taps(h, w, self.config.table_side, self.config.table_side)

    def ended(self, x_BPD: jax.Array) -> Any:
        return self.projector(self.norm(x_BPD))


class EndedRows(nnx.Module):
    """A norm of each patch, and two matrices of s x s patches: [1, P, D] to [1, 1 + P / s^2, O], whose first row is
    the end of each row of features."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.norm = RMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.up = Einsum("BPM,MW->BPW", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, bias=True, dtype=dtype, keys=keys)
        self.newline = nnx.Param(normal(keys(), (sizes["O"],), dtype))
        self.act, self.merged = ACTS_BY_NAME[config.hidden_act], sizes["M"]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPM = self.norm(x_BPD).reshape(len(x_BPD), -1, self.merged)
        x_BPO = self.down(self.act(self.up(x_BPM)))
        return jnp.concatenate([self.newline[...].astype(x_BPO.dtype)[None, None], x_BPO], axis=1)


class HyVit(QwenVit):
    """The tower of Hy4-VL. Processors write the patches of an image row by row; here they are in blocks."""

    has_patch_bias = True
    shift: ClassVar[float] = 0.1
    """The part of a patch by which images are larger, where positions are interpolated."""
    first_rows: ClassVar[int] = 1
    """The number of the projector's first rows, which are of no patches."""

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys, config.rms_norm_eps, rotate=None)

    def taps(self, h: int, w: int) -> Taps:
        side = self.config.table_side
        interpolated = bicubic_taps if self.config.interpolate_mode == "bicubic" else bilinear_taps_of_centers
        taps = interpolated(h, w, side, side, self.shift)
        return replace(taps, index_PA=taps.index_PA + 1)  # behind the class token

    def with_ends(self, row_hw: np.ndarray) -> np.ndarray:
        """Returns the rows of the projector's output that a frame has [X], of the rows [h, w] of its joined patches."""
        return np.pad(row_hw, ((0, 0), (0, 1))).reshape(-1)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches, grids = patches_by_grid(features, 2)
        s, order, rows, ended = self.config.spatial_merge_size, [], [], []
        first, token = 0, self.first_rows
        for t, h, w in grids.tolist():
            for _ in range(t):
                order.append(first + block_order(h, w, s))
                rows.append(self.with_ends(token + np.arange((h // s) * (w // s)).reshape(h // s, w // s)))
                ended.append((1, h // s, w // s + 1))
                first, token = first + h * w, token + (h // s) * (w // s)
        prepared = super().prepare({**features, "pixel_values": patches[np.concatenate(order)]})
        counts = [t * self.tokens_of((1, h // s, w // s + 1)) for t, h, w in grids.tolist()]
        return replace(prepared, rows=np.concatenate(rows), counts=counts, grids=ended)


class FramedRows(nnx.Module):
    """A norm of each patch, matrices of s x s patches and a norm: [1, P, D] to [1, 3 + P / s^2, O], whose first rows
    are the begin of an image, its end, and the end of each row of features. Nothing reads `unread`."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        product = partial(Einsum, sizes=sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = RMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.last_norm = RMSNorm("O", sizes, config.rms_norm_eps, dtype=dtype)
        self.up, self.wide, self.matrix = product("BPM,MW->BPW"), product("BPW,WE->BPE"), product("BPE,EO->BPO")
        self.newline = nnx.Param(normal(keys(), (sizes["E"],), dtype))
        self.begin, self.end, self.unread = (nnx.Param(normal(keys(), (sizes["O"],), dtype)) for _ in range(3))
        self.act, self.merged = ACTS_BY_NAME[config.hidden_act], sizes["M"]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPM = self.norm(x_BPD).reshape(len(x_BPD), -1, self.merged)
        x_BPE = self.wide(self.act(self.up(x_BPM)))
        x_BPO = self.matrix(jnp.concatenate([self.newline[...].astype(x_BPE.dtype)[None, None], x_BPE], axis=1))
        ends_BPO = jnp.stack([self.begin[...], self.end[...]])[None].astype(x_BPO.dtype)
        return self.last_norm(jnp.concatenate([ends_BPO, x_BPO], axis=1))


class HunyuanVit(HyVit):
    """The tower of Hunyuan-VL. Images have a token before and behind them."""

    shift, first_rows = 0.0, 3

    def with_ends(self, row_hw: np.ndarray) -> np.ndarray:
        return np.pad(np.pad(row_hw, ((0, 0), (0, 1)), constant_values=2).reshape(-1), 1, constant_values=(0, 1))

    def tokens_of(self, grid: tuple[int, int, int]) -> int:
        return super().tokens_of(grid) + 2

    def rotary_places(self, ids_T: np.ndarray, grids: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
        return positions_in_images(ids_T == self.config.placeholder, grids)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        if (given(features, "image_grid_thw", 2)[:, 0] != 1).any():
            raise UsageError("image_grid_thw has clips of several frames, and Hunyuan-VL takes images alone")
        return super().prepare(features)


class Twice(nnx.Module):
    """Two matrices of each patch, then two of s x s patches, [1, P, D] to [1, P / s^2, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.up, self.down = product("BPD,DW->BPW"), product("BPW,WO->BPO")
        self.merged_up, self.merged_down = product("BPM,MW->BPW"), product("BPW,WO->BPO")
        self.merged = config.sizes["M"]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPO = self.down(gelu(self.up(x_BPD)))
        return self.merged_down(gelu(self.merged_up(x_BPO.reshape(len(x_BPO), -1, self.merged))))


class MiniMaxVit(NormedVit):
    """The tower of MiniMax-M3: a norm before all layers; all frames of a clip see each other. A third of the pairs that
    turn does so by time, row and column each; the last dimensions of a head do not turn."""

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys, config.layer_norm_eps)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches, grids = patches_by_grid(features, 2)
        s, places, clips = self.config.spatial_merge_size, [], []
        for clip, (t, h, w) in enumerate(grids.tolist()):
            at_P2 = np.tile(raster(h, w)[block_order(h, w, s)], (t, 1))
            places.append(np.concatenate([np.repeat(np.arange(t, dtype=np.int32), h * w)[:, None], at_P2], axis=1))
            clips.append(np.full(t * h * w, clip, np.int32))
        size = bucket(len(patches), multiple=s * s)
        arrays = padded(patches, size), padded(np.concatenate(places), size), padded(np.concatenate(clips), size, -1)
        return Prepared(arrays, np.arange(len(patches) // s**2), (grids.prod(axis=1) // s**2).tolist())

    def __call__(  # type: ignore[override]
        self, patches_PC: jax.Array, at_P3: jax.Array, clips_P: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.norm(self.patch(patches_PC[None].astype(self.patch.kernel.dtype)))
        turning = self.config.sizes["H"] // 3 // 2 * 2
        rates_A, _ = Rope(theta=self.config.rope_theta).inverse_frequencies(turning)
        angles_BPA = (at_P3.astype(jnp.float32)[None, ..., None] * rates_A).reshape(1, len(at_P3), -1)
        turns = cos_sin(angles_BPA, x_BPD.dtype)
        for layer in self.layers:
            x_BPD = layer(x_BPD, clips_P[None], turns)
        return self.ended(x_BPD), ()
