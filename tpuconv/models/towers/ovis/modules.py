"""The towers of Ovis 2 and 2.5 and their tables of visual words."""

from collections.abc import Mapping
from dataclasses import replace
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
from tpuconv.models.towers.places import Taps, bicubic_taps
from tpuconv.models.towers.qwen_vit.modules import QwenVit, plain_block
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


def behind_indicators(prepared: Prepared, config: Any) -> Prepared:
    """Returns the features of images behind the ones of the words for `visual_indicator_token_ids`."""
    ids, rows = config.visual_indicator_token_ids, config.num_visual_indicator_tokens + prepared.rows
    return replace(prepared, rows=rows, others={token: number for number, token in enumerate(ids)})


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
        arrays = (padded(pixels_BCYX, padded_rows(images)),)
        return behind_indicators(Prepared(arrays, np.arange(images * tokens), [tokens] * images), self.config)

    def __call__(self, pixels_BCYX: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        config = self.config
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), config.patch_size))
        x_BPD = self.patch_norm(x_BPD) + self.positions[...]
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        x_BPD = states_of(self.layers, x_BPD, segment_BP, wanted=(), norm=self.norm)
        x_BPM = joined_squares(x_BPD, config.side, config.side, config.hidden_stride)
        shares_BPG = jax.nn.softmax(self.words_norm(self.words(x_BPM)), axis=-1)
        return self.projector(shares_BPG), ()


class OvisNavit(QwenVit):
    """The tower of Ovis 2.5: patches of images of any size with learned and with rotary positions. Squares of patches
    are shares of visual words. They are read before the last norm, which nothing reads."""

    has_patch_bias = True

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.norm = LayerNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)
        self.words = Einsum("BPM,MG->BPG", config.sizes, dtype=dtype, keys=keys)
        self.words_norm = LayerNorm("G", config.sizes, 1e-5, dtype=dtype)

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return plain_block(config, dtype, keys, config.layer_norm_eps)

    def taps(self, h: int, w: int) -> Taps:
        return bicubic_taps(h, w, self.config.table_side, self.config.table_side)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        return behind_indicators(super().prepare(features), self.config)

    def ended(self, x_BPD: jax.Array) -> Any:
        words_BPG = self.words_norm(self.words(x_BPD.reshape(len(x_BPD), -1, self.config.sizes["M"])))
        return self.projector(jax.nn.softmax(words_BPG.astype(jnp.float32), axis=-1).astype(words_BPG.dtype))
