"""The vision encoder of Llama 3.2 Vision. The tiles of an image are read together, by attention among all their
patches. Letters: B images, K tiles of each, P patches of a tile with its class token, Z patches of all tiles with the
padding between them; and in names of features also T tokens and I images of a text."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.across import Across
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers import vit
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded, patches_of

ALIGNED = 8
"""The patches of a tile are padded to a multiple of this number."""


class TileEmbedding(nnx.Module):
    """A vector for each tile, by the ratio of the sides of its image, which is added to its patches."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        shape = tuple(config.sizes[letter] for letter in "AKD")
        self.embedding = nnx.Param(normal(keys(), shape, dtype))
        self.gate = nnx.Param(jnp.zeros(1, dtype))

    def __call__(self, x_BKPD: jax.Array, ratio_B: jax.Array) -> jax.Array:
        return x_BKPD + self.embedding[...][ratio_B][:, :, None] * jnp.tanh(self.gate[...])


class TilePositions(nnx.Module):
    """Two vectors for each patch, which are added to it: by its place in a tile, and by the place of the tile in an
    image of this ratio."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.of_patches = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.of_tiles = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in "AKPD"), dtype))
        self.gate = nnx.Param(jnp.zeros(1, dtype))

    def __call__(self, x_BKPD: jax.Array, ratio_B: jax.Array) -> jax.Array:
        gate = jnp.tanh(self.gate[...])
        return x_BKPD + (1 - gate) * self.of_patches[...] + gate * self.of_tiles[...][ratio_B]


class ApartAttention(vit.Attention):
    """Attention of patches, of which padding does not see padding."""

    def limits(self, angles: Any) -> dict[str, Any]:
        return {"apart_BP": angles}


class GatedBlock(vit.Block):
    """A layer whose outputs of attention and MLP have gates."""

    def __init__(self, *args: Any, dtype: DTypeLike, **options: Any):
        super().__init__(*args, dtype=dtype, **options)
        self.attn_gate, self.mlp_gate = (nnx.Param(jnp.zeros(1, dtype)) for _ in range(2))

    def __call__(
        self, x_BPD: jax.Array, segment_BP: jax.Array, angles: Any = None, is_key_BP: jax.Array | None = None
    ) -> jax.Array:
        y_BPD = self.attn(self.attn_norm(x_BPD), segment_BP, angles, is_key_BP)
        x_BPD = x_BPD + jnp.tanh(self.attn_gate[...]) * y_BPD
        return x_BPD + jnp.tanh(self.mlp_gate[...]) * self.mlp(self.mlp_norm(x_BPD))


class MllamaVit(FeatureEncoder):
    """Images [B, K, X, Y, Y] of K tiles to features [B, K P, O]."""

    takes = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, act = config.sizes, ACTS_BY_NAME[config.hidden_act]

        def norm(eps: float = config.norm_eps) -> LayerNorm:
            return LayerNorm("D", sizes, eps, dtype=dtype)

        def layers(kind: Any, count: int) -> Any:
            return nnx.List(
                [
                    kind(
                        config,
                        norm,
                        ApartAttention(config, bias=False, out_bias=False, dtype=dtype, keys=keys),
                        vit.MLP(config, act, dtype=dtype, keys=keys),
                        dtype=dtype,
                    )
                    for _ in range(count)
                ]
            )

        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.class_token = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.positions = TilePositions(config, dtype=dtype, keys=keys)
        self.tiles_before = TileEmbedding(config, dtype=dtype, keys=keys)
        self.tiles_after = TileEmbedding(config, dtype=dtype, keys=keys)
        self.norm_before, self.norm = norm(1e-5), norm(1e-5)
        self.layers = layers(vit.Block, sizes["L"])
        self.global_layers = layers(GatedBlock, sizes["I"])

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        """Images of all tiles but one each, in one text; the encoder takes any ratio for them."""
        tiles, side, images = self.config.max_num_tiles, self.config.image_size, len(grids)
        mask = np.ones((1, images, tiles), np.int64)
        mask[:, ::2, max(1, tiles - 1) :] = 0
        return {
            "pixel_values": noise(rng, 1, images, tiles, self.config.num_channels, side, side),
            "aspect_ratio_ids": np.arange(images)[None] % self.config.ratios + 1,
            "aspect_ratio_mask": mask,
        }

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels, ratio_BI = given(features, "pixel_values", 6), given(features, "aspect_ratio_ids", 2)
        mask_BIK, side = given(features, "aspect_ratio_mask", 3), self.config.image_size
        shape = (*ratio_BI.shape, self.config.max_num_tiles)
        if pixels.shape != (*shape, self.config.num_channels, side, side) or mask_BIK.shape != shape:
            raise UsageError(
                f"pixel_values has shape {pixels.shape}, aspect_ratio_ids {ratio_BI.shape} and aspect_ratio_mask "
                f"{mask_BIK.shape}, and the model takes {shape[-1]} tiles of {side} x {side}",
                hint="give what the processor of this release returns",
            )
        if len(wrong := ratio_BI[(ratio_BI < 0) | (ratio_BI > self.config.ratios)]):
            raise UsageError(f"aspect_ratio_ids has {wrong[0]}, and the model knows 1 to {self.config.ratios}")
        rows = padded_rows(ratio_BI.size)
        flat = (pixels.reshape(-1, *pixels.shape[2:]), ratio_BI.reshape(-1), mask_BIK.reshape(-1, shape[-1]) != 0)
        count = int((ratio_BI > 0).sum())
        return Prepared(tuple(padded(each, rows) for each in flat), np.arange(count), [1] * count)

    def in_text(self, features: Mapping[str, np.ndarray], ids_BT: np.ndarray) -> dict[str, np.ndarray]:
        if "cross_attention_mask" in features:
            return dict(features)
        counts_BI = np.where(features["aspect_ratio_ids"] > 0, features["aspect_ratio_mask"].sum(axis=-1), 0)
        mask = tiles_seen(ids_BT == self.config.placeholder, counts_BI, self.config.max_num_tiles)
        return {**features, "cross_attention_mask": mask}

    def slots(self, features: Mapping[str, np.ndarray]) -> int:
        _, images, tiles, *_ = given(features, "pixel_values", 6).shape
        return int(images * tiles * self.config.sizes["P"])

    def across(self, features: Mapping[str, np.ndarray], ids_BT: np.ndarray, features_XO: jax.Array) -> Across:
        (B, T), slots = ids_BT.shape, self.slots(features)
        sees = given(self.in_text(features, ids_BT), "cross_attention_mask", 4)
        # Tokens behind those that the processor had attend to what its last one does.
        sees = np.concatenate([sees, *[sees[:, -1:]] * (T - sees.shape[1])], axis=1)
        if sees.shape != (want := (B, T, *features["aspect_ratio_mask"].shape[1:])):
            raise UsageError(
                f"cross_attention_mask has shape {sees.shape}, not {want}",
                hint="give it for these tokens, or leave it out",
            )
        return Across(features_XO[: B * slots].reshape(B, slots, -1), jnp.asarray(sees.reshape(B, T, -1) != 0))

    def __call__(
        self, pixels_BKCYX: jax.Array, ratio_B: jax.Array, is_tile_BK: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        B, K = is_tile_BK.shape
        pixels = pixels_BKCYX.reshape(B * K, *pixels_BKCYX.shape[2:]).astype(self.class_token[...].dtype)
        x = self.patch(patches_of(pixels, self.config.patch_size))
        x_BKPD = self.tiles_before(x.reshape(B, K, *x.shape[1:]), ratio_B)
        class_BK1D = jnp.broadcast_to(self.class_token[...], (B, K, 1, x.shape[-1]))
        x_BKPD = self.positions(jnp.concatenate([class_BK1D, x_BKPD], axis=2), ratio_B)
        P, more = x_BKPD.shape[2], -x_BKPD.shape[2] % ALIGNED
        x_BKPD = jnp.pad(self.norm_before(x_BKPD), ((0, 0), (0, 0), (0, more), (0, 0)))
        is_real_BKP = is_tile_BK[:, :, None] & (jnp.arange(P + more) < P)
        shape, is_padding_BZ = x_BKPD.shape, ~is_real_BKP.reshape(B, -1)
        segment_BZ, states = jnp.zeros(is_padding_BZ.shape, jnp.int32), [x_BKPD.reshape(B, -1, shape[-1])]
        for layer in self.layers:
            states.append(layer(states[-1], segment_BZ, is_padding_BZ))
        x_BZD = self.tiles_after(self.norm(states[-1]).reshape(shape), ratio_B).reshape(states[-1].shape)
        for layer in self.global_layers:
            x_BZD = layer(x_BZD, segment_BZ, is_padding_BZ)
        kept = jnp.stack([states[1:][number] for number in self.config.kept_layers], axis=-1)
        x = jnp.concatenate([x_BZD, kept.reshape(*x_BZD.shape[:2], -1)], axis=-1)
        x = x.reshape(B, K, P + more, -1)[:, :, :P].reshape(B, K * P, -1)
        return self.projector(x), ()


def tiles_seen(is_image_BT: np.ndarray, counts_BI: np.ndarray, tiles: int) -> np.ndarray:
    """Returns which tiles of which images a token attends to [B, T, I, K]: the tiles of the last image before it,
    and of the images right before that one, without a token of text between them.

    Args:
        is_image_BT: which tokens are the placeholders of images.
        counts_BI: the tiles of each image of a text, 0 for none.
        tiles: K.
    """
    out = np.zeros((*is_image_BT.shape, counts_BI.shape[1], tiles), np.int64)
    for row, is_image_T in enumerate(is_image_BT):
        places, end = np.flatnonzero(is_image_T).tolist(), len(is_image_T)
        following = end
        for number in reversed(range(min(len(places), counts_BI.shape[1]))):
            place = places[number]
            end = end if following == place + 1 else following
            out[row, place:end, number, : counts_BI[row, number]] = 1
            following = place
    return out
