"""Convolutions of encoders.

Letters: B sounds, T frames, M mel channels, C channels of the input, E or W of the output, p and q taps, G what is left
of the mel channels, D the width of the encoder."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, normal


class StridedConvolution(nnx.Module):
    """A convolution over the axes between the first and the last: x [B, T, C] to [B, T', E], or [B, T, M, C] to [B, T',
    M', E]. The kernel is [p, C, E] or [p, q, C, E].

    Args:
        shape: of the kernel.
        stride: of all these axes.
        pad: zeros before and after; "SAME" for as many that every `stride`th place has an output, the odd one after.
        groups: into which the channels are cut: C of the kernel are the channels of one, which alone its outputs read.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        stride: int = 1,
        pad: int | tuple[int, int] | str = 1,
        bias: bool = True,
        groups: int = 1,
        dtype: DTypeLike,
        keys: Keys,
    ):
        self.kernel = nnx.Param(normal(keys(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[-1], dtype)) if bias else None
        self.stride, self.pad, self.groups = stride, (pad, pad) if isinstance(pad, int) else pad, groups

    def __call__(self, x: jax.Array) -> jax.Array:
        axes, kernel = x.ndim - 2, self.kernel[...]
        letters = "TM"[:axes]
        names = (f"B{letters}C", f"{letters}CE", f"B{letters}C")
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            (self.stride,) * axes,
            self.pad if isinstance(self.pad, str) else [self.pad] * axes,
            dimension_numbers=_numbers(names),
            feature_group_count=self.groups,
        )
        return y if self.bias is None else y + self.bias[...]


class HalvingStage(nnx.Module):
    """A convolution of each channel with a stride of two and a matrix, [B, T, M, C] to [B, T / 2, M / 2, C]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        shape = (sizes["p"], sizes["q"], 1, sizes["C"])
        self.by_channel = StridedConvolution(shape, stride=2, groups=sizes["C"], dtype=dtype, keys=keys)
        self.matrix = Einsum("BTMC,CW->BTMW", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BTMC: jax.Array) -> jax.Array:
        return self.matrix(self.by_channel(x_BTMC))


class SoundEntry(nnx.Module):
    """Three convolutions, each with a stride of two, and a matrix: frames [B, T, M] to [B, T / 8, D]. Frames that are
    of no sound are 0 for the second and third, and for the matrix.

    Args:
        act: of the output of each convolution.
    """

    def __init__(self, config: Any, act: Callable[[jax.Array], jax.Array], *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        shape = (sizes["p"], sizes["q"], 1, sizes["C"])
        self.first = StridedConvolution(shape, stride=2, dtype=dtype, keys=keys)
        self.second, self.third = (HalvingStage(config, dtype=dtype, keys=keys) for _ in range(2))
        self.matrix = Einsum("BTWG,WGD->BTD", sizes, bias=True, dtype=dtype, keys=keys)
        self.act = act

    def __call__(self, x_BTM: jax.Array, is_sound_BT: jax.Array) -> jax.Array:
        x_BTMC = x_BTM[..., None]
        for stage in (self.first, self.second, self.third):
            is_sound_BT = is_sound_BT[:, ::2]
            x_BTMC = self.act(stage(x_BTMC)) * is_sound_BT[..., None, None]
        return self.matrix(x_BTMC.swapaxes(2, 3))


class BatchNorm(nnx.Module):
    """Batch norm with the statistics of its training (arXiv:1502.03167), in float32; [..., E] to [..., E]."""

    def __init__(self, width: int, eps: float, *, dtype: DTypeLike):
        self.scale, self.variance = nnx.Param(jnp.ones(width, dtype)), nnx.Param(jnp.ones(width, dtype))
        self.bias, self.mean = nnx.Param(jnp.zeros(width, dtype)), nnx.Param(jnp.zeros(width, dtype))
        self.batches = nnx.Variable(jnp.zeros((), jnp.int32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, variance, bias, mean = (
            each[...].astype(jnp.float32) for each in (self.scale, self.variance, self.bias, self.mean)
        )
        y = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + self.eps) * scale + bias
        return y.astype(x.dtype)


def convolved_channels(x: jax.Array, kernel: jax.Array, before: int) -> jax.Array:
    """Returns a convolution of each channel by itself over frames, x [B, T, ...] with a kernel [p, ...] of the same
    channels: a frame reads as many frames before it as `before` says, zeros outside of the sound."""
    taps, T = len(kernel), x.shape[1]
    near = jnp.pad(x, [(0, 0), (before, taps - 1 - before), *[(0, 0)] * (x.ndim - 2)])
    return jnp.asarray(sum(near[:, tap : tap + T] * kernel[tap] for tap in range(taps)))


def _numbers(names: tuple[str, str, str]) -> jax.lax.ConvDimensionNumbers:
    """Returns the order of axes as jax has it: B and C of the arrays are N and C there, C and E of the kernel I and
    O."""
    x, kernel, y = (name.replace("T", "H").replace("M", "W") for name in names)
    x, y = x.replace("B", "N"), y.replace("B", "N")
    return x, kernel.replace("C", "I").replace("E", "O"), y  # type: ignore[return-value]
