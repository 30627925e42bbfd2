"""The tower of ERNIE 4.5 VL, and its resampler."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, gelu
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import padded, patches_by_grid
from tpuconv.models.towers.qwen_vit.modules import QwenVit, plain_block
from tpuconv.models.towers.vit import Block


class NormedMatrices(nnx.Module):
    """Two matrices with GELU between and a layer norm behind, [B, P, width] to [B, P, M]; `width` is a letter."""

    def __init__(self, config: PartConfig, width: str, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.up, self.down = product(f"BP{width},{width}W->BPW"), product("BPW,WM->BPM")
        self.norm = LayerNorm("M", config.sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BPE: jax.Array) -> jax.Array:
        return self.norm(self.down(gelu(self.up(x_BPE))))


class Resampler(nnx.Module):
    """Joins s x s patches, then two frames, [1, P, D] to [1, Q, O]. `frames_Q2` are for each feature the numbers of the
    joined patches of its two frames; of an image both are the same."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        new = partial(NormedMatrices, config, dtype=dtype, keys=keys)
        self.merged = config.sizes["M"]
        self.spatial, self.temporal = new("M"), new("E")
        self.matrix = Einsum("BPM,MO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = RMSNorm("O", config.sizes, config.text_eps, dtype=dtype)

    def __call__(self, x_BPD: jax.Array, frames_Q2: jax.Array) -> jax.Array:
        x_BPM = self.spatial(x_BPD.reshape(len(x_BPD), -1, self.merged))
        x_BQE = x_BPM[:, frames_Q2].reshape(len(x_BPM), len(frames_Q2), -1)
        return self.norm(self.matrix(self.temporal(x_BQE)))


class ErnieVit(QwenVit):
    """The tower of ERNIE 4.5 VL: as Qwen2-VL's, with patches of one frame and a norm behind the layers. The frames of a
    video are joined in pairs."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.norm = LayerNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys, config.rms_norm_eps)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        _, grids = patches_by_grid(features, 2)
        prepared, s, pairs, ended, first = super().prepare(features), self.config.spatial_merge_size, [], [], 0
        for t, h, w in grids.tolist():
            if t > 1 and t % 2:
                raise UsageError(
                    f"image_grid_thw has a clip of {t} frames, which are joined in pairs",
                    hint="give an even number of frames, as the video processor does",
                )
            tokens = (h // s) * (w // s)
            numbers_TX = first + np.arange(t * tokens, dtype=np.int32).reshape(t, tokens)
            pairs.append(np.stack([numbers_TX[::2], numbers_TX[1::2] if t > 1 else numbers_TX], axis=-1).reshape(-1, 2))
            ended.append((max(t // 2, 1), h // s, w // s))
            first += t * tokens
        frames_Q2 = np.concatenate(pairs)
        return replace(
            prepared,
            arrays=(*prepared.arrays, padded(frames_Q2, len(prepared.arrays[0]) // s**2)),
            rows=np.arange(len(frames_Q2)),
            counts=[self.tokens_of(grid) for grid in ended],
            grids=ended,
        )

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        *others, frames_Q2 = arrays
        x_BPD, deep = super().__call__(*others)
        return self.projector(self.norm(x_BPD), frames_Q2), deep

    def ended(self, x_BPD: jax.Array) -> jax.Array:
        return x_BPD
