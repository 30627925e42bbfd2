"""MoonViT, its second version and the vision encoder of Muse. The patches of all images are one sequence, each image
row by row."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import (
    Einsum,
    Keys,
    LayerNorm,
    ScaledRMSNorm,
    apply_rope,
    apply_rope_to_neighbours,
    gelu,
    normal,
    normalize,
)
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import cos_sin, from_one, interleaved
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    FeatureEncoder,
    Grids,
    padded,
    patches_by_grid,
    random_patches,
    read_taps,
)
from tpuconv.models.towers.places import (
    Taps,
    bicubic_taps,
    bilinear_taps_of_centers,
    block_order,
    bucket,
    raster,
    zero_padded_taps,
)
from tpuconv.models.towers.qwen_vit.modules import Merger
from tpuconv.models.towers.vit import MLP, Attention, Block, CosSin

TORCH_EPS = 2.0**-23
"""The eps of PyTorch's RMSNorm where none is given, of bfloat16 too."""


class PackedVit(FeatureEncoder):
    """Patches [P, ...] of images of any size to features [P / s^2, O].

    Attributes:
        joins_frames: whether the frames of a clip see each other, and a feature is the mean over them.
        has_bias: whether the matrices of layers have biases.
        has_patch_bias: whether the matrix of patches has one.
    """

    takes = ("pixel_values", "image_grid_thw")
    joins_frames: ClassVar[bool]
    has_bias: ClassVar[bool] = True
    has_patch_bias: ClassVar[bool]
    rotate: ClassVar[Any]
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=self.has_patch_bias, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        bias, act = self.has_bias, ACTS_BY_NAME[config.hidden_act]
        self.layers = nnx.List(
            [
                Block(
                    config,
                    lambda: self.layer_norm(config, dtype),
                    Attention(config, bias=bias, out_bias=bias, rotate=self.rotate, dtype=dtype, keys=keys),
                    MLP(config, act, bias=bias, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.norm = self.last_norm(config, dtype)

    def layer_norm(self, config: Any, dtype: DTypeLike) -> Any:
        """Returns a norm of a layer."""
        return LayerNorm("D", config.sizes, 1e-5, dtype=dtype)

    def last_norm(self, config: Any, dtype: DTypeLike) -> Any:
        """Returns a norm before or behind all layers."""
        return self.layer_norm(config, dtype)

    def taps(self, h: int, w: int) -> Taps:
        """Returns which learned positions the patches of an image of h x w read."""
        raise NotImplementedError

    def windows(self, at_P2: np.ndarray) -> np.ndarray:
        """Returns the number of the window of each patch of an image, by its row and column."""
        return np.zeros(len(at_P2), np.int32)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        p, C = self.config.patch_size, self.config.sizes["C"]
        return random_patches(rng, grids, self.config.tower.merge, C // p**2, p, p)

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size * self.config.tower.merge)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches_PC, grids = patches_by_grid(features, 2, 4)
        s, places, clip, window, first = self.config.tower.merge, [], 0, 0, 0
        counts = []
        for frames, h, w in grids.tolist():
            at, taps, in_blocks = raster(h, w), self.taps(h, w), np.argsort(block_order(h, w, s))
            numbers = self.windows(at)
            alone = 1 if self.joins_frames else frames
            for _ in range(alone):
                t = frames // alone
                whole = np.full(t * h * w, clip, np.int32)
                frame = np.repeat(np.arange(t, dtype=np.int32) + (t > 1), h * w)
                places.append(
                    (
                        *(np.tile(each, (t, 1)) for each in (taps.index_PA, taps.weight_PA, at)),
                        *(frame, whole, np.tile(numbers + window, t).astype(np.int32)),
                        *(np.tile(in_blocks + first, t).astype(np.int32), np.full(t * h * w, 1 / t, np.float32)),
                    )
                )
                clip, window, first = clip + 1, window + int(numbers.max()) + 1, first + h * w
            counts.append(alone * h * w // s**2)
        size = bucket(len(patches_PC), multiple=s * s)
        columns = [np.concatenate(each) for each in zip(*places, strict=True)]
        fills = (0, 0, 0, 0, -1, -1, 0, 0)
        arrays = [padded(each, size, fill) for each, fill in zip(columns, fills, strict=True)]
        return Prepared((padded(patches_PC, size), *arrays), np.arange(first // s**2), counts)

    def embedded(self, patches_PC: jax.Array, index_PA: jax.Array, weight_PA: jax.Array) -> jax.Array:
        """Returns the patches [1, P, D] with learned positions, which are interpolated in float32."""
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype))
        return x_BPD + read_taps(self.positions[...], index_PA, weight_PA).astype(x_BPD.dtype)

    def entered(self, x_BPD: jax.Array, frame_P: jax.Array) -> jax.Array:
        """Returns the first layer's input [1, P, D]; `frame_P` numbers the frames of a clip from 1, 0 for an image."""
        raise NotImplementedError

    def turns(self, at_BP2: jax.Array, dtype: DTypeLike) -> CosSin:
        """Returns cosine and sine of the angles of patches."""
        raise NotImplementedError

    def segments_of(self, layer: int, clips_BP: jax.Array, windows_BP: jax.Array) -> jax.Array:
        """Returns what the patches that see each other in a layer have the same number of."""
        return clips_BP

    def __call__(
        self,
        patches_PC: jax.Array,
        index_PA: jax.Array,
        weight_PA: jax.Array,
        at_P2: jax.Array,
        frame_P: jax.Array,
        clip_P: jax.Array,
        window_P: jax.Array,
        place_P: jax.Array,
        share_P: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.entered(self.embedded(patches_PC, index_PA, weight_PA), frame_P)
        turns = self.turns(at_P2[None], x_BPD.dtype)
        for i, layer in enumerate(self.layers):
            x_BPD = layer(x_BPD, self.segments_of(i, clip_P[None], window_P[None]), turns)
        shared_PD = self.norm(x_BPD)[0] * share_P[:, None].astype(x_BPD.dtype)
        blocks_PD = jax.ops.segment_sum(shared_PD, place_P, len(place_P))
        return self.projector(blocks_PD[None]), ()


class MoonVit(PackedVit):
    """MoonViT of Kimi K2.5. The frames of a clip have sines and cosines of their numbers too."""

    joins_frames = True
    has_patch_bias = True
    rotate = staticmethod(apply_rope_to_neighbours)

    def taps(self, h: int, w: int) -> Taps:
        return bicubic_taps(h, w, self.config.pos_emb_height, self.config.pos_emb_width)

    def entered(self, x_BPD: jax.Array, frame_P: jax.Array) -> jax.Array:
        rates, _ = Rope().inverse_frequencies(x_BPD.shape[-1])
        angles = (frame_P[:, None] - 1).astype(jnp.float32) * rates
        waves_PD = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return x_BPD + jnp.where(frame_P[:, None] > 0, waves_PD, 0).astype(x_BPD.dtype)

    def turns(self, at_BP2: jax.Array, dtype: DTypeLike) -> CosSin:
        return cos_sin(interleaved(at_BP2, self.config.sizes["H"], self.config.rope_theta))


class MoonMerger(Merger):
    """The projector of Kimi K2.5."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.norm.eps = config.projection_layer_norm_eps


class MoonVit2(MoonVit):
    """MoonViT of Kimi K3: RMS norms, no biases, and learned positions by bilinear interpolation."""

    has_bias = False
    has_patch_bias = False

    def layer_norm(self, config: Any, dtype: DTypeLike) -> Any:
        return ScaledRMSNorm("D", config.sizes, TORCH_EPS, dtype=dtype)

    def taps(self, h: int, w: int) -> Taps:
        return bilinear_taps_of_centers(h, w, self.config.pos_emb_height, self.config.pos_emb_width)


class MoonMerger2(nnx.Module):
    """The projector of Kimi K3: joins s x s patches, [B, P, D] to [B, P / s^2, O], by two matrices with GELU between,
    and normalizes the features."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.merged = sizes["M"]
        self.up = Einsum("BPM,MW->BPW", sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("O", sizes, config.projection_layer_norm_eps, dtype=dtype)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.norm(self.down(gelu(self.up(x_BPD.reshape(len(x_BPD), -1, self.merged)))))


class MuseVit(PackedVit):
    """The encoder of Muse: some layers see windows as large as the table of positions. Patches read learned positions
    as if rows and columns were swapped."""

    joins_frames = False
    has_patch_bias = False
    rotate = staticmethod(apply_rope)

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.norm_before = self.last_norm(config, dtype)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return random_patches(rng, grids, self.config.tower.merge, self.config.sizes["C"])

    def last_norm(self, config: Any, dtype: DTypeLike) -> LayerNorm:
        return LayerNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)

    def taps(self, h: int, w: int) -> Taps:
        return zero_padded_taps(w, h, self.config.pos_emb_width, self.config.pos_emb_height)

    def windows(self, at_P2: np.ndarray) -> np.ndarray:
        at = at_P2 // int(self.config.pos_emb_height)
        return np.asarray(at[:, 0] * (at[:, 1].max() + 1) + at[:, 1])

    def entered(self, x_BPD: jax.Array, frame_P: jax.Array) -> jax.Array:
        return self.norm_before(x_BPD)

    def turns(self, at_BP2: jax.Array, dtype: DTypeLike) -> CosSin:
        return cos_sin(from_one(at_BP2, self.config.sizes["H"], self.config.rope_theta), dtype)

    def segments_of(self, layer: int, clips_BP: jax.Array, windows_BP: jax.Array) -> jax.Array:
        return clips_BP if self.config.kinds[layer] == "full_attention" else windows_BP


class MuseAdapter(nnx.Module):
    """Joins s x s patches (channel, row, column), [B, P, D] to [B, P / s^2, O]: two matrices with an activation behind
    each, a third, and an RMS norm without a scale."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, self.s2, self.eps = config.sizes, config.tower.merge**2, config.eps
        self.up = Einsum("BPM,MX->BPX", sizes, dtype=dtype, keys=keys)
        self.down = Einsum("BPX,XA->BPA", sizes, dtype=dtype, keys=keys)
        self.matrix = Einsum("BPA,AO->BPO", sizes, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        B, P, D = x_BPD.shape
        x_BPM = x_BPD.reshape(B, P // self.s2, self.s2, D).swapaxes(2, 3).reshape(B, P // self.s2, D * self.s2)
        y_BPO = self.matrix(self.act(self.down(self.act(self.up(x_BPM)))))
        return normalize(y_BPO, 1, self.eps).astype(y_BPO.dtype)
