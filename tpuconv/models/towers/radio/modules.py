"""RADIO. Images of any size are one sequence, each with learned tokens before its patches; tokens of one image see
each other. Letters: I images, P tokens of all of them, Q patches as the projector takes them."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, ScaledRMSNorm, normal, relu2
from tpuconv.models.common.seen import Deep, Prepared
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded, read_taps
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import Taps, as_wide, block_order, bucket, corner_taps
from tpuconv.models.towers.vit import MLP, Attention, Block


class Conditioner(nnx.Module):
    """Mean and deviation of colours. They are kept, and nothing reads them: the processor normalizes."""

    def __init__(self, colours: int):
        self.mean, self.deviation = (nnx.Param(jnp.zeros(colours, jnp.float32)) for _ in range(2))


class Radio(FeatureEncoder):
    """Patches [P, C] of images of any size, row by row, to features [1, P / 4, O]."""

    takes = ("pixel_values", "image_grid_hw")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        gated = config.use_swiglu_ffn
        act = nnx.silu if gated else ACTS_BY_NAME[config.hidden_act]
        self.input_conditioner = Conditioner(sizes["X"]) if config.has_conditioner else None
        self.summary_idxs = nnx.Variable(jnp.zeros(sizes["S"], jnp.int32)) if config.has_summary else None
        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.video_patch = Einsum("BPV,VD->BPD", sizes, dtype=dtype, keys=keys) if config.joins_frames else None
        self.positions, self.first = (nnx.Param(normal(keys(), (sizes[x], sizes["D"]), dtype)) for x in "PR")
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, bias=config.qkv_bias, dtype=dtype, keys=keys),
                    MLP(config, act, gated=gated, dtype=dtype, keys=keys),
                    scaled=config.has_scales,
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        sizes = np.array(grids) * self.config.merge
        patches = noise(rng, int(sizes.prod(axis=1).sum()), self.config.sizes["C"])
        return {"pixel_values": patches, "image_grid_hw": sizes}

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size * self.config.merge)

    def taps(self, h: int, w: int) -> Taps:
        """Returns which rows of positions and first tokens the tokens of an image of h x w patches read: the first
        tokens their own, then the patches."""
        side, first = self.config.side, self.config.first_tokens
        patches = corner_taps(h, w, side, side)
        index_P1, weight_P1 = side**2 + np.arange(first, dtype=np.int32)[:, None], np.ones((first, 1), np.float32)
        return Taps(
            np.concatenate(as_wide([index_P1, patches.index_PA])),
            np.concatenate(as_wide([weight_P1, patches.weight_PA])),
        )

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches_QC, grids = given(features, "pixel_values", 2), given(features, "image_grid_hw", 2).tolist()
        sizes, first, s = [h * w for h, w in grids], self.config.first_tokens, self.config.merge
        if sum(sizes) != len(patches_QC) or patches_QC.shape[1] != self.config.sizes["C"]:
            raise UsageError(
                f"pixel_values has shape {patches_QC.shape}, image_grid_hw {sum(sizes)} patches, and a patch of the "
                f"model {self.config.sizes['C']} values"
            )
        taps = [self.taps(h, w) for h, w in grids]
        orders = [block_order(h, w, s) for h, w in grids]
        starts = np.cumsum([first + size for size in sizes]) - sizes  # of the patches of each image
        size, patches = bucket(sum(sizes) + first * len(sizes)), bucket(sum(sizes), multiple=s * s)
        tokens_PC = np.zeros((size, patches_QC.shape[1]), patches_QC.dtype)
        tokens_PC[np.concatenate([start + np.arange(count) for start, count in zip(starts, sizes, strict=True)])] = (
            patches_QC
        )
        arrays = (
            tokens_PC,
            padded(np.concatenate([each.index_PA for each in taps]), size),
            padded(np.concatenate([each.weight_PA for each in taps]), size),
            padded(np.repeat(np.arange(len(sizes), dtype=np.int32), [first + count for count in sizes]), size, -1),
            padded(np.concatenate([start + each for start, each in zip(starts, orders, strict=True)]), patches),
        )
        return Prepared(arrays, np.arange(sum(sizes) // s**2), [count // s**2 for count in sizes])

    def __call__(
        self, tokens_PC: jax.Array, index_PA: jax.Array, weight_PA: jax.Array, image_P: jax.Array, place_Q: jax.Array
    ) -> tuple[jax.Array, Deep]:
        x_BPD = self.patch(tokens_PC[None].astype(self.patch.kernel.dtype))
        table = jnp.concatenate([self.positions[...], self.first[...]])
        x_BPD = x_BPD + read_taps(table, index_PA, weight_PA).astype(x_BPD.dtype)
        return self.projector(states_of(self.layers, x_BPD, image_P[None], wanted=())[:, place_Q]), ()


class SquaredRelu(nnx.Module):
    """An RMS norm and two matrices with a squared ReLU between, [B, P, width] to [B, P, O].

    Attributes:
        width: the letter of what is normalized.
    """

    width: ClassVar[str]

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.projection_bias
        self.norm = ScaledRMSNorm(self.width, sizes, 1e-5, dtype=dtype)
        self.up = Einsum(f"BP{self.width},{self.width}A->BPA", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPA,AO->BPO", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(relu2(self.up(self.norm(x))))


class Squares(SquaredRelu):
    """The same of joined patches, [B, Q, D] to [B, Q / 4, O]. The patches of a square follow each other."""

    width = "M"

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        has_norm, self.joined = config.has_final_norm, config.sizes["M"]
        self.final_norm = LayerNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype) if has_norm else None

    def __call__(self, x_BQD: jax.Array) -> jax.Array:
        x_BQD = x_BQD if self.final_norm is None else self.final_norm(x_BQD)
        return super().__call__(x_BQD.reshape(len(x_BQD), -1, self.joined))
