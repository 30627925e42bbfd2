"""The audio encoder of Gemma 4, of the kind of USM (arXiv:2303.01037): two convolutions that halve time and frequency,
and conformer layers (arXiv:2005.08100) that see the last tokens."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import (
    MASKED_SCORE,
    Einsum,
    Keys,
    LayerNorm,
    ScaledRMSNorm,
    normal,
    sinusoids,
    soft_capped,
)
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import StridedConvolution, convolved_channels
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, given, noise
from tpuconv.models.towers.gemma4.limits import LimitedEinsum
from tpuconv.models.towers.places import bucket

USM_NORM_EPS = 1e-6
"""Of norms that do not read `rms_norm_eps`."""
LOG_2, LOG_1E = np.float32(np.log(2)), np.float32(np.log(1 + np.e))


class Attention(nnx.Module):
    """Attention to the last tokens with a bias by distance, x [B, T, D] to [B, T, D]. Scores are in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config, sizes = config, config.sizes
        self.q, self.k, self.v = (LimitedEinsum("BTD,DNH->BTNH", config, dtype=dtype, keys=keys) for _ in range(3))
        self.o = LimitedEinsum("BTNH,NHD->BTD", config, dtype=dtype, keys=keys)
        self.distance = Einsum("RD,DNH->RNH", sizes, dtype=dtype, keys=keys)
        self.scale = nnx.Param(jnp.zeros(sizes["H"], dtype))

    def __call__(self, x_BTD: jax.Array, is_sound_BT: jax.Array) -> jax.Array:
        past, H, T = self.config.attention_context_left - 1, self.config.sizes["H"], x_BTD.shape[1]
        q_BTNH, k_BTNH, v_BTNH = (each(x_BTD).astype(jnp.float32) for each in (self.q, self.k, self.v))
        q_BTNH = q_BTNH * (H**-0.5 / LOG_2) * nnx.softplus(self.scale[...].astype(jnp.float32))
        k_BTNH = k_BTNH * (LOG_1E / LOG_2) if self.config.scales_keys else k_BTNH
        waves_RD = sinusoids(jnp.arange(past + 1)[None], x_BTD.shape[-1])[0].astype(x_BTD.dtype)
        r_RNH = self.distance(waves_RD).astype(jnp.float32)
        distance_TS = np.arange(T)[:, None] - np.arange(T)
        by_distance_BNTR = jnp.einsum("BTNH,RNH->BNTR", q_BTNH, r_RNH)
        bias_BNTS = jnp.take_along_axis(by_distance_BNTR, np.clip(distance_TS, 0, past)[None, None], axis=-1)
        scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) + bias_BNTS
        seen_BTS = ((distance_TS >= 0) & (distance_TS < self.config.tokens_seen)) & is_sound_BT[:, None]
        scores_BNTS = soft_capped(scores_BNTS, self.config.attention_logit_cap)
        weights_BNTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BNTS, MASKED_SCORE), axis=-1)
        return self.o(jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BTNH).astype(x_BTD.dtype))


class ConformerPart(nnx.Module):
    """A part of a layer between two norms. Values before norms are limited, so that their squares are finite."""

    def __init__(self, config: Any, eps: float, *, dtype: DTypeLike):
        self.config = config
        self.norm, self.post_norm = (ScaledRMSNorm("D", config.sizes, eps, dtype=dtype) for _ in range(2))

    def limited(self, x: jax.Array) -> jax.Array:
        """Returns x, limited to what its dtype has."""
        most = min(self.config.gradient_clipping, float(jnp.finfo(x.dtype).max))  # type: ignore[no-untyped-call]
        return jnp.clip(x, -most, most)


class HalfMLP(ConformerPart):
    """An MLP whose output is halved (`residual_weight`), [B, T, D] to [B, T, D], with its residual connection."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, USM_NORM_EPS, dtype=dtype)
        self.up = LimitedEinsum("BTD,DF->BTF", config, dtype=dtype, keys=keys)
        self.down = LimitedEinsum("BTF,FD->BTD", config, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.hidden_act]

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = self.down(self.act(self.up(self.norm(self.limited(x_BTD)))))
        halved_BTD: jax.Array = self.post_norm(self.limited(y_BTD)) * self.config.residual_weight
        return x_BTD + halved_BTD


class LightConvolution(ConformerPart):
    """A gate, a convolution of each channel over the last tokens and a matrix, [B, T, D] to [B, T, D], with its
    residual connection."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, config.rms_norm_eps, dtype=dtype)
        sizes = config.sizes
        self.up = LimitedEinsum("BTD,DG->BTG", config, dtype=dtype, keys=keys)
        self.kernel = nnx.Param(normal(keys(), (sizes["c"], sizes["D"]), dtype))
        self.down = LimitedEinsum("BTD,DA->BTA", config, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.hidden_act]

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD, gate_BTD = jnp.split(self.up(self.norm(x_BTD)), 2, axis=-1)
        last = self.config.conv_kernel_size - 1
        y_BTD = convolved_channels(y_BTD * nnx.sigmoid(gate_BTD), self.kernel[...], last)
        return x_BTD + self.down(self.act(self.post_norm(self.limited(y_BTD))))


