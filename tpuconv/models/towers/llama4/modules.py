"""The vision encoder of Llama 4. Each tile of an image is by itself."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.angles import cos_sin, from_one
from tpuconv.models.towers.encoder import FeatureEncoder, Grids, check_squares, given, noise, padded, patches_of
from tpuconv.models.towers.image_encoder import joined_squares
from tpuconv.models.towers.places import raster
from tpuconv.models.towers.vit import turning_layers


class ShuffleAdapter(nnx.Module):
    """Two matrices with GELU behind each, [B, P, M] to [B, P, W]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.up = Einsum("BPM,MX->BPX", config.sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BPX,XW->BPW", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BPM: jax.Array) -> jax.Array:
        return gelu(self.down(gelu(self.up(x_BPM))))


class Llama4Matrix(nnx.Module):
    """One matrix, [B, P, W] to [B, P, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPW,WO->BPO", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BPW: jax.Array) -> jax.Array:
        return self.matrix(x_BPW)


class Llama4Vit(FeatureEncoder):
    """Tiles [B, 3, Y, X] of one size to features [B, P / s^2, O]. The class token is the last one of a tile."""

    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes

        def norm() -> LayerNorm:
            return LayerNorm("D", sizes, 1e-5, dtype=dtype)

        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.class_token = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.norm_before, self.norm = norm(), norm()
        self.layers = turning_layers(config, norm, gelu, dtype=dtype, keys=keys)
        self.adapter = ShuffleAdapter(config, dtype=dtype, keys=keys)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return {"pixel_values": noise(rng, len(grids), 3, self.config.image_size, self.config.image_size)}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels_BCYX = given(features, "pixel_values", 4)
        check_squares(pixels_BCYX, self.config.image_size, "tiles")
        tiles, tokens = len(pixels_BCYX), (self.config.side // self.config.tower.merge) ** 2
        return Prepared((padded(pixels_BCYX, padded_rows(tiles)),), np.arange(tiles * tokens), [tokens] * tiles)

    def __call__(self, pixels_BCYX: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        side, s, dtype = self.config.side, self.config.tower.merge, self.positions[...].dtype
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(dtype), self.config.patch_size))
        B, _, D = x_BPD.shape
        class_B1D = jnp.broadcast_to(self.class_token[...], (B, 1, D))
        x_BPD = self.norm_before(jnp.concatenate([x_BPD, class_B1D], axis=1) + self.positions[...])
        at_P2 = np.append(raster(side, side), [[-1, -1]], axis=0)
        turns = cos_sin(from_one(at_P2[None], self.config.sizes["H"], self.config.rope_theta))
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_BP, turns)
        x_BPD = self.norm(x_BPD)[:, :-1]
        return self.projector(self.adapter(joined_squares(x_BPD, side, side, s))), ()
