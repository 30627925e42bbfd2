"""MobileNetV5: convolutions of images, and attention to neighbourhoods.

Letters: B images, Y rows, X columns, C channels of the input, E of the output, N heads, H their width, P places as
queries or of features, S places as keys.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, gelu_tanh
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import StridedConvolution
from tpuconv.models.towers.encoder import FeatureEncoder, Grids, given, noise, padded, resized
from tpuconv.models.towers.mobilenet.family import FUSED_STAGES, NET_STAGES, AlikeBlocks
from tpuconv.models.towers.places import bilinear_weights

NET_NORM_EPS = 1e-6
"""The eps of all norms within the encoder."""
USUAL_PIXELS = 768
"""The rows, and columns, of pixels that the processor of Gemma 3n makes of every image."""
STRIDE = 16
"""The rows, and columns, of pixels of a place of the finest stage that is joined."""


def attend_to(q_BPNH: jax.Array, k_BSH: jax.Array, v_BSH: jax.Array) -> jax.Array:
    """Returns softmax attention [B, P, N, H] to places S whose keys and values all heads share. Scores and their
    softmax are in float32."""
    factor = q_BPNH.shape[-1] ** -0.5
    scores_BNPS = jnp.einsum("BPNH,BSH->BNPS", q_BPNH, k_BSH, preferred_element_type=jnp.float32) * factor
    return jnp.einsum("BNPS,BSH->BPNH", jax.nn.softmax(scores_BNPS).astype(v_BSH.dtype), v_BSH)


class Near(StridedConvolution):
    """A convolution with a kernel [p, q, C, E], an RMS norm of its channels, and GELU if it `acts`: [B, Y, X, C] to
    [B, Y', X', E]. With a kernel of one input channel each channel is convolved by itself."""

    def __init__(
        self,
        side: int,
        width: int,
        out: int,
        *,
        stride: int = 1,
        acts: bool = False,
        bias: bool = False,
        dtype: DTypeLike,
        keys: Keys,
    ):
        groups, shape = out if width == 1 else 1, (side, side, width, out)
        super().__init__(shape, stride=stride, pad="SAME", bias=bias, groups=groups, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("E", {"E": out}, NET_NORM_EPS, dtype=dtype)
        self.acts = acts

    def __call__(self, x: jax.Array) -> jax.Array:
        y_BYXE: jax.Array = self.norm(super().__call__(x))
        return gelu_tanh(y_BYXE) if self.acts else y_BYXE


class Mixed(Einsum):
    """A matrix of the channels of each place, an RMS norm of its channels, and GELU if it `acts`: [B, Y, X, C] to [B,
    Y, X, E]."""

    def __init__(self, width: int, out: int, *, acts: bool = False, dtype: DTypeLike, keys: Keys):
        super().__init__("BYXC,CE->BYXE", {"C": width, "E": out}, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("E", {"E": out}, NET_NORM_EPS, dtype=dtype)
        self.acts = acts

    def __call__(self, x: jax.Array) -> jax.Array:
        y_BYXE: jax.Array = self.norm(super().__call__(x))
        return gelu_tanh(y_BYXE) if self.acts else y_BYXE


class EdgeBlock(nnx.Module):
    """A convolution that widens the channels, and a matrix, [B, Y, X, C] to [B, Y', X', E]. It has a residual
    connection unless it halves rows and columns."""

    def __init__(self, width: int, mlp: int, out: int, stride: int, *, dtype: DTypeLike, keys: Keys):
        self.expand = Near(3, width, mlp, stride=stride, acts=True, dtype=dtype, keys=keys)
        self.project = Mixed(mlp, out, dtype=dtype, keys=keys)
        self.is_added = stride == 1

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        y_BYXE: jax.Array = self.project(self.expand(x_BYXC))
        return x_BYXC + y_BYXE if self.is_added else y_BYXE


class InvertedBlock(nnx.Module):
    """A universal inverted bottleneck (arXiv:2404.10518, section 4.1), [B, Y, X, C] to [B, Y', X', E]: two matrices
    that widen the channels and narrow them again, and convolutions of each channel before and between. It has a
    residual connection unless it halves rows and columns."""

    def __init__(
        self, blocks: AlikeBlocks, width: int, mlp: int, out: int, stride: int, *, dtype: DTypeLike, keys: Keys
    ):
        start, mid = blocks.start, blocks.mid
        self.start = Near(start, 1, width, stride=1 if mid else stride, dtype=dtype, keys=keys) if start else None
        self.expand = Mixed(width, mlp, acts=True, dtype=dtype, keys=keys)
        self.mid = Near(mid, 1, mlp, stride=stride, acts=True, dtype=dtype, keys=keys) if mid else None
        self.project = Mixed(mlp, out, dtype=dtype, keys=keys)
        self.scale = nnx.Param(jnp.ones(out, dtype))
        self.is_added = stride == 1

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        y: jax.Array = x_BYXC if self.start is None else self.start(x_BYXC)
        y = self.expand(y)
        y = y if self.mid is None else self.mid(y)
        y_BYXE = self.project(y) * self.scale[...]
        return x_BYXC + y_BYXE if self.is_added else y_BYXE


class AttentionBlock(nnx.Module):
    """Attention of all places to each other, whose heads share keys and values (arXiv:1911.02150), [B, Y, X, C] to the
    same, with its residual connection. Keys and values may be of every second row and column alone."""

    def __init__(self, blocks: AlikeBlocks, width: int, *, dtype: DTypeLike, keys: Keys):
        sizes = {"C": width, "N": blocks.heads, "H": blocks.head_dim}
        self.norm = ScaledRMSNorm("C", sizes, NET_NORM_EPS, dtype=dtype)
        self.q = Einsum("BYXC,CNH->BYXNH", sizes, dtype=dtype, keys=keys)
        self.k, self.v = (Einsum("BYXC,CH->BYXH", sizes, dtype=dtype, keys=keys) for _ in range(2))
        self.o = Einsum("BYXNH,NHC->BYXC", sizes, dtype=dtype, keys=keys)
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.is_reduced = blocks.key_stride > 1
        if self.is_reduced:
            self.key_reduced, self.value_reduced = (
                Near(3, 1, width, stride=blocks.key_stride, dtype=dtype, keys=keys) for _ in range(2)
            )

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        y = self.norm(x_BYXC)
        read = (self.key_reduced(y), self.value_reduced(y)) if self.is_reduced else (y, y)
        q_BYXNH, k_BYXH, v_BYXH = self.q(y), self.k(read[0]), self.v(read[1])
        B, Y, X, N, H = q_BYXNH.shape
        k_BSH, v_BSH = (each.reshape(B, -1, H) for each in (k_BYXH, v_BYXH))
        heads_BPNH = attend_to(q_BYXNH.reshape(B, Y * X, N, H), k_BSH, v_BSH)
        return x_BYXC + self.o(heads_BPNH.reshape(q_BYXNH.shape)) * self.scale[...]


class Fusion(nnx.Module):
    """Joins the outputs of stages, of which coarser ones are repeated: [B, y, x, C] of each to [B, Y, X, W], with as
    many rows and columns as the config says."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.resolution = config.sizes, config.resolution
        self.expand = Mixed(sizes["fused"], sizes["fused_mlp"], acts=True, dtype=dtype, keys=keys)
        self.project = Mixed(sizes["fused_mlp"], sizes["W"], dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("W", sizes, NET_NORM_EPS, dtype=dtype)

    def __call__(self, fine_BYXC: jax.Array, coarse_BYXC: jax.Array) -> jax.Array:
        _, y, x, _ = fine_BYXC.shape
        rows, columns = (np.arange(n) * m // n for n, m in zip((y, x), coarse_BYXC.shape[1:3], strict=True))
        joined = jnp.concatenate([fine_BYXC, coarse_BYXC[:, rows][:, :, columns]], axis=-1)
        x_BYXW = self.project(self.expand(joined))
        Y, X = self.resolution
        if y % Y or x % X:
            x_BYXW = resized(x_BYXW, bilinear_weights(Y, y), bilinear_weights(X, x)).astype(x_BYXW.dtype)
        else:
            x_BYXW = x_BYXW.reshape(-1, Y, y // Y, X, x // X, x_BYXW.shape[-1]).mean(axis=(2, 4))
        return self.norm(x_BYXW)


class MobileNet(FeatureEncoder):
    """Images [B, X, Y, X] of one size, any, to features [Z, O]: of the images, one after the other, then of the words
    of the projector."""

    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        self.stem = Near(3, 3, sizes["stem"], stride=2, acts=True, bias=True, dtype=dtype, keys=keys)
        stages, width = [], sizes["stem"]
        for number, stage in enumerate(NET_STAGES):
            out = sizes[f"stage{number}"]
            blocks: list[nnx.Module] = []
            for i in range(stage.depth):
                each, stride = stage.block(i), 1 if i else 2
                mlp = sizes.get(f"{each.name}_mlp")
                if each.heads:
                    blocks.append(AttentionBlock(each, width, dtype=dtype, keys=keys))
                elif each.is_edge:
                    blocks.append(EdgeBlock(width, mlp, out, stride, dtype=dtype, keys=keys))
                else:
                    blocks.append(InvertedBlock(each, width, mlp, out, stride, dtype=dtype, keys=keys))
                width = out
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
        self.fusion = Fusion(config, dtype=dtype, keys=keys)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        rows, columns = (max(sides) * 3 * STRIDE for sides in zip(*grids, strict=True))
        return {"pixel_values": noise(rng, len(grids), 3, rows, columns)}

    def usual_images(self, count: int) -> dict[str, np.ndarray]:
        return {"pixel_values": noise(np.random.default_rng(0), count, 3, USUAL_PIXELS, USUAL_PIXELS)}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels, each = given(features, "pixel_values", 4), self.config.tokens
        images = padded_rows(len(pixels))
        rows = np.arange(len(pixels) * each)
        return Prepared(
            (padded(pixels, images),), rows, [each] * len(pixels), others=self.projector.places(images * each)
        )

    def __call__(self, pixels_BCYX: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x = self.stem(pixels_BCYX.transpose(0, 2, 3, 1).astype(self.stem.kernel.dtype))
        outputs = []
        for stage in self.stages:
            for block in stage:
                x = block(x)
            outputs.append(x)
        x_BYXW = self.fusion(*(outputs[number] for number in FUSED_STAGES))
        x_BPW = x_BYXW.reshape(len(x_BYXW), -1, x_BYXW.shape[-1]) * self.config.hidden_size**0.5
        return self.projector.with_words(x_BPW), ()
