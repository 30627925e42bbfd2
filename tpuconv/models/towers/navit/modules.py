"""SigLIP for images of any size, padded to the largest, and the projectors behind it. Padding is no key, but it is a
query, and projectors may make features of it.

Letters: Y, X pixels; h, w rows and columns of patches with padding; Q latent vectors or learned queries, G their heads,
E the width of a head, K heads of keys and values.
"""

from collections.abc import Mapping
from functools import partial
from math import isqrt
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, LayerNorm, RMSNorm, gelu_tanh, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.encoder import ACTS_BY_NAME, Grids, given, noise, padded, patches_of
from tpuconv.models.towers.image_encoder import joined_squares, states_of
from tpuconv.models.towers.places import nearest_taps
from tpuconv.models.towers.siglip.modules import Siglip


class Navit(Siglip):
    """Images [B, I, X, Y, X] or [B, X, Y, X], some padded, to features of each image. Of the former, images that are
    all zeros are no images."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return ("pixel_values", self.projector.mask_name)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        p, patches = self.config.patch_size, self.projector.patches_of_side(self.config.side)
        is_real = np.ones((len(grids), patches * p, patches * p), bool)
        is_real[1::2, :, -p:] = False
        pixels = noise(rng, len(grids), 3, patches * p, patches * p) * is_real[:, None]
        pixels, is_real = (each[None] if self.projector.by_text else each for each in (pixels, is_real))
        return {"pixel_values": pixels, self.projector.mask_name: is_real}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels, p, name = given(features, "pixel_values", 4, 5), self.config.patch_size, self.projector.mask_name
        is_real = (
            np.asarray(features[name], bool) if name in features else np.ones(pixels.shape[:-3] + pixels.shape[-2:])
        )
        if is_real.shape != pixels.shape[:-3] + pixels.shape[-2:]:
            raise UsageError(f"{name} has shape {is_real.shape}, pixel_values {pixels.shape}")
        if pixels.ndim == 5:
            pixels, is_real = pixels.reshape(-1, *pixels.shape[-3:]), is_real.reshape(-1, *is_real.shape[-2:])
            is_image = (pixels != 0).any(axis=(1, 2, 3))
            pixels, is_real = pixels[is_image], is_real[is_image]
        h, w = pixels.shape[2] // p, pixels.shape[3] // p
        blocks = is_real[:, : h * p, : w * p].reshape(-1, h, p, w, p)
        joined = np.logical_and if self.projector.drops_parts else np.logical_or
        is_patch_BYX = joined.reduce(blocks, axis=(2, 4)).astype(bool)
        for image, is_patch_YX in enumerate(is_patch_BYX):
            if not is_patch_YX.any():
                raise UsageError(f"{name} has no pixels of image {image}", hint="leave this image out")
        places_BYX, side = np.zeros(is_patch_BYX.shape, np.int32), self.config.side
        for place, is_patch in zip(places_BYX, is_patch_BYX, strict=True):
            rows, columns = int(is_patch[:, 0].sum()), int(is_patch[0].sum())
            place[:rows, :columns] = nearest_taps(rows, columns, side, side).index_PA.reshape(rows, columns)
            place[~is_patch] = 0
        rows = padded_rows(len(pixels))
        flat = (places_BYX.reshape(len(pixels), -1), is_patch_BYX.reshape(len(pixels), -1))
        tokens = self.projector.tokens(h, w)
        arrays = (padded(pixels, rows), *(padded(each, rows) for each in flat))
        return Prepared(arrays, np.arange(len(pixels) * tokens), [tokens] * len(pixels))

    def __call__(  # type: ignore[override]
        self, pixels_BCYX: jax.Array, places_BP: jax.Array, is_key_BP: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        x_BPD = x_BPD + self.positions[...][places_BP]
        segment_BP, wanted = jnp.zeros(x_BPD.shape[:2], jnp.int32), self.config.feature_layers
        x_BPD = states_of(self.layers, x_BPD, segment_BP, None, is_key_BP, wanted=wanted, norm=self.norm)
        return self.projector(x_BPD, is_key_BP), ()


class JoinedMatrix(nnx.Module):
    """A matrix of s x s joined patches of square images, [B, P, D] to [B, P / s^2, O].

    Attributes:
        mask_name: the name of the feature that tells images from padding.
        drops_parts: True if patches that are partly padding are padding.
        by_text: True if images have an axis of texts.
    """

    mask_name: ClassVar[str] = "pixel_attention_mask"
    drops_parts: ClassVar[bool] = False
    by_text: ClassVar[bool] = True

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.merge: int = config.merge
        self.matrix = Einsum("BPM,MO->BPO", config.sizes, dtype=dtype, keys=keys)

    def patches_of_side(self, side: int) -> int:
        """Returns the number of patches along a side of square images, where the tower's own have `side`."""
        return side // self.merge * self.merge

    def tokens(self, h: int, w: int) -> int:
        """Returns the number of features of an image.

        Raises:
            UsageError: its patches cannot be joined.
        """
        if h != w or h % self.merge:
            raise UsageError(f"images of {h} x {w} patches are not squares of blocks of {self.merge} x {self.merge}")
        return h * w // self.merge**2

    def __call__(self, x_BPD: jax.Array, is_key_BP: jax.Array) -> jax.Array:
        side = int(x_BPD.shape[1] ** 0.5)
        return self.matrix(joined_squares(x_BPD, side, side, self.merge))


