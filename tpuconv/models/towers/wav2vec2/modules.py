"""The encoder of wav2vec 2.0 (arXiv:2006.11477), which reads samples.

Letters: B sounds, S samples, T frames, D their width; others as `Wav2Vec2Config` has them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm
from tpuconv.models.common.seen import Deep, Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import StridedConvolution
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    SAMPLE_MASK,
    FeatureEncoder,
    feature_rows,
    noise,
    padded,
    samples_of,
)
from tpuconv.models.towers.places import bucket
from tpuconv.models.towers.vit import MLP, Attention, Block

LEAST_SAMPLES = 16_000
"""The samples of a sound that shorter ones are padded to, as one second has them."""


class NormedConvolution(nnx.Module):
    """A convolution, a norm and an activation, [B, T, C] to [B, T', E]."""

    def __init__(self, config: Any, number: int, *, dtype: DTypeLike, keys: Keys):
        sizes = config.module_sizes[f"convs.{number}"]
        shape, stride = tuple(sizes[letter] for letter in "cCE"), config.conv_stride[number]
        self.conv = StridedConvolution(shape, stride=stride, pad=0, bias=config.conv_bias, dtype=dtype, keys=keys)
        self.norm = LayerNorm("E", sizes, 1e-5, dtype=dtype)
        self.act = ACTS_BY_NAME[config.hidden_act]

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        return self.act(self.norm(self.conv(x_BTC)))


class Wav2Vec2(FeatureEncoder):
    """Samples [B, 1, S] to features [B, T, O]."""

    takes = ("input_values", SAMPLE_MASK)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, eps = config.sizes, config.layer_norm_eps
        taps, groups = sizes["p"], config.num_conv_pos_embedding_groups
        self.act = ACTS_BY_NAME[config.hidden_act]
        self.convs = nnx.List([NormedConvolution(config, i, dtype=dtype, keys=keys) for i in range(sizes["I"])])
        self.norm_before = LayerNorm("X", sizes, eps, dtype=dtype)
        self.matrix = Einsum("BTX,XD->BTD", sizes, bias=True, dtype=dtype, keys=keys)
        shape, pad = (taps, sizes["G"], sizes["D"]), (taps // 2, taps // 2 - 1)
        self.positions = StridedConvolution(shape, pad=pad, groups=groups, dtype=dtype, keys=keys)
        self.layers = nnx.List(
            [
                Block(
                    config,
                    lambda: LayerNorm("D", sizes, eps, dtype=dtype),
                    Attention(config, dtype=dtype, keys=keys),
                    MLP(config, self.act, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.norm = LayerNorm("D", sizes, eps, dtype=dtype)

    def frames_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns how many frames so many samples have."""
        for taps, stride in zip(self.config.conv_kernel, self.config.conv_stride, strict=True):
            samples = (samples - taps) // stride + 1
        return np.asarray(np.maximum(samples, 0))

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        samples = LEAST_SAMPLES // 2
        mask = np.arange(samples) < np.array([[samples], [3 * samples // 5]])
        return {"input_values": noise(rng, 2, 1, samples) * mask[:, None], SAMPLE_MASK: mask.astype(np.int64)}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        samples_BS, lengths = samples_of(features)
        B, S = samples_BS.shape
        counts, rows, length = self.frames_of(lengths), padded_rows(B), bucket(S, LEAST_SAMPLES)
        if not counts.all():
            raise UsageError(f"sound {int(counts.argmin())} has {lengths.min()} samples, too few for a feature")
        width = int(self.frames_of(np.array(length)))
        return Prepared(
            (
                np.pad(samples_BS, [(0, rows - B), (0, length - S)]),
                np.arange(width) < padded(counts, rows)[:, None],
            ),
            feature_rows(counts, width),
            counts.tolist(),
        )

    def __call__(self, samples_BS: jax.Array, is_sound_BT: jax.Array) -> tuple[jax.Array, Deep]:
        x = samples_BS[..., None].astype(self.matrix.kernel[...].dtype)
        for conv in self.convs:
            x = conv(x)
        x_BTD = jnp.where(is_sound_BT[..., None], self.matrix(self.norm_before(x)), 0)
        x_BTD = x_BTD + self.act(self.positions(x_BTD))
        segment_BT = jnp.where(is_sound_BT, 0, -1)
        for layer in self.layers:
            x_BTD = layer(x_BTD, segment_BT)
        return self.projector(self.norm(x_BTD)), ()
