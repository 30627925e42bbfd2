"""The vision encoder of Gemma 4: patches with their rows and columns, padded to the same number in all images."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, normal, normalize
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.angles import apply_rope_by_halves, columns_then_rows, cos_sin
from tpuconv.models.towers.attention import attend
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, padded
from tpuconv.models.towers.gemma4.limits import LimitedEinsum
from tpuconv.models.towers.places import raster
from tpuconv.models.towers.vit import CosSin


class Attention(nnx.Module):
    """Attention of the patches of an image among each other, x [B, P, D] to [B, P, D]. Queries, keys and values are
    normalized, and scores have no factor."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.eps = config.sizes, config.rms_norm_eps
        self.q = LimitedEinsum("BPD,DNH->BPNH", config, dtype=dtype, keys=keys)
        self.k = LimitedEinsum("BPD,DKH->BPKH", config, dtype=dtype, keys=keys)
        self.v = LimitedEinsum("BPD,DKH->BPKH", config, dtype=dtype, keys=keys)
        self.o = LimitedEinsum("BPNH,NHD->BPD", config, dtype=dtype, keys=keys)
        self.q_norm, self.k_norm = (ScaledRMSNorm("H", sizes, self.eps, dtype=dtype) for _ in range(2))

    def __call__(self, x_BPD: jax.Array, segment_BP: jax.Array, turns: CosSin) -> jax.Array:
        q_BPNH = apply_rope_by_halves(self.q_norm(self.q(x_BPD)), turns)
        k_BPKH = apply_rope_by_halves(self.k_norm(self.k(x_BPD)), turns)
        v_BPKH = normalize(self.v(x_BPD), 1, self.eps).astype(x_BPD.dtype)
        return self.o(attend(q_BPNH, k_BPKH, v_BPKH, segment_BP, scale=1.0))


class MLP(nnx.Module):
    """Gated MLP (arXiv:2002.05202), x [B, P, D] to [B, P, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.gate, self.up = (LimitedEinsum("BPD,DF->BPF", config, dtype=dtype, keys=keys) for _ in range(2))
        self.down = LimitedEinsum("BPF,FD->BPD", config, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.hidden_activation]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.down(self.act(self.gate(x_BPD)) * self.up(x_BPD))


class Block(nnx.Module):
    """One layer, [B, P, D] to [B, P, D]: attention and MLP, each between norms, with residual connections."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        def norm() -> ScaledRMSNorm:
            return ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

        self.attn_norm, self.post_attn_norm, self.mlp_norm, self.post_mlp_norm = (norm() for _ in range(4))
        self.attn, self.mlp = Attention(config, dtype=dtype, keys=keys), MLP(config, dtype=dtype, keys=keys)

    def __call__(self, x_BPD: jax.Array, segment_BP: jax.Array, turns: CosSin) -> jax.Array:
        x_BPD = x_BPD + self.post_attn_norm(self.attn(self.attn_norm(x_BPD), segment_BP, turns))
        return x_BPD + self.post_mlp_norm(self.mlp(self.mlp_norm(x_BPD)))


