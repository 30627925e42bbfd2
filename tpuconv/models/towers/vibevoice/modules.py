"""The encoders of VibeVoice-ASR (arXiv:2508.19205). A feature depends on the samples before it and its own, so that
what follows a sound changes nothing, and a long sound is encoded in chunks.

Letters: B sounds, S samples, T steps of a stage, C, D and E channels; others as in the family."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, normal
from tpuconv.models.common.seen import Deep, Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import StridedConvolution, convolved_channels
from tpuconv.models.towers.encoder import ACTS_BY_NAME, SAMPLE_MASK, FeatureEncoder, feature_rows, noise, samples_of
from tpuconv.models.towers.places import bucket
from tpuconv.models.towers.vibevoice.family import VOICE_ENCODERS, VoiceEncoderConfig


class Tails:
    """The last inputs of each convolution, in the order in which they run: of the chunk before, and of this one.

    Args:
        before: inputs of the chunk before; none for the first chunk, before which there are zeros.
    """

    def __init__(self, before: Sequence[jax.Array] | None = None):
        self.before = None if before is None else iter(before)
        self.after: list[jax.Array] = []

    def joined(self, x_BTC: jax.Array, count: int) -> jax.Array:
        """Returns the input of the next convolution behind the last `count` ones of the chunk before."""
        B, _, C = x_BTC.shape
        before = jnp.zeros((B, count, C), x_BTC.dtype) if self.before is None else next(self.before)
        joined = jnp.concatenate([before, x_BTC], axis=1)
        self.after.append(joined[:, joined.shape[1] - count :])
        return joined


class StreamedConvolution(StridedConvolution):
    """A convolution of a step and those before it, [B, T, C] to [B, T / stride, E]."""

    def __init__(self, sizes: Mapping[str, int], stride: int = 1, *, dtype: DTypeLike, keys: Keys):
        super().__init__(tuple(sizes[x] for x in "cCE"), stride=stride, pad=0, dtype=dtype, keys=keys)

    def over(self, x_BTC: jax.Array, tails: Tails) -> jax.Array:
        """Returns the outputs for a chunk."""
        return self(tails.joined(x_BTC, self.kernel.shape[0] - self.stride))


class ChannelMixer(nnx.Module):
    """A convolution of each channel over a step and those before it, [B, T, D] to [B, T, D]."""

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.kernel = nnx.Param(normal(keys(), (sizes["p"], sizes["D"]), dtype))
        self.bias = nnx.Param(jnp.zeros(sizes["D"], dtype))

    def over(self, x_BTD: jax.Array, tails: Tails) -> jax.Array:
        """Returns the outputs for a chunk."""
        joined = tails.joined(x_BTD, self.kernel.shape[0] - 1)
        return convolved_channels(joined, self.kernel[...], 0)[:, : x_BTD.shape[1]] + self.bias[...]


class MixerBlock(nnx.Module):
    """A convolution of each channel and an MLP, each behind a norm, with a residual connection and a scale of channels,
    [B, T, D] to [B, T, D]."""

    def __init__(self, config: VoiceEncoderConfig, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.norm, self.mlp_norm = (ScaledRMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype) for _ in range(2))
        self.scale, self.mlp_scale = (nnx.Param(jnp.ones(sizes["D"], dtype)) for _ in range(2))
        self.mixer = ChannelMixer(sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTD,DF->BTF", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", sizes, bias=True, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.hidden_act]

    def over(self, x_BTD: jax.Array, tails: Tails) -> jax.Array:
        """Returns the outputs for a chunk."""
        x_BTD = x_BTD + self.mixer.over(self.norm(x_BTD), tails) * self.scale[...]
        return x_BTD + self.down(self.act(self.up(self.mlp_norm(x_BTD)))) * self.mlp_scale[...]


class VoiceStage(nnx.Module):
    """A convolution and blocks, [B, T, C] to [B, T / stride, D]."""

    def __init__(
        self,
        config: VoiceEncoderConfig,
        sizes: Mapping[str, int],
        depth: int,
        stride: int = 1,
        *,
        dtype: DTypeLike,
        keys: Keys,
    ):
        self.conv = StreamedConvolution(sizes, stride, dtype=dtype, keys=keys)
        self.blocks = nnx.List([MixerBlock(config, sizes, dtype=dtype, keys=keys) for _ in range(depth)])

    def over(self, x_BTC: jax.Array, tails: Tails) -> jax.Array:
        """Returns the outputs for a chunk."""
        x_BTD = self.conv.over(x_BTC, tails)
        for block in self.blocks:
            x_BTD = block.over(x_BTD, tails)
        return x_BTD


class VoiceEncoder(nnx.Module):
    """Samples [B, S, 1] to features [B, T, E]."""

    def __init__(self, config: VoiceEncoderConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, (stem, *depths) = config.stage_sizes, config.depths
        self.stem = VoiceStage(config, sizes["stem"], stem, dtype=dtype, keys=keys)
        self.stages = nnx.List(
            [
                VoiceStage(config, sizes[f"stages.{i}"], depth, stride, dtype=dtype, keys=keys)
                for i, (depth, stride) in enumerate(zip(depths, config.downsampling_ratios, strict=True))
            ]
        )
        self.head = StreamedConvolution(sizes["head"], dtype=dtype, keys=keys)

    def over(self, x_BSC: jax.Array, tails: Tails) -> jax.Array:
        """Returns the features of a chunk."""
        x = self.stem.over(x_BSC, tails)
        for stage in self.stages:
            x = stage.over(x, tails)
        return self.head.over(x, tails)


class VibeVoice(FeatureEncoder):
    """Samples [B, 1, S] to features [B, T, O]."""

    takes = ("input_values", SAMPLE_MASK)
    config: Any
    chunk: int
    samples: int

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.acoustic = VoiceEncoder(config.acoustic, dtype=dtype, keys=keys)
        self.semantic = VoiceEncoder(config.semantic, dtype=dtype, keys=keys)
        self.chunk, self.samples = config.acoustic_tokenizer_chunk_size, config.acoustic.samples

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        samples = 5 * self.samples
        mask = np.arange(samples) < np.array([[samples], [samples // 2]])
        return {"input_values": noise(rng, 2, 1, samples) * mask[:, None], SAMPLE_MASK: mask}

    def padded_length(self, features: int) -> int:
        """Returns the number of samples to which so many features are padded: a power of two of features up to a chunk,
        then chunks, in steps of an eighth at most."""
        if (length := bucket(features, 16) * self.samples) <= self.chunk:
            return length
        chunks = -(-features * self.samples // self.chunk)
        return -(-chunks // (step := max(1, padded_rows(chunks) // 16))) * step * self.chunk

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        values_BS, lengths = samples_of(features)
        B, S = values_BS.shape
        if S % self.samples:
            raise UsageError(f"input_values has {S} samples, no multiple of {self.samples}")
        counts = -(-lengths // self.samples)
        length = self.padded_length(S // self.samples)
        fill = [(0, padded_rows(B) - B), (0, length - S)]
        return Prepared((np.pad(values_BS, fill),), feature_rows(counts, length // self.samples), counts.tolist())

    def __call__(self, values_BS: jax.Array) -> tuple[jax.Array, Deep]:
        B, S = values_BS.shape
        x_BSC = values_BS[..., None].astype(self.acoustic.head.kernel[...].dtype)
        if self.chunk >= S:
            return self.over(x_BSC, Tails()), ()
        chunks = x_BSC.reshape(B, S // self.chunk, self.chunk, 1).swapaxes(0, 1)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda x: self._chunk(None, x)[0], chunks[0]))
        _, features = jax.lax.scan(self._chunk, zeros, chunks)
        return features.swapaxes(0, 1).reshape(B, -1, features.shape[-1]), ()

    def _chunk(self, before: list[jax.Array] | None, x_BSC: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        tails = Tails(before)
        features = self.over(x_BSC, tails)
        return tails.after, features

    def over(self, x_BSC: jax.Array, tails: Tails) -> jax.Array:
        """Returns the features of a chunk."""
        features: jax.Array = self.projector(*(getattr(self, name).over(x_BSC, tails) for name in VOICE_ENCODERS))
        return features


class MatricesAroundNorm(nnx.Module):
    """A matrix, a norm and a matrix, [B, T, W] to [B, T, O]."""

    def __init__(self, width: str, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.first = Einsum(f"BT{width},{width}M->BTM", sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("M", sizes, 1e-6, dtype=dtype)
        self.last = Einsum("BTM,MO->BTO", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x)))


class SumOfFeatures(nnx.Module):
    """Features of two encoders, [B, T, W] and [B, T, V], to [B, T, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.acoustic = MatricesAroundNorm("W", config.sizes, dtype=dtype, keys=keys)
        self.semantic = MatricesAroundNorm("V", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, acoustic_BTW: jax.Array, semantic_BTV: jax.Array) -> jax.Array:
        return self.acoustic(acoustic_BTW) + self.semantic(semantic_BTV)
