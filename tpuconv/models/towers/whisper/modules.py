"""The encoder of Whisper and its kin, and the projectors behind them.

Letters: B sounds, M mel channels, T frames, P steps of the encoder (two frames each)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import (
    Einsum,
    Keys,
    LayerNorm,
    apply_rope,
    gelu,
    normal,
    rope_cos_sin,
)
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import StridedConvolution
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, feature_rows, given, noise, padded
from tpuconv.models.towers.places import bucket
from tpuconv.models.towers.vit import MLP, Attention, Block


class Whisper(FeatureEncoder):
    """Mel spectrograms [B, M, T] of one length to features [B, P / joined, O]. All steps see each other, silence too
    (Voxtral).

    Attributes:
        mask_name: the feature that says which frames are sound; empty if all count.
        sees_silence: whether steps see those that are not sound.
    """

    mask_name: ClassVar[str] = ""
    sees_silence: ClassVar[bool] = True
    config: Any

    takes: ClassVar[tuple[str, ...]] = ("input_features",)

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        M, D, c = (config.sizes[x] for x in "MDc")
        self.convs = nnx.List(
            [
                StridedConvolution((c, M, D), dtype=dtype, keys=keys),
                StridedConvolution((c, D, D), stride=2, dtype=dtype, keys=keys),
            ]
        )
        self.add_positions(config, dtype, keys)
        self.layers = nnx.List([self.block(config, dtype, keys) for _ in range(config.sizes["L"])])
        self.norm = LayerNorm("D", config.sizes, 1e-5, dtype=dtype)

    def add_positions(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        """Sets the positions, in float32 as Voxtral has them."""
        self.positions = nnx.Param(normal(keys(), (config.sizes["P"], config.sizes["D"]), jnp.float32))

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        """Returns a layer."""
        return Block(
            config,
            lambda: LayerNorm("D", config.sizes, 1e-5, dtype=dtype),
            Attention(
                config,
                bias="qv",
                rotate=self.rotate,
                kv=self.kv,
                sees_before=self.sees_before,
                dtype=dtype,
                keys=keys,
            ),
            MLP(config, ACTS_BY_NAME[config.hidden_act], dtype=dtype, keys=keys),
            dtype=dtype,
        )

    rotate: ClassVar[Any] = None
    kv: ClassVar[str] = "N"
    sees_before: ClassVar[bool] = False

    def check_length(self, frames: int) -> None:
        """Raises UsageError if spectrograms have another number of frames than the model."""
        if frames != 2 * self.config.max_source_positions:
            raise UsageError(
                f"input_features has {frames} frames, the model {2 * self.config.max_source_positions}",
                hint="give all that the release's processor returns, with its padding",
            )

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        frames = 2 * self.config.max_source_positions
        features = {"input_features": noise(rng, 2, self.config.num_mel_bins, frames)}
        if self.mask_name:
            features[self.mask_name] = (np.arange(frames) < np.array([[frames], [frames // 2]])).astype(np.int32)
        return features

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        mel_BMT = given(features, "input_features", 3)
        B, _, T = mel_BMT.shape
        self.check_length(T)
        steps = (T + 1) // 2
        lengths = np.full(B, T) if not self.mask_name else given(features, self.mask_name, 2).sum(axis=1)
        if len(lengths) != B:
            raise UsageError(f"input_features has {B} sounds, {self.mask_name} {len(lengths)}")
        in_steps = (lengths - 1) // 2 + 1
        width = steps // self.per_feature
        counts = np.minimum(self.counts(in_steps), width)
        count = padded_rows(B)
        is_sound_BP = (np.arange(steps) < in_steps[:, None]) | self.sees_silence
        segment_BP = padded(np.where(is_sound_BP, 0, -1).astype(np.int32), count, -1)
        return Prepared((padded(mel_BMT, count), segment_BP), feature_rows(counts, width), counts.tolist())

    @property
    def per_feature(self) -> int:
        """The number of steps that a feature is made of."""
        return int(self.config.joined)

    def counts(self, steps_B: np.ndarray) -> np.ndarray:
        """Returns how many features each sound has, by its number of steps."""
        return steps_B // self.per_feature

    def embedded(self, x_BPD: jax.Array) -> jax.Array:
        """Returns the first layer's input [B, P, D] of the output of the convolutions."""
        return (x_BPD + self.positions[...][: x_BPD.shape[1]]).astype(x_BPD.dtype)

    def angles(self, x_BPD: jax.Array) -> Any:
        """Returns the rotary angles of queries and keys; None without."""
        return None

    def hidden(
        self,
        mel_BMT: jax.Array,
        segment_BP: jax.Array,
        is_frame_T: jax.Array | None = None,
        is_key_BP: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the output [B, P, D] of the last layer. `is_frame_T` is False for frames that pad all spectrograms,
        `is_key_BP` for steps that none attends to; None for none."""
        x_BTD = gelu(self.convs[0](jnp.swapaxes(mel_BMT, 1, 2).astype(self.convs[0].kernel.dtype)))
        if is_frame_T is not None:
            x_BTD = jnp.where(is_frame_T[:, None], x_BTD, 0)
        x_BPD = self.embedded(gelu(self.convs[1](x_BTD)))
        angles = self.angles(x_BPD)
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_BP, angles, is_key_BP)
        return x_BPD

    def __call__(self, mel_BMT: jax.Array, segment_BP: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD, joined = self.norm(self.hidden(mel_BMT, segment_BP)), self.config.joined
        B, P, D = x_BPD.shape
        x_BPW = x_BPD[:, : P // joined * joined].reshape(B, -1, joined * D)
        return self.projector(x_BPW), ()


class MossWhisper(Whisper):
    """The same of MOSS: the last steps of a sound are joined with silence."""

    mask_name = "input_features_mask"
    takes = ("input_features", "input_features_mask", "padding_mask")

    def counts(self, steps_B: np.ndarray) -> np.ndarray:
        return -(-steps_B // self.per_feature)


class ChunkedWhisper(Whisper):
    """The same of MiniCPM-o, of spectrograms of any length up to the model's: steps see their chunk and earlier ones,
    and features are means of steps behind the projector. As in the release, silence behind a sound is seen, up to as
    many steps as the sound has frames."""

    takes = ("audio_features", "audio_feature_lens")
    sees_before = True

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        frames = min(150, 2 * self.config.max_source_positions)
        mel_BMT = noise(rng, 2, self.config.num_mel_bins, frames)
        return {"audio_features": mel_BMT, "audio_feature_lens": np.array([frames, frames * 2 // 3])}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        mel_BMT, lengths = given(features, "audio_features", 3), given(features, "audio_feature_lens", 1, 2).reshape(-1)
        B, _, T = mel_BMT.shape
        longest = 2 * self.config.max_source_positions
        if longest < T:
            raise UsageError(
                f"audio_features has {T} frames, more than {longest}",
                hint="cut sounds into pieces, as the processor does",
            )
        if len(lengths) != B or lengths.max(initial=0) > T:
            raise UsageError(f"audio_feature_lens is {lengths.tolist()}, audio_features has {B} sounds of {T} frames")
        width, steps = min(longest, bucket(T)), (T + 1) // 2
        counts, at_P = (lengths + 1) // 2 // self.per_feature, np.arange(width // 2)
        is_key_BP = at_P < np.minimum(lengths, steps)[:, None]
        chunk_P = at_P // self.config.chunk if self.config.chunk else np.zeros_like(at_P)
        count = padded_rows(B)
        arrays = (
            np.pad(mel_BMT, [(0, count - B), (0, 0), (0, width - T)]),
            np.arange(width) < T,
            np.broadcast_to(chunk_P.astype(np.int32), (count, width // 2)),
            padded(is_key_BP, count, True),
        )
        return Prepared(arrays, feature_rows(counts, width // 2 // self.per_feature), counts.tolist())

    def __call__(  # type: ignore[override]
        self, mel_BMT: jax.Array, is_frame_T: jax.Array, chunk_BP: jax.Array, is_key_BP: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.norm(self.hidden(mel_BMT, chunk_BP, is_frame_T, is_key_BP))
        return means_of_steps(self.projector(x_BPD), self.per_feature), ()


class GlmWhisper(Whisper):
    """The same of GLM-ASR, of spectrograms of any length, with rotary positions."""

    mask_name = "input_features_mask"
    kv = "K"
    takes = ("input_features", "input_features_mask")
    rotate = staticmethod(apply_rope)

    def add_positions(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        """Sets nothing: there are no learned positions."""

    def check_length(self, frames: int) -> None:
        if frames % (2 * self.config.joined):
            raise UsageError(f"input_features has {frames} frames, no multiple of {2 * self.config.joined}")

    def counts(self, steps_B: np.ndarray) -> np.ndarray:
        return steps_B // 4  # the reference counts four steps a feature, however many the encoder joins

    def embedded(self, x_BPD: jax.Array) -> jax.Array:
        return x_BPD

    def angles(self, x_BPD: jax.Array) -> Any:
        rope, dims = Rope(theta=self.config.rope_theta), int(self.config.sizes["H"] * self.config.partial_rotary_factor)
        cos, sin = rope_cos_sin(rope, dims, jnp.arange(x_BPD.shape[1])[None])
        return cos.astype(x_BPD.dtype), sin.astype(x_BPD.dtype)


class HalvedWhisper(Whisper):
    """The same with the mean of two steps before the last norm; silence is not seen (Qwen2-Audio)."""

    mask_name = "feature_attention_mask"
    sees_silence = False
    takes = ("input_features", "feature_attention_mask")

    @property
    def per_feature(self) -> int:
        return 2

    def halved(self, mel_BMT: jax.Array, segment_BP: jax.Array) -> jax.Array:
        """Returns what the projector reads [B, P / 2, D]."""
        return self.norm(means_of_steps(self.hidden(mel_BMT, segment_BP), self.per_feature))

    def __call__(self, *arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(self.halved(*arrays)), ()


class FlamingoWhisper(HalvedWhisper):
    """The same of Audio Flamingo 3."""

    mask_name = "input_features_mask"
    takes = ("input_features", "input_features_mask")


class MusicWhisper(FlamingoWhisper):
    """The same of Music Flamingo: features turn by the time at which they are, and by the number of their window. A
    sound longer than a window is several, one after the other."""

    def placed(self, prepared: Prepared, runs: Sequence[int]) -> Prepared:
        mel_BMT, segment_BP = prepared.arrays
        steps, theta = segment_BP.shape[1] // 2, np.float32(self.config.rope_theta)
        step = np.float32(4 * self.config.audio_frame_step)
        window_B = np.zeros(len(mel_BMT), np.float32)
        ends, before, first = np.cumsum(runs), 0, 0
        for i, count in enumerate(prepared.counts):
            if before in ends:
                first = i
            window_B[i], before = i - first, before + count
        dims = int(self.config.sizes["D"] * self.config.partial_rotary_factor)
        rates = (theta ** -(np.arange(0, dims, 2, dtype=np.float32) / dims)).repeat(2)
        at_P = np.arange(steps, dtype=np.float32)
        seconds_BP = (window_B * steps * step)[:, None] + at_P * step
        by_window_BPA = np.broadcast_to((window_B / theta)[:, None, None] * rates, (len(window_B), steps, len(rates)))
        by_step_BPA = np.broadcast_to((at_P / theta * np.float32(2 * np.pi))[:, None] * rates, by_window_BPA.shape)
        angles_BPA = np.concatenate([by_window_BPA, by_step_BPA], axis=-1) * (-seconds_BP * 2 * np.pi)[..., None]
        pairs = angles_BPA[..., 0::2].astype(np.float32)[:, :, None]
        return replace(prepared, arrays=(mel_BMT, segment_BP, np.cos(pairs), np.sin(pairs)))

    def __call__(self, *arrays: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        mel_BMT, segment_BP, *turns = arrays
        return self.projector(turned_by_time(self.halved(mel_BMT, segment_BP), *turns)), ()


def means_of_steps(x_BPD: jax.Array, count: int) -> jax.Array:
    """Returns the means of so many steps each [B, P / count, D], without the last steps if these are fewer."""
    B, P, D = x_BPD.shape
    return x_BPD[:, : P // count * count].reshape(B, P // count, count, D).mean(axis=2)


def turned_by_time(x_BPD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns x [B, P, D] of which the first pairs (2i, 2i + 1) are turned by angles, in float32."""
    a, b = (x_BPD[..., first : 2 * cos.shape[-1] : 2].astype(jnp.float32) for first in (0, 1))
    cos, sin = cos[:, :, 0], sin[:, :, 0]
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(*a.shape[:-1], -1)
    return jnp.concatenate([pairs.astype(x_BPD.dtype), x_BPD[..., pairs.shape[-1] :]], axis=-1)


class SoundMlp(nnx.Module):
    """Two matrices, [B, P, W] to [B, P, O], and a norm behind them if `has_norm`."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.has_bias
        self.up = Einsum("BPW,WX->BPX", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPX,XO->BPO", sizes, bias=bias, dtype=dtype, keys=keys)
        self.norm = LayerNorm("O", sizes, config.eps, dtype=dtype) if config.has_norm else None
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def __call__(self, x_BPW: jax.Array) -> jax.Array:
        y_BPO = self.down(self.act(self.up(x_BPW)))
        return y_BPO if self.norm is None else self.norm(y_BPO)
