"""SigLIP 2. The patches of all images are one sequence; patches of one image see each other."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given, padded
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import antialiased_taps, block_order, bucket
from tpuconv.models.towers.siglip.modules import Siglip


class BlockMatrices(nnx.Module):
    """Joins s x s patches, [B, P, D] to [B, P / s^2, O]: a norm and two matrices follow. Blocks of patches follow each
    other."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.joined = config.axes, config.axes["M"]
        self.norm = LayerNorm("M", sizes, 1e-5, dtype=dtype) if config.projector_use_layernorm else None
        self.up = Einsum("BPM,MW->BPW", sizes, bias=config.projector_bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, bias=config.projector_bias, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPM = x_BPD.reshape(len(x_BPD), -1, self.joined)
        return self.down(self.act(self.up(x_BPM if self.norm is None else self.norm(x_BPM))))


class Siglip2(Siglip):
    """Patches [I, P, C] of images, padded to the one with most, to features."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features. `pixel_attention_mask` says what `spatial_shapes` does."""
        return ("pixel_values", "spatial_shapes", "pixel_attention_mask")

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches_IPC, shapes = given(features, "pixel_values", 3), given(features, "spatial_shapes", 2)
        s, side, grids = self.config.merge, self.config.side, [(int(h), int(w)) for h, w in shapes]
        if len(patches_IPC) != len(grids) or max(h * w for h, w in grids) > patches_IPC.shape[1]:
            raise UsageError(f"spatial_shapes do not fit the {len(patches_IPC)} images of pixel_values")
        orders = [block_order(h, w, s) for h, w in grids]
        taps = [antialiased_taps(h, w, side, side) for h, w in grids]
        most = max(each.index_PA.shape[1] for each in taps)

        def joined(arrays: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in arrays])

        size = bucket(sum(map(len, orders)), multiple=s * s)
        numbers = np.repeat(np.arange(len(grids), dtype=np.int32), [len(order) for order in orders])
        arrays = (
            padded(np.concatenate([x[order] for x, order in zip(patches_IPC, orders, strict=True)]), size),
            padded(joined([x.index_PA[order] for x, order in zip(taps, orders, strict=True)]), size),
            padded(joined([x.weight_PA[order] for x, order in zip(taps, orders, strict=True)]), size),
            padded(numbers, size, -1),
        )
        counts = [h * w // s**2 for h, w in grids]
        return Prepared(arrays, np.arange(sum(counts)), counts, [(1, h // s, w // s) for h, w in grids])

    def __call__(  # type: ignore[override]
        self, patches_PC: jax.Array, index_PA: jax.Array, weight_PA: jax.Array, image_P: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype))
        rows_PAD = self.positions[...][index_PA].astype(jnp.float32)
        x_BPD = x_BPD + (rows_PAD * weight_PA[..., None]).sum(axis=1).astype(x_BPD.dtype)
        wanted = self.config.feature_layers
        return self.projector(states_of(self.layers, x_BPD, image_P[None], wanted=wanted, norm=self.norm)), ()
