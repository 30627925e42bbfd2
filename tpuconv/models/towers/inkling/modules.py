"""The encoders of Inkling and Inkling 2.

Letters: B patches, T frames, Y rows and X columns of a patch, A and E widths before and behind a layer; P patches of
all images and Z their class tokens; N sounds, M mel frequencies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, apply_rope_to_neighbours, gelu, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.angles import cos_sin, from_one
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded
from tpuconv.models.towers.places import Taps, bilinear_taps_of_centers, bucket
from tpuconv.models.towers.qwen_vit.modules import QwenVit
from tpuconv.models.towers.vit import MLP, Attention, Block

NORM_OF_FEATURES = 1e-6
"""The epsilon of norms of Inkling. No key has it."""


class FeatureNorm(nnx.Module):
    """An RMS norm [..., O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.norm = RMSNorm("O", config.sizes, NORM_OF_FEATURES, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class FoldingLayer(nnx.Module):
    """Folds t frames, s rows and s columns into one vector, and a matrix: [B, T, Y, X, C] to [B, T / t, Y / s, X / s,
    E], and a norm with GELU; of the last layer to [B, 1, 1, 1, O], without."""

    def __init__(self, config: PartConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes, is_last = {**config.sizes, **config.layer_sizes[layer]}, layer in config.layer_sets["J"]
        self.t, self.s = config.steps[layer]
        self.matrix = Einsum("BTYXA,AO->BTYXO" if is_last else "BTYXA,AE->BTYXE", sizes, dtype=dtype, keys=keys)
        self.norm = None if is_last else RMSNorm("E", sizes, NORM_OF_FEATURES, dtype=dtype)

    def __call__(self, x_BTYXC: jax.Array) -> jax.Array:
        B, T, Y, X, C = x_BTYXC.shape
        t, s = self.t, self.s
        x = x_BTYXC.reshape(B, T // t, t, Y // s, s, X // s, s, C).transpose(0, 1, 3, 5, 2, 4, 6, 7)
        x_BTYXE = self.matrix(x.reshape(B, T // t, Y // s, X // s, -1))
        return x_BTYXE if self.norm is None else gelu(self.norm(x_BTYXE))


class FoldingMLP(FeatureEncoder):
    """Patches [B, T, Y, X, C] of images to a feature of each [B, O]."""

    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.layers = nnx.List([FoldingLayer(config, i, dtype=dtype, keys=keys) for i in range(config.sizes["L"])])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a patch."""
        config = self.config
        return config.temporal_patch_size, config.patch_size, config.patch_size, config.num_channels

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches = given(features, "pixel_values", 5)
        if patches.shape[1:] != self.shape:
            raise UsageError(f"pixel_values has patches of {patches.shape[1:]}, the model {self.shape}")
        return Prepared((padded(patches, bucket(len(patches))),), np.arange(len(patches)), [len(patches)])

    def placed(self, prepared: Prepared, runs: Sequence[int]) -> Prepared:
        return replace(prepared, counts=runs)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return {"pixel_values": noise(rng, sum(h * w for h, w in grids), *self.shape)}

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size)

    def __call__(self, x_BTYXC: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x = x_BTYXC.astype(self.layers[0].matrix.kernel.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.projector(x), ()


class MelBins(FeatureEncoder):
    """Numbers [N, T, M] of the bins of mel frequencies to a feature of each frame [N, T, O]: the sum of a vector for
    each."""

    takes = ("audio_input_ids", "audio_input_ids_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.table = nnx.Param(normal(keys(), (config.sizes["Z"], config.sizes["O"]), dtype))

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        bins_NTM, is_sound_NT = given(features, "audio_input_ids", 3), given(features, "audio_input_ids_mask", 2)
        mels, most = self.config.n_mel_bins, self.config.mel_vocab_size
        if bins_NTM.shape != (*is_sound_NT.shape, mels) or bins_NTM.min(initial=0) < 0 or bins_NTM.max() >= most:
            raise UsageError(
                f"audio_input_ids has shape {bins_NTM.shape} with numbers to {bins_NTM.max()}, its mask "
                f"{is_sound_NT.shape}; the model has {mels} frequencies of {most} bins"
            )
        rows_NTM = padded(
            bins_NTM.astype(np.int32) + np.arange(mels, dtype=np.int32) * most, padded_rows(len(bins_NTM))
        )
        length = bucket(rows_NTM.shape[1])
        rows_NTM = np.pad(rows_NTM, [(0, 0), (0, length - rows_NTM.shape[1]), (0, 0)])
        is_sound_NT = np.pad(is_sound_NT.astype(bool), [(0, 0), (0, length - is_sound_NT.shape[1])])
        return Prepared((rows_NTM,), np.flatnonzero(is_sound_NT), is_sound_NT.sum(axis=1).tolist())

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        bins = rng.integers(0, self.config.mel_vocab_size, (2, 9, self.config.n_mel_bins))
        return {"audio_input_ids": bins, "audio_input_ids_mask": np.arange(9) < np.array([[9], [5]])}

    def __call__(self, rows_NTM: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(self.table[...][rows_NTM].sum(axis=2)), ()


class InklingMerger(nnx.Module):
    """Two matrices of s x s patches, [1, P, D] to [1, P / s^2, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        matrix = partial(Einsum, sizes=config.sizes, bias=config.projector_bias, dtype=dtype, keys=keys)
        self.up, self.down, self.act = matrix("BPM,MW->BPW"), matrix("BPW,WO->BPO"), ACTS_BY_NAME[config.hidden_act]
        self.merged = config.sizes["M"]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.down(self.act(self.up(x_BPD.reshape(len(x_BPD), -1, self.merged))))


class InklingVit(QwenVit):
    """The tower of Inkling 2: patches [P, C] of images of any size, a class token for each image behind all patches,
    learned positions beside rotary ones."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.class_token, self.class_position = (
            nnx.Param(normal(keys(), (config.sizes["D"],), dtype)) for _ in range(2)
        )
        self.norm = LayerNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return Block(
            config,
            partial(LayerNorm, "D", config.sizes, config.layer_norm_eps, dtype=dtype),
            Attention(config, rotate=apply_rope_to_neighbours, dtype=dtype, keys=keys),
            MLP(config, ACTS_BY_NAME[config.hidden_act], dtype=dtype, keys=keys),
            scaled=True,
            dtype=dtype,
        )

    def taps(self, h: int, w: int) -> Taps:
        return bilinear_taps_of_centers(h, w, self.config.table_side, self.config.table_side)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        tokens, grids = given(features, "pixel_values", 4), given(features, "image_grid_thw", 2)
        s, p = self.config.spatial_merge_size, self.config.patch_size
        if tokens.shape[1:3] != (s * p, s * p):
            raise UsageError(f"pixel_values has blocks of {tokens.shape[1:3]} pixels, the model of {s * p} x {s * p}")
        patches = tokens.reshape(len(tokens), s, p, s, p, -1).swapaxes(2, 3).reshape(len(tokens) * s * s, -1)
        prepared = super().prepare({"pixel_values": patches, "image_grid_thw": grids * np.array([1, s, s])})
        images = np.repeat(np.arange(len(grids), dtype=np.int32), grids.prod(axis=1) * s * s)
        *arrays, frames, _ = prepared.arrays
        classes = padded(np.arange(len(grids), dtype=np.int32), padded_rows(len(grids)), -1)
        return replace(prepared, arrays=(*arrays, padded(images, len(frames), -1), classes))

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        side = self.config.spatial_merge_size * self.config.patch_size
        count = sum(h * w for h, w in grids)
        return {
            "pixel_values": noise(rng, count, side, side, self.config.in_channels),
            "image_grid_thw": np.array([(1, h, w) for h, w in grids]),
        }

    def __call__(
        self,
        patches_PC: jax.Array,
        index_PA: jax.Array,
        weight_PA: jax.Array,
        at_P2: jax.Array,
        images_P: jax.Array,
        images_Z: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.embedded(patches_PC, index_PA, weight_PA)
        class_D = (self.class_token[...] + self.class_position[...]).astype(x_BPD.dtype)
        classes_BZD = jnp.broadcast_to(class_D, (1, len(images_Z), len(class_D)))
        x_BSD = self.norm(jnp.concatenate([x_BPD, classes_BZD], axis=1))
        at_S2 = jnp.concatenate([at_P2, jnp.full((len(images_Z), 2), -1, at_P2.dtype)])
        turns = cos_sin(from_one(at_S2[None], self.config.sizes["H"], self.config.rope_theta))
        images_S = jnp.concatenate([images_P, images_Z])
        for layer in self.layers:
            x_BSD = layer(x_BSD, images_S[None], turns)
        return self.projector(x_BSD[:, : len(patches_PC)]), ()
