"""The conformer of Granite Speech.

Letters: B sounds, T frames, Z blocks or windows of them, C frames of one, M, D, E, G, R and c as `ConformerConfig` has
them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.convolutions import BatchNorm, convolved_channels
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, given, noise
from tpuconv.models.towers.places import bucket

SPEECH_EPS = 1e-5
"""The epsilon of norms. No key has it."""


class HalvedMLP(nnx.Module):
    """A halved MLP behind its norm, [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        matrix = partial(Einsum, sizes=config.sizes, bias=config.mlp_bias, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", config.sizes, SPEECH_EPS, dtype=dtype)
        self.up, self.down = matrix("BTD,DF->BTF"), matrix("BTF,FD->BTD")
        self.act = ACTS_BY_NAME[config.hidden_act]

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return 0.5 * self.down(self.act(self.up(self.norm(x_BTD))))


class SpeechAttention(nnx.Module):
    """Attention of the frames of a block to each other, with an embedding of distances as further keys
    (arXiv:1803.02155), [B, T, D] to [B, T, D]. Scores are in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config, sizes = config, config.sizes
        self.norm = LayerNorm("D", sizes, SPEECH_EPS, dtype=dtype)
        self.q, self.k, self.v = (Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys) for _ in range(3))
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=True, dtype=dtype, keys=keys)
        self.distance = nnx.Param(normal(keys(), (sizes["R"], sizes["H"]), dtype))

    def __call__(self, x_BTD: jax.Array, is_sound_T: jax.Array) -> jax.Array:
        C, x_BTD = self.config.context_size, self.norm(x_BTD)
        q_BZCNH, k_BZCNH, v_BZCNH = (cut_windows(each(x_BTD), C) for each in (self.q, self.k, self.v))
        place = np.arange(C)
        by_distance_CCH = self.distance[...][place[:, None] - place + self.config.max_pos_emb]
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = product("BZCNH,BZSNH->BZNCS", q_BZCNH, k_BZCNH) + product("BZCNH,CSH->BZNCS", q_BZCNH, by_distance_CCH)
        is_key_ZS = cut_windows(is_sound_T[None], C)[0]
        scores = jnp.where(is_key_ZS[:, None, None], scores * q_BZCNH.shape[-1] ** -0.5, MASKED_SCORE)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BZCNH.dtype)
        y_BZCNH = jnp.einsum("BZNCS,BZSNH->BZCNH", weights, v_BZCNH)
        return self.o(y_BZCNH.reshape(len(x_BTD), -1, *y_BZCNH.shape[3:])[:, : x_BTD.shape[1]])


def cut_windows(x: jax.Array, length: int) -> jax.Array:
    """Returns [B, T, ...] as windows of so many frames [B, Z, C, ...]; zeros fill the last one."""
    B, T = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, -T % length), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(B, -1, length, *x.shape[2:])


class SpeechConvolution(nnx.Module):
    """A gate, a convolution of each channel over neighbouring frames and a batch norm between two matrices, [B, T, D]
    to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        matrix = partial(Einsum, sizes=sizes, bias=config.convolution_bias, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", sizes, SPEECH_EPS, dtype=dtype)
        self.up, self.gate, self.down = matrix("BTD,DE->BTE"), matrix("BTD,DE->BTE"), matrix("BTE,ED->BTD")
        self.kernel = nnx.Param(normal(keys(), (sizes["c"], sizes["E"]), dtype))
        self.bias = nnx.Param(jnp.zeros(sizes["E"], dtype)) if config.taps_bias else None
        self.act = ACTS_BY_NAME[config.hidden_act]
        self.batch_norm = BatchNorm(sizes["E"], SPEECH_EPS, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, is_sound: jax.Array) -> jax.Array:
        """`is_sound` are frames of each sound [B, T], or of all [T]."""
        x_BTD, kernel = self.norm(x_BTD), self.kernel[...]
        y_BTE = self.up(x_BTD) * nnx.sigmoid(self.gate(x_BTD)) * is_sound[..., None]
        y_BTE = convolved_channels(y_BTE, kernel, len(kernel) // 2)
        y_BTE = self.batch_norm(y_BTE if self.bias is None else y_BTE + self.bias[...])
        return self.down(self.act(y_BTE))


class MacaronLayer(nnx.Module):
    """Half an MLP, attention, a convolution, half an MLP and a norm (Conformer, arXiv:2005.08100, 2), [B, T, D] to
    [B, T, D].

    Attributes:
        mlp, attention, convolution: the classes of the parts.
        eps: of the last norm.
    """

    mlp: ClassVar[Any]
    attention: ClassVar[Any]
    convolution: ClassVar[Any]
    eps: ClassVar[float]

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.mlp_before, self.mlp_after = (self.mlp(config, dtype=dtype, keys=keys) for _ in range(2))
        self.attn = self.attention(config, dtype=dtype, keys=keys)
        self.conv = self.convolution(config, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", config.sizes, self.eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, mask: Any, *frames: jax.Array) -> jax.Array:
        """The attention is given the mask, or bias; the convolution which frames are of a sound, if it asks."""
        x_BTD = x_BTD + self.mlp_before(x_BTD)
        x_BTD = x_BTD + self.attn(x_BTD, mask)
        x_BTD = x_BTD + self.conv(x_BTD, *frames)
        return self.norm(x_BTD + self.mlp_after(x_BTD))


class SpeechLayer(MacaronLayer):
    """One layer of Granite Speech."""

    mlp, attention, convolution, eps = HalvedMLP, SpeechAttention, SpeechConvolution, SPEECH_EPS


class Conformer(FeatureEncoder):
    """Frames [B, T, M] of mel spectrograms to features [B, Z Q, O] of windows. As in transformers, frames behind a
    shorter sound are silence that all layers see."""

    takes = ("input_features", "input_features_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        matrix = partial(Einsum, sizes=sizes, bias=True, dtype=dtype, keys=keys)
        self.entry, self.guess, self.guessed = matrix("BTM,MD->BTD"), matrix("BTD,DG->BTG"), matrix("BTG,GD->BTD")
        self.layers = nnx.List([SpeechLayer(config, dtype=dtype, keys=keys) for _ in range(sizes["L"])])

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        frames = 2 * self.config.window_size + 1  # three windows, of which a shorter sound has two
        mask = np.arange(3 * self.config.queries) < np.array([[3], [2]]) * self.config.queries
        return {"input_features": noise(rng, 2, frames, self.config.sizes["M"]), "input_features_mask": mask}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames_BTM, is_feature_BS = given(features, "input_features", 3), given(features, "input_features_mask", 2)
        B, T, _ = frames_BTM.shape
        length = bucket(T)
        slots = -(-length // self.config.window_size) * self.config.queries
        is_feature_BS = np.pad(is_feature_BS.astype(bool), [(0, 0), (0, slots - is_feature_BS.shape[1])])
        return Prepared(
            (np.pad(frames_BTM, [(0, padded_rows(B) - B), (0, length - T), (0, 0)]), np.arange(length) < T),
            np.flatnonzero(is_feature_BS),
            is_feature_BS.sum(axis=1).tolist(),
        )

    def __call__(self, frames_BTM: jax.Array, is_sound_T: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        states = [self.entry(frames_BTM.astype(self.entry.kernel.dtype))]
        for number, layer in enumerate(self.layers, 1):
            x_BTD = layer(states[-1], is_sound_T, is_sound_T)
            if number == len(self.layers) // 2:
                x_BTD = x_BTD + self.guessed(jax.nn.softmax(self.guess(x_BTD), axis=-1))
            states.append(x_BTD)
        x_BTS = jnp.concatenate([states[number] for number in (*self.config.further_states, -1)], axis=-1)
        return self.projector(cut_windows(x_BTS * is_sound_T[:, None], self.config.window_size)), ()