class ConformerLayer(nnx.Module):
    """One layer, [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm, self.post_attn_norm, self.norm = (
            ScaledRMSNorm("D", config.sizes, USM_NORM_EPS, dtype=dtype) for _ in range(3)
        )
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.mlp_before, self.mlp_after = (HalfMLP(config, dtype=dtype, keys=keys) for _ in range(2))
        self.conv = LightConvolution(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, is_sound_BT: jax.Array) -> jax.Array:
        return self.convolved(self.attended(self.mlp_before(x_BTD), is_sound_BT))

    def attended(self, x_BTD: jax.Array, is_sound_BT: jax.Array) -> jax.Array:
        """Returns the hidden states [B, T, D] behind the attention."""
        limited = self.conv.limited
        y_BTD = self.attn(self.attn_norm(limited(x_BTD)), is_sound_BT)
        return x_BTD + self.post_attn_norm(limited(y_BTD))

    def convolved(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the output [B, T, D], by the hidden states behind the attention."""
        return self.norm(self.conv.limited(self.mlp_after(self.conv(x_BTD))))


def random_frames(rng: np.random.Generator, frames: int, channels: int) -> dict[str, np.ndarray]:
    """Returns random frames [2, T, M] of two sounds, of which the second has three fifths."""
    mask = np.arange(frames) < np.array([[frames], [3 * frames // 5]])
    return {"input_features": noise(rng, 2, frames, channels), "input_features_mask": mask}


def frames_of(features: Mapping[str, np.ndarray], stride: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns frames [B, T, M], which of them are sound [B, T], and how many features each sound has if every
    `stride`th frame has one. B is padded to a power of two, T to a bucket."""
    frames_BTM, is_sound_BT = given(features, "input_features", 3), given(features, "input_features_mask", 2)
    if frames_BTM.shape[:2] != is_sound_BT.shape:
        raise UsageError(f"input_features has {frames_BTM.shape[:2]} frames, its mask {is_sound_BT.shape}")
    B, T = is_sound_BT.shape
    fill = [(0, padded_rows(B) - B), (0, bucket(T) - T)]
    is_sound_BT = np.pad(is_sound_BT.astype(bool), fill)
    return np.pad(frames_BTM, [*fill, (0, 0)]), is_sound_BT, is_sound_BT[:B, ::stride].sum(axis=1).tolist()


class Usm(FeatureEncoder):
    """Frames [B, T, M] of mel spectrograms to features [B, T / 4, O]."""

    takes = ("input_features", "input_features_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        widths = (1, sizes["C"], sizes["E"])
        self.convs = nnx.List(
            [
                StridedConvolution((3, 3, *widths[i : i + 2]), stride=2, bias=False, dtype=dtype, keys=keys)
                for i in range(2)
            ]
        )
        self.conv_norms = nnx.List([LayerNorm(x, sizes, config.rms_norm_eps, bias=False, dtype=dtype) for x in "CE"])
        self.entry = Einsum("BTM,MD->BTD", sizes, dtype=dtype, keys=keys)
        self.layers = nnx.List([ConformerLayer(config, dtype=dtype, keys=keys) for _ in range(sizes["L"])])
        self.out = Einsum("BTD,DW->BTW", sizes, bias=True, dtype=dtype, keys=keys)

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        return random_frames(rng, 64, 4 * self.config.sizes["M"] // self.config.sizes["E"])

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames_BTM, is_sound_BT, counts = frames_of(features, 4)
        return Prepared((frames_BTM, is_sound_BT), np.flatnonzero(is_sound_BT[:, ::4]), counts)

    def __call__(self, frames_BTM: jax.Array, is_sound_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BTMC = frames_BTM[..., None].astype(self.convs[0].kernel.dtype)
        for conv, norm in zip(self.convs, self.conv_norms, strict=True):
            x_BTMC = nnx.relu(norm(conv(x_BTMC * is_sound_BT[:, :, None, None])))
            is_sound_BT = is_sound_BT[:, ::2]
        x_BTD = self.entry(x_BTMC.reshape(*x_BTMC.shape[:2], -1))
        for layer in self.layers:
            x_BTD = layer(x_BTD, is_sound_BT)
        return self.projector(self.out(x_BTD)), ()
