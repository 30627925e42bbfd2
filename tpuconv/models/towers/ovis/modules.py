"""The tower of Ovis 2 and its table of visual words."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    FeatureEncoder,
    Grids,
    check_squares,
    given,
    noise,
    padded,
    patches_of,
)
from tpuconv.models.towers.image_encoder import joined_squares, states_of
from tpuconv.models.towers.vit import MLP, Attention, Block


class VisualWords(nnx.Module):
    """The table of visual words: shares [B, P, G] to features, the indicators first, [X, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.words = config.sizes["G"]
        self.table = nnx.Param(normal(keys(), (config.sizes["V"], config.sizes["O"]), dtype))

    def __call__(self, x_BPG: jax.Array) -> jax.Array:
        table_VO = self.table[...]
        x_BPO = jnp.einsum("BPG,GO->BPO", x_BPG, table_VO[: self.words])
        return jnp.concatenate([table_VO[self.words :], x_BPO.reshape(-1, x_BPO.shape[-1])])


class OvisVit(FeatureEncoder):
    """Images [B, X, Y, X] of one size to features: shares of visual words, which mix the rows of a table."""

    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        norm = partial(RMSNorm, "D", sizes, config.rms_norm_eps, dtype=dtype)
        bias, act = config.qkv_bias, ACTS_BY_NAME[config.hidden_act]
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.patch_norm, self.norm = norm(), norm()
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys),
                    MLP(config, act, gated=True, bias=config.mlp_bias, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.words = Einsum("BPM,MG->BPG", sizes, dtype=dtype, keys=keys)
        self.words_norm = LayerNorm("G", sizes, 1e-5, dtype=dtype)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return {"pixel_values": noise(rng, len(grids), 3, self.config.image_size, self.config.image_size)}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels_BCYX = given(features, "pixel_values", 4)
        check_squares(pixels_BCYX, self.config.image_size)
        images, tokens = len(pixels_BCYX), self.config.joined_side**2
        first, ids = self.config.num_visual_indicator_tokens, self.config.visual_indicator_token_ids
        rows = first + np.arange(images * tokens)
        others = {token: number for number, token in enumerate(ids)}
        return Prepared((padded(pixels_BCYX, padded_rows(images)),), rows, [tokens] * images, others=others)

    def __call__(self, pixels_BCYX: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        config = self.config
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), config.patch_size))
        x_BPD = self.patch_norm(x_BPD) + self.positions[...]
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        x_BPD = states_of(self.layers, x_BPD, segment_BP, wanted=(), norm=self.norm)
        x_BPM = joined_squares(x_BPD, config.side, config.side, config.hidden_stride)
        shares_BPG = jax.nn.softmax(self.words_norm(self.words(x_BPM)), axis=-1)
        return self.projector(shares_BPG), ()
