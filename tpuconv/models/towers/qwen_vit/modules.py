"""The towers of Qwen-VL and GLM-V. The patches of all images are one sequence; patches of one frame see each other."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, apply_rope, gelu, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import cos_sin, rows_then_columns
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    FeatureEncoder,
    Grids,
    padded,
    patches_by_grid,
    random_patches,
    read_taps,
)
from tpuconv.models.towers.places import Taps, as_wide, bicubic_taps, bilinear_taps, block_order, bucket, raster
from tpuconv.models.towers.vit import MLP, Attention, Block, limited_factors


class Merger(nnx.Module):
    """Joins s x s patches, [B, P, D] to [B, P / s^2, O]: a norm of each patch, or of each joined one (`norm_axis` "M"),
    and two matrices with GELU between."""

    norm_type: ClassVar[Callable[..., Any]] = partial(LayerNorm, eps=1e-6)
    has_biases: ClassVar[bool] = True

    def __init__(self, config: PartConfig, norm_axis: str = "D", *, out: str = "O", dtype: DTypeLike, keys: Keys):
        sizes, self.is_late = config.sizes, norm_axis == "M"
        self.merged = sizes["M"]
        self.norm = self.norm_type(norm_axis, sizes, dtype=dtype)
        product = partial(Einsum, sizes=sizes, bias=self.has_biases, dtype=dtype, keys=keys)
        self.up, self.down = product("BPM,MW->BPW"), product(f"BPW,W{out}->BP{out}")

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPD = x_BPD if self.is_late else self.norm(x_BPD)
        x_BPM = x_BPD.reshape(len(x_BPD), -1, self.merged)
        return self.down(gelu(self.up(self.norm(x_BPM) if self.is_late else x_BPM)))


class RmsMerger(Merger):
    """The merger of Qwen2.5-VL."""

    norm_type = partial(RMSNorm, eps=1e-6)


class MergedMatrix(nnx.Module):
    """A matrix of merged patches, [B, P, E] to [B, P, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPE,EO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPE: jax.Array) -> jax.Array:
        return self.matrix(x_BPE)


