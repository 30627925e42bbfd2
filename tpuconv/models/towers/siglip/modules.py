"""SigLIP and CLIP."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, given, padded, patches_of
from tpuconv.models.towers.vit import MLP, Attention, Block


class PoolingHead(nnx.Module):
    """The head that pools all patches to one vector. It is kept, and nothing reads it."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.probe = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.q, self.k, self.v = (Einsum("BPD,DNH->BPNH", sizes, bias=True, dtype=dtype, keys=keys) for _ in range(3))
        self.o = Einsum("BPNH,NHD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", sizes, config.layer_norm_eps, dtype=dtype)
        self.up = Einsum("BPD,DF->BPF", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPF,FD->BPD", sizes, bias=True, dtype=dtype, keys=keys)


class Siglip(FeatureEncoder):
    """Images [B, 3, Y, X] of one size to features [B, tokens, O]."""

    def build(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        sizes, act = config.sizes, ACTS_BY_NAME[config.hidden_act]

        def norm() -> LayerNorm:
            return LayerNorm("D", sizes, config.layer_norm_eps, dtype=dtype)

        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, dtype=dtype, keys=keys),
                    MLP(config, act, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.norm = norm()
        if config.vision_use_head:
            self.head = PoolingHead(config, dtype=dtype, keys=keys)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels_BCYX, side = given(features, "pixel_values", 4), self.config.tower.image_size
        if pixels_BCYX.shape[2:] != (side, side):
            raise UsageError(f"pixel_values has images of {pixels_BCYX.shape[2:]}, the model {side} x {side}")
        images, tokens = len(pixels_BCYX), self.projector.tokens
        bucket = 1 << (images - 1).bit_length()
        return Prepared((padded(pixels_BCYX, bucket),), np.arange(images * tokens), [tokens] * images)

    def hidden(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns the hidden states [B, P, D] after the last norm."""
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.positions[...].dtype), self.config.patch_size))
        x_BPD = x_BPD + self.positions[...]
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_BP)
        return self.norm(x_BPD)

    def __call__(self, pixels_BCYX: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(self.hidden(pixels_BCYX)), ()