class GatedMatrices(nnx.Module):
    """down(act(gate x) up x)."""

    def __init__(self, width: str, config: Any, act: str, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, dtype=dtype, keys=keys)
        to_width, middle, out = f"BP{width[0]},{width[:2]}->BP{width[1]}", width[1], width[2]
        self.gate, self.up = product(to_width), product(to_width)
        self.down = product(f"BP{middle},{middle}{out}->BP{out}")
        self.act = ACTS_BY_NAME[act]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.act(self.gate(x)) * self.up(x))


class PerceiverLayer(nnx.Module):
    """Latent vectors [B, Q, O] attend to a context [B, P, O] and to themselves."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, dtype=dtype, keys=keys)
        norm = partial(RMSNorm, "O", config.sizes, config.projector.rms_norm_eps, dtype=dtype)
        self.latents_norm, self.context_norm, self.mlp_norm = norm(), norm(), norm()
        self.q, self.k, self.v = product("BQO,OGE->BQGE"), product("BPO,OKE->BPKE"), product("BPO,OKE->BPKE")
        self.o = product("BQGE,GEO->BQO")
        self.mlp = GatedMatrices("ORO", config, config.perceiver_hidden_act, dtype=dtype, keys=keys)

    def __call__(self, x_BQO: jax.Array, context_BPO: jax.Array, is_key_BP: jax.Array) -> jax.Array:
        latents_BQO = self.latents_norm(x_BQO)
        keys_BPO = jnp.concatenate([self.context_norm(context_BPO), latents_BQO], axis=1)
        y_BQGE = cross_attended(self.q(latents_BQO), self.k(keys_BPO), self.v(keys_BPO), is_key_BP)
        x_BQO = x_BQO + self.o(y_BQGE)
        return x_BQO + self.mlp(self.mlp_norm(x_BQO))


def cross_attended(q_BQGE: jax.Array, k_BPKE: jax.Array, v_BPKE: jax.Array, is_key_BP: jax.Array) -> jax.Array:
    """Returns attention [B, Q, G, E] to keys of K heads, in float32."""
    repeats = q_BQGE.shape[2] // k_BPKE.shape[2]
    k_BPGE, v_BPGE = (jnp.repeat(each, repeats, axis=2) for each in (k_BPKE, v_BPKE))
    scores = jnp.einsum("BQGE,BPGE->BGQP", q_BQGE, k_BPGE, preferred_element_type=jnp.float32)
    scores = jnp.where(is_key_BP[:, None, None], scores * q_BQGE.shape[-1] ** -0.5, MASKED_SCORE)
    return jnp.einsum("BGQP,BPGE->BQGE", jax.nn.softmax(scores, axis=-1).astype(v_BPGE.dtype), v_BPGE)


class Perceiver(nnx.Module):
    """An MLP of patches, and latent vectors that attend to them: [B, P, D] to [B, Q, O]. It has the attributes of
    `JoinedMatrix`."""

    mask_name: ClassVar[str] = "pixel_attention_mask"
    drops_parts: ClassVar[bool] = True
    by_text: ClassVar[bool] = True

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.count: int = sizes["Q"]
        self.mlp = GatedMatrices("DWO", config, "silu", dtype=dtype, keys=keys)
        self.latents = nnx.Param(normal(keys(), (sizes["Q"], sizes["O"]), dtype))
        self.layers = nnx.List([PerceiverLayer(config, dtype=dtype, keys=keys) for _ in range(sizes["J"])])
        self.norm = RMSNorm("O", sizes, config.projector.rms_norm_eps, dtype=dtype)

    def patches_of_side(self, side: int) -> int:
        """Returns the number of patches along a side of square images, where the tower's own have `side`."""
        return side

    def tokens(self, h: int, w: int) -> int:
        """Returns the number of features of an image."""
        return self.count

    def __call__(self, x_BPD: jax.Array, is_key_BP: jax.Array) -> jax.Array:
        context_BPO = self.mlp(x_BPD)
        B = len(context_BPO)
        x_BQO = jnp.broadcast_to(self.latents[...].astype(context_BPO.dtype), (B, *self.latents[...].shape))
        is_key_BP = jnp.concatenate([is_key_BP, jnp.ones(x_BQO.shape[:2], bool)], axis=1)
        for layer in self.layers:
            x_BQO = layer(x_BQO, context_BPO, is_key_BP)
        return self.norm(x_BQO)


