"""The encoder of Fun-ASR (SAN-M): attention, beside a convolution of the values over neighbouring steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal, sinusoids
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.attention import attend
from tpuconv.models.towers.convolutions import convolved_channels
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder
from tpuconv.models.towers.gemma4.audio import frames_of, random_frames
from tpuconv.models.towers.vit import MLP, Attention, Block
from tpuconv.notation.sizes import WithSizes


class MemoryAttention(nnx.Module):
    """Attention of the steps of a sound among each other, x [B, P, E] to [B, P, D], and the values themselves with a
    convolution over their neighbours. `read` is the letter of the width of x."""

    def __init__(self, config: Any, read: str, *, dtype: DTypeLike, keys: Keys):
        sizes = {**config.sizes, "E": config.sizes[read]}
        self.q, self.k, self.v = (Einsum("BPE,ENH->BPNH", sizes, bias=True, dtype=dtype, keys=keys) for _ in range(3))
        self.o = Einsum("BPNH,NHD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.memory = nnx.Param(normal(keys(), (sizes["c"], sizes["N"], sizes["H"]), dtype))

    def __call__(self, x_BPE: jax.Array, segment_BP: jax.Array) -> jax.Array:
        v_BPNH = self.v(x_BPE)
        y_BPD = self.o(attend(self.q(x_BPE), self.k(x_BPE), v_BPNH, segment_BP))
        sound_BPNH = jnp.where(segment_BP[..., None, None] < 0, 0, v_BPNH)
        memory = self.memory[...]
        kept_BPNH = sound_BPNH + convolved_channels(sound_BPNH, memory, (len(memory) - 1) // 2)
        return y_BPD + kept_BPNH.reshape(y_BPD.shape)


class MemoryLayer(nnx.Module):
    """One layer, [B, P, E] to [B, P, D]. The attention of a layer with another width has no residual connection."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes, read, eps = config.sizes, "D" if layer else "C", config.layer_norm_eps
        self.has_residual = sizes[read] == sizes["D"]
        self.attn_norm = LayerNorm(read, sizes, eps, dtype=dtype)
        self.attn = MemoryAttention(config, read, dtype=dtype, keys=keys)
        self.mlp_norm = LayerNorm("D", sizes, eps, dtype=dtype)
        self.mlp = MLP(config, ACTS_BY_NAME[config.hidden_act], dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", sizes, eps, dtype=dtype) if layer in config.layer_sets["J"] else None

    def __call__(self, x_BPE: jax.Array, segment_BP: jax.Array) -> jax.Array:
        y_BPD = self.attn(self.attn_norm(x_BPE), segment_BP)
        x_BPD = x_BPE + y_BPD if self.has_residual else y_BPD
        x_BPD = x_BPD + self.mlp(self.mlp_norm(x_BPD))
        return x_BPD if self.norm is None else self.norm(x_BPD)


class Sanm(FeatureEncoder):
    """Stacked frames [B, P, C] of mel spectrograms to features [B, P, O]."""

    takes = ("input_features", "input_features_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.layers = nnx.List([MemoryLayer(config, i, dtype=dtype, keys=keys) for i in range(config.sizes["L"])])

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return random_frames(rng, 20, self.config.sizes["C"])

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames_BPC, is_sound_BP, counts = frames_of(features, 1)
        return Prepared(
            (frames_BPC, np.where(is_sound_BP, 0, -1).astype(np.int32)), np.flatnonzero(is_sound_BP), counts
        )

    def __call__(self, frames_BPC: jax.Array, segment_BP: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = frames_BPC.astype(self.layers[0].attn_norm.scale.dtype) * self.config.hidden_size**0.5
        x_BPD = x_BPD + sinusoids(jnp.arange(1, x_BPD.shape[1] + 1)[None], x_BPD.shape[-1]).astype(x_BPD.dtype)
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_BP)
        return self.projector(x_BPD, segment_BP), ()


class SanmAdaptor(nnx.Module):
    """Two matrices, then layers, [B, P, D] to [B, P, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.up = Einsum("BPD,DX->BPX", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPX,XO->BPO", sizes, bias=True, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_act]
        letters = dict(zip("DNHF", "OGkM", strict=True))
        inside = WithSizes(config, {ours: sizes[letter] for ours, letter in letters.items()}, {})
        self.layers = nnx.List(
            [
                Block(
                    inside,
                    lambda: LayerNorm("O", sizes, config.adaptor_eps, dtype=dtype),
                    Attention(inside, dtype=dtype, keys=keys),
                    MLP(inside, ACTS_BY_NAME[config.adaptor_act], dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["l"])
            ]
        )

    def __call__(self, x_BPD: jax.Array, segment_BP: jax.Array) -> jax.Array:
        x_BPO = self.down(self.act(self.up(x_BPD)))
        for layer in self.layers:
            x_BPO = layer(x_BPO, segment_BP)
        return x_BPO