class GlmMerger(nnx.Module):
    """The merger of GLM-4V, [B, P, O] to [B, P, O]: a matrix, a norm with GELU, and a gated MLP."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, product = config.sizes, partial(Einsum, dtype=dtype, keys=keys)
        self.matrix = product("BPO,OA->BPA", {**sizes, "A": sizes["O"]})
        self.norm = LayerNorm("O", sizes, 1e-5, dtype=dtype)
        self.gate, self.up = product("BPO,OW->BPW", sizes), product("BPO,OW->BPW", sizes)
        self.down, self.act = product("BPW,WO->BPO", sizes), ACTS_BY_NAME[config.hidden_act]
        self.limit = config.swiglu_limit

    def __call__(self, x_BPO: jax.Array) -> jax.Array:
        x_BPO = gelu(self.norm(self.matrix(x_BPO)))
        gate_BPW, up_BPW = limited_factors(self.gate(x_BPO), self.up(x_BPO), self.limit)
        return self.down(self.act(gate_BPW) * up_BPW)


class QwenVit(FeatureEncoder):
    """Patches [P, C] of images of any size to features [P / s^2, O]."""

    takes = ("pixel_values", "image_grid_thw")
    config: Any
    deep: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.patch = Einsum("BPC,CD->BPD", config.sizes, bias=self.has_patch_bias, dtype=dtype, keys=keys)
        if config.positions:
            self.positions = nnx.Param(normal(keys(), (config.sizes["P"], config.sizes["D"]), dtype))
        self.layers = nnx.List(self.blocks(config, dtype, keys))

    has_patch_bias: ClassVar[bool] = False

    def blocks(self, config: Any, dtype: DTypeLike, keys: Keys) -> list[Block]:
        """Returns all layers."""
        return [self.block(config, dtype, keys) for _ in range(config.depth)]

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        """Returns a layer."""
        raise NotImplementedError

    def taps(self, h: int, w: int) -> Taps:
        """Returns which learned positions the patches of an image of h x w read, in raster order."""
        return Taps(np.zeros((h * w, 1), np.int32), np.zeros((h * w, 1), np.float32))

    def window_numbers(self, at_P2: np.ndarray) -> np.ndarray:
        """Returns the number of the window of each patch of an image, by its row and column."""
        return np.zeros(len(at_P2), np.int32)

    def segments_of(self, layer: int, frames_BP: jax.Array, windows_BP: jax.Array) -> jax.Array:
        """Returns what the patches that see each other in a layer have the same number of."""
        return frames_BP

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches, grids = patches_by_grid(features, 2)
        s, places, frame, window = self.config.spatial_merge_size, [], 0, 0
        for t, h, w in grids.tolist():
            order = block_order(h, w, s)
            at, taps = raster(h, w)[order], self.taps(h, w)
            numbers = self.window_numbers(at)
            for _ in range(t):
                places.append(
                    (
                        taps.index_PA[order],
                        taps.weight_PA[order],
                        at,
                        np.full(h * w, frame, np.int32),
                        (numbers + window).astype(np.int32),
                    )
                )
                frame, window = frame + 1, window + int(numbers.max()) + 1
        size = bucket(len(patches), multiple=s * s)
        index, weight, *others = zip(*places, strict=True)
        at, frames, windows = map(np.concatenate, others)
        arrays = (
            padded(patches, size),
            padded(np.concatenate(as_wide(index)), size),
            padded(np.concatenate(as_wide(weight)), size),
            padded(at, size),
            padded(frames, size, -1),
            padded(windows, size, -1),
        )
        merged = [(t, h // s, w // s) for t, h, w in grids.tolist()]
        return Prepared(arrays, np.arange(len(patches) // s**2), [t * h * w for t, h, w in merged], merged)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return random_patches(rng, grids, self.config.spatial_merge_size, self.config.sizes["C"])

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size * self.config.spatial_merge_size)

    def embedded(self, patches_PC: jax.Array, index_PA: jax.Array, weight_PA: jax.Array) -> jax.Array:
        """Returns the first layer's input [1, P, D]."""
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype))
        return x_BPD + self.learned(index_PA, weight_PA, x_BPD.dtype) if self.config.positions else x_BPD

    def learned(self, index_PA: jax.Array, weight_PA: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the learned positions [P, D] of patches, interpolated in float32."""
        return read_taps(self.positions[...], index_PA, weight_PA).astype(dtype)

    def __call__(
        self,
        patches_PC: jax.Array,
        index_PA: jax.Array,
        weight_PA: jax.Array,
        at_P2: jax.Array,
        frames_P: jax.Array,
        windows_P: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.embedded(patches_PC, index_PA, weight_PA)
        turns, deep = self.turns(at_P2, frames_P, windows_P), []
        for i, layer in enumerate(self.layers):
            x_BPD = layer(x_BPD, self.segments_of(i, frames_P[None], windows_P[None]), turns)
            if i in self.config.deepstack:
                deep.append(self.deep[self.config.deepstack.index(i)](x_BPD))
        return self.ended(x_BPD), tuple(deep)

    def turns(self, at_P2: jax.Array, frames_P: jax.Array, windows_P: jax.Array) -> Any:
        """Returns what the layers' attention takes as angles."""
        return cos_sin(rows_then_columns(at_P2[None], self.config.sizes["H"], self.config.rope_theta))

    def ended(self, x_BPD: jax.Array) -> Any:
        """Returns the features [1, P / s^2, O] of the last layer's output."""
        return self.projector(x_BPD)


def plain_block(config: Any, dtype: DTypeLike, keys: Keys, eps: float = 1e-6, rotate: Any = apply_rope) -> Block:
    """Returns a layer with layer norms and biases; `rotate` as in `Attention`."""
    return Block(
        config,
        partial(LayerNorm, "D", config.sizes, eps, dtype=dtype),
        Attention(config, rotate=rotate, dtype=dtype, keys=keys),
        MLP(config, ACTS_BY_NAME[config.hidden_act], dtype=dtype, keys=keys),
        dtype=dtype,
    )


def gated_block(config: Any, dtype: DTypeLike, keys: Keys) -> Block:
    """Returns a layer with RMS norms and a gated MLP, without biases."""
    return Block(
        config,
        partial(RMSNorm, "D", config.sizes, config.rms_norm_eps, dtype=dtype),
        Attention(config, bias=False, out_bias=False, rotate=apply_rope, dtype=dtype, keys=keys),
        MLP(config, ACTS_BY_NAME[config.hidden_act], gated=True, bias=False, dtype=dtype, keys=keys),
        dtype=dtype,
    )


class Qwen3Vit(QwenVit):
    """The tower of Qwen3-VL: learned positions, and features for the first layers of the text (deepstack)."""

    has_patch_bias = True

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.deep = nnx.List([Merger(config, "M", dtype=dtype, keys=keys) for _ in config.deepstack])

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys)

    def taps(self, h: int, w: int) -> Taps:
        return bilinear_taps(h, w, self.config.table_side, self.config.table_side)


