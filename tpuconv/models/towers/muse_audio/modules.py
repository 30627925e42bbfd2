"""The audio encoder of Muse Spark. A feature depends on the samples before it and its own, so that what follows a sound
changes nothing.

Letters: B sounds, T steps of a stage, D its width."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, normal, normalize
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import convolved_channels
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, feature_rows, given, noise
from tpuconv.models.towers.muse_audio.family import STAGE_BLOCKS, STAGE_MLPS, STAGE_PATCHES, STAGE_WIDTHS
from tpuconv.models.towers.places import bucket


class CausalBlock(nnx.Module):
    """A convolution of each channel over the last steps, then an MLP behind a norm, [B, T, D] to [B, T, D], with a
    residual connection around all."""

    def __init__(self, config: Any, width: int, mlp: int, *, dtype: DTypeLike, keys: Keys):
        sizes = {"D": width, "F": mlp}
        self.kernel = nnx.Param(normal(keys(), (config.conv_kernel_size, width), dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype))
        self.norm = ScaledRMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.up = Einsum("BTD,DF->BTF", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", sizes, bias=True, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.hidden_act]

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        y_BTD = convolved_channels(x_BTD, kernel, len(kernel) - 1) + self.bias[...]
        return x_BTD + self.down(self.act(self.up(self.norm(y_BTD))))


class Stage(nnx.Module):
    """Joins steps, [B, T, A] to [B, T / p, D], then blocks."""

    def __init__(self, config: Any, stage: int, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        width, self.patch_size = sizes[STAGE_WIDTHS[stage]], sizes[STAGE_PATCHES[stage]]
        joined = self.patch_size * (sizes[STAGE_WIDTHS[stage - 1]] if stage else 1)
        own = {"A": joined, "D": width}
        self.patch = Einsum("BTA,AD->BTD", own, bias=True, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("D", own, config.rms_norm_eps, dtype=dtype)
        self.blocks = nnx.List(
            [
                CausalBlock(config, width, sizes[STAGE_MLPS[stage]], dtype=dtype, keys=keys)
                for _ in range(sizes[STAGE_BLOCKS[stage]])
            ]
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        x_BTD = self.norm(self.patch(x_BTD.reshape(B, T // self.patch_size, D * self.patch_size)))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


class MuseAudio(FeatureEncoder):
    """Samples [B, T] to features [B, T / samples, O]."""

    takes = ("input_values", "input_values_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.stages = nnx.List([Stage(config, stage, dtype=dtype, keys=keys) for stage in range(4)])
        self.norm = ScaledRMSNorm("K", config.sizes, config.rms_norm_eps, dtype=dtype)

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        samples = 5 * self.config.samples
        mask = np.arange(samples) < np.array([[samples], [samples // 2]])
        return {"input_values": noise(rng, 2, samples), "input_values_mask": mask}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        values_BT, each = given(features, "input_values", 2), self.config.samples
        B, T = values_BT.shape
        if T % each:
            raise UsageError(f"input_values has {T} samples, no multiple of {each}")
        mask_BT = given(features, "input_values_mask", 2) if "input_values_mask" in features else np.ones((B, T))
        counts = np.ceil(mask_BT.sum(axis=1) / each).astype(int)
        width = bucket(T // each, 64)
        fill = [(0, padded_rows(B) - B), (0, width * each - T)]
        return Prepared((np.pad(values_BT, fill),), feature_rows(counts, width), counts.tolist())

    def __call__(self, values_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BTD = values_BT[..., None].astype(self.norm.scale.dtype)
        for stage in self.stages:
            x_BTD = stage(x_BTD)
        return self.projector(self.norm(x_BTD)), ()


class NormedSound(nnx.Module):
    """A matrix, an RMS norm, and an RMS norm without a scale, [B, T, K] to [B, T, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BTK,KO->BTO", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("O", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.eps = config.embed_eps

    def __call__(self, x_BTK: jax.Array) -> jax.Array:
        x_BTO = self.norm(self.matrix(x_BTK))
        return normalize(x_BTO, 1, self.eps).astype(x_BTO.dtype)