class PlacedPatches(FeatureEncoder):
    """Reads patches and their places as the processors of Gemma 4 have them: `pixel_values` [B, P, C], and
    `image_position_ids` [B, P, 2], the column and the row, -1 for padding."""

    takes = ("pixel_values", "image_position_ids")
    config: Any

    def joined(self) -> int:
        """Returns the number of patches along a side that make a feature."""
        return 1

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        k = self.joined()
        most = max(h * w for h, w in grids) * k * k
        at = np.full((len(grids), most, 2), -1)
        for place, (h, w) in zip(at, grids, strict=True):
            place[: h * w * k * k] = raster(h * k, w * k)[:, ::-1]
        pixels = rng.random((len(grids), most, self.config.sizes["C"])).astype(np.float32)
        return {"pixel_values": pixels, "image_position_ids": at}

    @property
    def pixels_per_feature(self) -> int:
        return int((self.config.sizes["C"] / 3) ** 0.5) * self.joined()

    def places(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the patches [B, P, C], and their rows and columns [B, P, 2], with B padded to a power of two."""
        patches_BPC, at_BP2 = given(features, "pixel_values", 3), given(features, "image_position_ids", 3)
        if patches_BPC.shape[:2] != at_BP2.shape[:2]:
            raise UsageError(f"pixel_values has {patches_BPC.shape[:2]} patches, image_position_ids {at_BP2.shape[:2]}")
        count = padded_rows(len(patches_BPC))
        return padded(patches_BPC, count), padded(at_BP2[..., ::-1].astype(np.int32), count, -1)


class Gemma4Vit(PlacedPatches):
    """Patches [B, P, C] to features [B, P / k^2, O], each of k x k neighbours."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (2, sizes["P"], sizes["D"]), dtype))
        self.layers = nnx.List([Block(config, dtype=dtype, keys=keys) for _ in range(sizes["L"])])
        if config.standardize:
            self.std_bias, self.std_scale = (nnx.Param(make(sizes["D"], jnp.float32)) for make in (jnp.zeros, jnp.ones))

    def joined(self) -> int:
        return int(self.config.pooling_kernel_size)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches_BPC, at_BP2 = self.places(features)
        k = self.config.pooling_kernel_size
        B, P, _ = patches_BPC.shape
        if P % k**2:
            raise UsageError(f"pixel_values has {P} patches an image, no multiple of {k} x {k}")
        is_patch_BP = np.asarray((at_BP2 >= 0).all(axis=-1))
        rows, counts = [], []
        pool_BP = np.full((B, P), P // k**2, np.int32)  # that of padding is cut off
        for image, (at_P2, is_patch_P) in enumerate(zip(at_BP2, is_patch_BP, strict=True)):
            h, w = at_P2.max(axis=0) + 1
            if h % k or w % k or is_patch_P.sum() != h * w:
                raise UsageError(
                    f"image {image} has {is_patch_P.sum()} patches in {h} rows and {w} columns",
                    hint=f"give whole images, of multiples of {k} x {k} patches",
                )
            pool_P = at_P2[:, 0] // k * (w // k) + at_P2[:, 1] // k
            pool_BP[image] = np.where(is_patch_P, pool_P, P // k**2)
            counts.append(int(h * w) // k**2)
            rows.append(image * (P // k**2) + np.arange(counts[-1]))
        arrays = (patches_BPC, np.maximum(at_BP2, 0), np.where(is_patch_BP, 0, -1).astype(np.int32), pool_BP)
        return Prepared(arrays, np.concatenate(rows), [count for count in counts if count])

    def __call__(
        self, patches_BPC: jax.Array, at_BP2: jax.Array, segment_BP: jax.Array, pool_BP: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        dtype, k, is_patch_BP1 = self.positions[...].dtype, self.config.pooling_kernel_size, segment_BP[..., None] >= 0
        x_BPD = self.patch((2 * (patches_BPC - 0.5)).astype(dtype))
        rows_PD, columns_PD = self.positions[...][1], self.positions[...][0]
        x_BPD += jnp.where(is_patch_BP1, columns_PD[at_BP2[..., 1]] + rows_PD[at_BP2[..., 0]], 0)
        turns = cos_sin(columns_then_rows(at_BP2, self.config.head_dim, self.config.rope_theta), dtype)
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_BP, turns)
        tokens = x_BPD.shape[1] // k**2

        def pooled(x_PD: jax.Array, pool_P: jax.Array) -> jax.Array:
            sums: jax.Array = jax.ops.segment_sum(x_PD.astype(jnp.float32), pool_P, tokens + 1)
            return sums[:tokens]

        x_BPD = (jax.vmap(pooled)(x_BPD, pool_BP) / k**2).astype(dtype).astype(jnp.float32)
        x_BPD = x_BPD * self.config.hidden_size**0.5
        if self.config.standardize:
            x_BPD = (x_BPD - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        return self.projector(x_BPD.astype(dtype)), ()
