"""The audio encoders of Qwen-Omni and Qwen3-ASR. Sounds are cut into chunks of which each has positions of its own;
then the steps of all sounds are one sequence, in which those of a chunk, or of several, see each other.

Letters: X chunks, T frames of a chunk, M mel channels, P steps."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu, normal, sinusoids
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import StridedConvolution
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, given, noise, padded
from tpuconv.models.towers.places import bucket
from tpuconv.models.towers.qwen_audio.family import halved
from tpuconv.models.towers.vit import MLP, Attention, Block


class ChunkedSounds(FeatureEncoder):
    """Mel spectrograms [B, M, T] with a mask to features [1, P, O].

    Attributes:
        mask_name: the feature that says which frames are sound.
        convolutions: how many convolutions halve the number of frames.
        key_bias: whether keys have biases.
    """

    takes: ClassVar[tuple[str, ...]] = ("input_features", "feature_attention_mask")
    mask_name: ClassVar[str] = "feature_attention_mask"
    convolutions: ClassVar[int]
    key_bias: ClassVar[bool]
    config: Any
    convs: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.add_convolutions(config, dtype, keys)
        self.layers = nnx.List(
            [
                Block(
                    config,
                    lambda: LayerNorm("D", config.sizes, 1e-5, dtype=dtype),
                    Attention(config, bias=True if self.key_bias else "qv", dtype=dtype, keys=keys),
                    MLP(config, ACTS_BY_NAME[config.hidden_act], dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(config.sizes["L"])
            ]
        )
        self.norm = LayerNorm("D", config.sizes, 1e-5, dtype=dtype)

    def add_convolutions(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        """Sets what is before the layers."""
        raise NotImplementedError

    @property
    def frames(self) -> int:
        """The number of frames of a chunk."""
        return 2 * int(self.config.n_window)

    def chunks_of(self, mel_MT: np.ndarray, mask_T: np.ndarray) -> list[np.ndarray]:
        """Returns the chunks of a sound, the last of which may be shorter."""
        mel_MT = mel_MT[:, mask_T]
        return [mel_MT[:, first : first + self.frames] for first in range(0, mel_MT.shape[1], self.frames)]

    def windows(self, lengths: list[list[int]]) -> int:
        """Returns how many steps of a sound see each other, by the numbers of frames of the chunks of each sound."""
        raise NotImplementedError

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        frames = 3 * self.frames
        mask = (np.arange(frames) < np.array([[frames], [self.frames + 30]])).astype(np.int32)
        return {"input_features": noise(rng, 2, self.config.num_mel_bins, frames), self.mask_name: mask}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        mel_BMT, mask_BT = given(features, "input_features", 3), given(features, self.mask_name, 2).astype(bool)
        if (len(mel_BMT), mel_BMT.shape[2]) != mask_BT.shape:
            raise UsageError(f"input_features has shape {mel_BMT.shape}, {self.mask_name} {mask_BT.shape}")
        chunks: list[np.ndarray] = []
        lengths: list[list[int]] = []
        index, segment = [], []
        steps = halved(self.frames, self.convolutions)
        for mel_MT, mask_T in zip(mel_BMT, mask_BT, strict=True):
            cut = self.chunks_of(mel_MT, mask_T)
            lengths.append([chunk.shape[1] for chunk in cut])
            in_steps = [halved(length, self.convolutions) for length in lengths[-1]]
            index += [(len(chunks) + i) * steps + np.arange(count) for i, count in enumerate(in_steps)]
            chunks += cut
        window, sounds = self.windows(lengths), 0
        for each in lengths:
            numbers = np.arange(sum(halved(length, self.convolutions) for length in each)) // window
            segment.append(sounds + numbers)
            sounds += int(numbers.max(initial=-1)) + 1
        index_P, segment_P = np.concatenate(index).astype(np.int32), np.concatenate(segment).astype(np.int32)
        size = bucket(len(index_P))
        longest = max(length for each in lengths for length in each)
        arrays = (
            padded(np.stack([padded(chunk.T, self.frames) for chunk in chunks]), padded_rows(len(chunks))),
            padded(self.lengths_of([length for each in lengths for length in each], longest), padded_rows(len(chunks))),
            padded(index_P, size),
            padded(segment_P, size, -1),
        )
        counts = [sum(halved(length, self.convolutions) for length in each) for each in lengths]
        return self.ends(Prepared(arrays, np.arange(len(index_P)), counts))

    def lengths_of(self, lengths: list[int], longest: int) -> np.ndarray:
        """Returns the number of frames of each chunk behind which convolutions read zeros."""
        raise NotImplementedError

    def ends(self, prepared: Prepared) -> Prepared:
        """Returns what is prepared with what the end of the encoder needs."""
        return prepared

    def embedded(self, chunks_XTM: jax.Array, length_X: jax.Array) -> jax.Array:
        """Returns the steps [X, P, D] of chunks."""
        raise NotImplementedError

    def hidden(self, chunks_XTM: jax.Array, length_X: jax.Array, index_P: jax.Array, segment_P: jax.Array) -> jax.Array:
        """Returns the output [1, P, D] of the last layer."""
        x_XPD = self.embedded(chunks_XTM.astype(self.convs[0].kernel.dtype), length_X)
        x_XPD = x_XPD + sinusoids(jnp.arange(x_XPD.shape[1])[None], x_XPD.shape[-1]).astype(x_XPD.dtype)
        x_BPD = x_XPD.reshape(1, -1, x_XPD.shape[-1])[:, index_P]
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_P[None])
        return x_BPD

    def __call__(self, *arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(self.norm(self.hidden(*arrays))), ()


def before(x_XT: jax.Array, length_X: jax.Array) -> jax.Array:
    """Returns the frames of x [X, T, ...] before a length, and zeros behind it."""
    is_before_XT = jnp.arange(x_XT.shape[1]) < length_X[:, None]
    return x_XT * is_before_XT.reshape(*is_before_XT.shape, *[1] * (x_XT.ndim - 2))


class Qwen3Audio(ChunkedSounds):
    """The encoder of Qwen3-Omni. The convolutions of a chunk read zeros behind the longest chunk of the call only, so
    that the last steps of a shorter one depend on what the frames behind it become."""

    convolutions = 3
    key_bias = True

    def add_convolutions(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        channels = (1, *[config.sizes["C"]] * 3)
        self.convs = nnx.List(
            [StridedConvolution((3, 3, *channels[i : i + 2]), stride=2, dtype=dtype, keys=keys) for i in range(3)]
        )
        self.entry = Einsum("BTMC,MCD->BTD", config.sizes, dtype=dtype, keys=keys)

    def windows(self, lengths: list[list[int]]) -> int:
        longest = max(length for each in lengths for length in each)
        return int(halved(longest, 3)) * int(self.config.n_window_infer // self.frames)

    def lengths_of(self, lengths: list[int], longest: int) -> np.ndarray:
        return np.full(len(lengths), longest, np.int32)

    def embedded(self, chunks_XTM: jax.Array, length_X: jax.Array) -> jax.Array:
        x_XTMC = chunks_XTM[..., None]
        for conv in self.convs:
            x_XTMC, length_X = gelu(conv(before(x_XTMC, length_X))), halved(length_X, 1)
        return self.entry(x_XTMC)


class Qwen3AsrAudio(Qwen3Audio):
    """The same of Qwen3-ASR, where the convolutions read what the features have behind the sound."""

    takes = ("input_features", "input_features_mask")
    mask_name = "input_features_mask"

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        found = super().prepare(features)
        mel_BMT, mask_BT = given(features, "input_features", 3), given(features, self.mask_name, 2).astype(bool)
        if mel_BMT.shape[2] % self.frames:
            raise UsageError(f"input_features has {mel_BMT.shape[2]} frames, no multiple of {self.frames}")
        whole_XTM = np.swapaxes(mel_BMT, 1, 2).reshape(-1, self.frames, mel_BMT.shape[1])
        has_sound_X = mask_BT.reshape(-1, self.frames).any(axis=1)
        chunks_XTM, length_X, *places = found.arrays
        chunks_XTM = padded(whole_XTM[has_sound_X], len(chunks_XTM))
        return Prepared((chunks_XTM, np.full_like(length_X, self.frames), *places), found.rows, found.counts)


class Qwen25Audio(ChunkedSounds):
    """The encoder of Qwen2.5-Omni: the steps of a chunk see each other, and a feature is the mean of two."""

    convolutions = 1
    key_bias = False

    def add_convolutions(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        mel, width = config.sizes["M"], config.sizes["D"]
        self.convs = nnx.List(
            [
                StridedConvolution((3, mel, width), dtype=dtype, keys=keys),
                StridedConvolution((3, width, width), stride=2, dtype=dtype, keys=keys),
            ]
        )

    def windows(self, lengths: list[list[int]]) -> int:
        return int(self.config.n_window)

    def lengths_of(self, lengths: list[int], longest: int) -> np.ndarray:
        return np.asarray(lengths, np.int32)

    def ends(self, prepared: Prepared) -> Prepared:
        starts = np.cumsum([0, *prepared.counts[:-1]])
        counts = [count // 2 for count in prepared.counts]
        pairs = [start + 2 * np.arange(count) for start, count in zip(starts, counts, strict=True)]
        first_P = np.concatenate(pairs).astype(np.int32)
        arrays = (*prepared.arrays, padded(first_P, len(prepared.arrays[-1]) // 2))
        return Prepared(arrays, np.arange(len(first_P)), counts)

    def embedded(self, chunks_XTM: jax.Array, length_X: jax.Array) -> jax.Array:
        x_XTD = before(gelu(self.convs[0](chunks_XTM)), length_X)
        return gelu(self.convs[1](x_XTD))

    def __call__(self, *arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        *others, first_P = arrays
        x_BPD = self.hidden(*others)
        return self.projector(self.norm((x_BPD[:, first_P] + x_BPD[:, first_P + 1]) / 2)), ()


class SoundEnd(nnx.Module):
    """One matrix, [B, P, W] to [B, P, O], and vectors that nothing reads."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.matrix = Einsum("BPW,WO->BPO", sizes, bias=True, dtype=dtype, keys=keys)
        self.ends = nnx.Param(normal(keys(), (sizes["z"], sizes["O"]), dtype))

    def __call__(self, x_BPW: jax.Array) -> jax.Array:
        return self.matrix(x_BPW)


class SoundEnds(nnx.Module):
    """Two matrices with the activation of the tower between, [B, P, D] to [B, P, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.up = Einsum("BPD,DA->BPA", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPA,AO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.hidden_act]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.down(self.act(self.up(x_BPD)))
