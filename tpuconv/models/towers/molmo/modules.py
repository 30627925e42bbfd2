"""The tower of Molmo 2 and its pooling.

Letters: B crops of images, P patches of a crop, X patches of all crops, T features, S patches that one feature is
pooled of.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.vit import MLP, Attention, Block


class Pooling(nnx.Module):
    """Attention of the mean of some patches to each of them, and a gated MLP: [X, M] to [T, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes

        def product(equation: str, bias: bool) -> Einsum:
            return Einsum(equation, sizes, bias=bias, dtype=dtype, keys=keys)

        self.q = product("TM,MGE->TGE", config.pooling_bias)
        self.k, self.v = (product("TSM,MRE->TSRE", config.pooling_bias) for _ in "kv")
        self.o = product("TGE,GEA->TA", config.pooling_bias)
        self.gate, self.up = (product("TA,AW->TW", config.mlp_bias) for _ in range(2))
        self.down = product("TW,WO->TO", False)
        self.act = ACTS_BY_NAME[config.pooling_hidden_act]
        self.scale, self.repeats = sizes["E"] ** -0.5, sizes["G"] // sizes["R"]

    def __call__(self, x_XM: jax.Array, patches_TS: jax.Array) -> jax.Array:
        is_patch_TS = patches_TS >= 0
        x_TSM = jnp.where(is_patch_TS[..., None], x_XM[jnp.maximum(patches_TS, 0)], 0)
        count_T1 = jnp.maximum(is_patch_TS.sum(axis=1, keepdims=True), 1).astype(x_TSM.dtype)
        q_TGE, k_TSGE, v_TSGE = self.q(x_TSM.sum(axis=1) / count_T1), self.k(x_TSM), self.v(x_TSM)
        if self.repeats > 1:
            k_TSGE, v_TSGE = (jnp.repeat(each, self.repeats, axis=2) for each in (k_TSGE, v_TSGE))
        scores_TGS = jnp.einsum("TGE,TSGE->TGS", q_TGE, k_TSGE, preferred_element_type=jnp.float32) * self.scale
        weights_TGS = jax.nn.softmax(jnp.where(is_patch_TS[:, None], scores_TGS, MASKED_SCORE), axis=-1)
        y_TA = self.o(jnp.einsum("TGS,TSGE->TGE", weights_TGS.astype(v_TSGE.dtype), v_TSGE))
        return self.down(self.act(self.gate(y_TA)) * self.up(y_TA))


class MolmoVit(FeatureEncoder):
    """Crops [B, P, C] of one size, in patches, to features [T, O]."""

    takes = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, act = config.sizes, ACTS_BY_NAME[config.hidden_act]
        norm, bias = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype), config.attention_bias
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, bias=bias, out_bias=bias, kv="K", dtype=dtype, keys=keys),
                    MLP(config, act, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        """Each image is one crop, of which features pool up to four patches."""
        P, C = self.config.sizes["P"], self.config.sizes["C"]
        pooled = [image * P + rng.integers(0, P, (h * w, 4)) for image, (h, w) in enumerate(grids)]
        patches_TS = np.concatenate(pooled)
        patches_TS[::3, -1] = -1
        sizes = np.array([(h, w, 0, 0) for h, w in grids])
        return {"pixel_values": noise(rng, len(grids), P, C), "image_token_pooling": patches_TS, "image_grids": sizes}

    def usual_images(self, count: int) -> None:
        """Returns None: config.json does not say into how many crops an image is cut."""

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels, pooled_TS = given(features, "pixel_values", 3, 4), given(features, "image_token_pooling", 2)
        grids, P, C = given(features, "image_grids", 2), self.config.sizes["P"], self.config.sizes["C"]
        if pixels.shape[-2:] != (P, C):
            raise UsageError(f"pixel_values has crops of {pixels.shape[-2:]}, the model of {P} patches with {C} values")
        crops_BPC = pixels.reshape(-1, P, C)
        patches_TS = pooled_TS[(pooled_TS >= 0).any(axis=1)]
        if (last := patches_TS.max(initial=-1)) >= (most := len(crops_BPC) * P):
            raise UsageError(f"image_token_pooling has the patch {last}, and the crops have {most}")
        counts = (grids[:, 0] * grids[:, 1] + grids[:, 2:].prod(axis=1)).tolist()
        if sum(counts) != len(patches_TS):
            raise UsageError(f"image_token_pooling has {len(patches_TS)} features, image_grids {sum(counts)}")
        arrays = (
            padded(crops_BPC, padded_rows(len(crops_BPC))),
            padded(patches_TS.astype(np.int32), padded_rows(len(patches_TS)), -1),
        )
        return Prepared(arrays, np.arange(len(patches_TS)), counts)

    def __call__(self, crops_BPC: jax.Array, patches_TS: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(crops_BPC.astype(self.patch.kernel.dtype)) + self.positions[...]
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        x_BPM = states_of(self.layers, x_BPD, segment_BP, wanted=self.config.feature_layers)
        return self.projector(x_BPM.reshape(-1, x_BPM.shape[-1]), patches_TS), ()