class Heads(nnx.Module):
    """Queries, keys, values and the output of attention, or of the products before (`is_joined`)."""

    def __init__(self, config: Any, *, is_joined: bool, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, bias=is_joined, dtype=dtype, keys=keys)
        self.q, self.k, self.v = (product("BPD,DNH->BPNH" if is_joined else "BPD,DA->BPA") for _ in range(3))
        self.o = product("BPNH,NHD->BPD") if is_joined else None


class Queries(nnx.Module):
    """Learned queries attend to the patches, and an MLP follows: [B, P, D] to [B, Q, O]. It has the attributes of
    `JoinedMatrix`."""

    mask_name: ClassVar[str] = "pixel_mask"
    drops_parts: ClassVar[bool] = False
    by_text: ClassVar[bool] = False

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, 1e-5, dtype=dtype)
        self.numbers: dict[int, int] = dict(config.queries)
        self.query = nnx.Param(normal(keys(), (sizes["Q"], sizes["D"]), dtype))
        self.query_norm, self.key_norm, self.norm = norm(), norm(), norm()
        self.before = Heads(config, is_joined=False, dtype=dtype, keys=keys)
        self.attn = Heads(config, is_joined=True, dtype=dtype, keys=keys)
        self.after = Einsum("BPD,DA->BPA", sizes, bias=True, dtype=dtype, keys=keys)
        self.up = Einsum("BPD,DW->BPW", sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, dtype=dtype, keys=keys)

    def patches_of_side(self, side: int) -> int:
        """Returns the number of patches along a side of square images, where the tower's own have `side`."""
        return isqrt(max(count for count in self.numbers if isqrt(count) ** 2 == count))

    def tokens(self, h: int, w: int) -> int:
        """Returns the number of features of an image.

        Raises:
            UsageError: config.json does not say it.
        """
        if h * w not in self.numbers:
            known = ", ".join(map(str, self.numbers))
            raise UsageError(f"an image has {h * w} patches, and the model has queries for {known} patches")
        return self.numbers[h * w]

    def __call__(self, x_BPD: jax.Array, is_key_BP: jax.Array) -> jax.Array:
        query_QD = self.query[: self.numbers[x_BPD.shape[1]]].astype(x_BPD.dtype)
        q_BQD = jnp.broadcast_to(self.query_norm(query_QD), (len(x_BPD), *query_QD.shape))
        key_BPD, before, attn = self.key_norm(x_BPD), self.before, self.attn
        q_BQNH, k_BPNH = attn.q(before.q(q_BQD)), attn.k(before.k(key_BPD))
        y_BQNH = cross_attended(q_BQNH, k_BPNH, attn.v(before.v(key_BPD)), is_key_BP)
        assert attn.o is not None
        return self.down(gelu_tanh(self.up(self.norm(self.after(attn.o(y_BQNH))))))