class Qwen2Vit(QwenVit):
    """The tower of Qwen2-VL."""

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys)


class Qwen25Vit(QwenVit):
    """The tower of Qwen2.5-VL: most layers see windows of `window_side` x `window_side` patches."""

    kv: ClassVar[str] = "N"

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return Block(
            config,
            partial(RMSNorm, "D", config.sizes, 1e-6, dtype=dtype),
            Attention(config, rotate=apply_rope, kv=self.kv, dtype=dtype, keys=keys),
            MLP(config, ACTS_BY_NAME[config.hidden_act], gated=True, dtype=dtype, keys=keys),
            dtype=dtype,
        )

    def window_numbers(self, at_P2: np.ndarray) -> np.ndarray:
        at = at_P2 // self.config.window_side
        numbers: np.ndarray = at[:, 0] * (at[:, 1].max() + 1) + at[:, 1]
        return numbers

    def segments_of(self, layer: int, frames_BP: jax.Array, windows_BP: jax.Array) -> jax.Array:
        return frames_BP if layer in self.config.fullatt_block_indexes else windows_BP


class ExaoneVit(Qwen25Vit):
    """The tower of EXAONE 4.5, where several heads share keys and values."""

    kv = "K"


class HyperClovaVit(Qwen25Vit):
    """The tower of Qwen2.5-VL, behind whose merger is a matrix."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.merger = RmsMerger(config, out="E", dtype=dtype, keys=keys)

    def ended(self, x_BPD: jax.Array) -> Any:
        return self.projector(self.merger(x_BPD))


class GlmVit(QwenVit):
    """The tower of GLM-4V: a norm of the patches before learned positions, and a matrix that joins s x s patches."""

    has_patch_bias = True

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        norm = partial(RMSNorm, "D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.patch_norm, self.norm = norm() if config.positions else None, norm()
        self.downsample = Einsum("BPM,MO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return gated_block(config, dtype, keys)

    def taps(self, h: int, w: int) -> Taps:
        return bicubic_taps(h, w, self.config.table_side, self.config.table_side)

    def embedded(self, patches_PC: jax.Array, index_PA: jax.Array, weight_PA: jax.Array) -> jax.Array:
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype))
        if self.patch_norm is None:
            return x_BPD
        x_BPD = self.patch_norm(x_BPD)
        return x_BPD + self.learned(index_PA, weight_PA, x_BPD.dtype)

    def ended(self, x_BPD: jax.Array) -> Any:
        B, P, D = x_BPD.shape
        s2 = self.config.spatial_merge_size**2
        blocks = jnp.swapaxes(self.norm(x_BPD).reshape(B, P // s2, s2, D), 2, 3)  # (channel, row, column)
        return self.projector(self.downsample(blocks.reshape(B, P // s2, D * s2)))


class GlmOcrVit(GlmVit):
    """The tower of GLM-OCR: no learned positions, norms of queries and keys, and perhaps biases."""

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        bias, act = config.attention_bias, ACTS_BY_NAME[config.hidden_act]
        qk_norm = partial(RMSNorm, "H", config.sizes, config.rms_norm_eps, dtype=dtype)
        return Block(
            config,
            partial(RMSNorm, "D", config.sizes, config.rms_norm_eps, dtype=dtype),
            Attention(config, bias=bias, out_bias=bias, rotate=apply_rope, norm=qk_norm, dtype=dtype, keys=keys),
            MLP(config, act, gated=True, bias=bias, limit=config.swiglu_limit, dtype=dtype, keys=keys),
            dtype=dtype,
        )

    def taps(self, h: int, w: int) -> Taps:
        return QwenVit.taps(self, h, w)
