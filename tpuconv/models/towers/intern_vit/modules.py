"""InternViT and the projector of InternVL."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, normal
from tpuconv.models.towers.clip.modules import with_class_token
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given, patches_of
from tpuconv.models.towers.image_encoder import Arranged, ImageEncoder, joined_squares
from tpuconv.models.towers.vit import MLP, Attention, Block


class Joining(nnx.Module):
    """A projector that joins s x s patches of square images."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any):
        self.side, self.merge = int((config.positions - config.drops_first) ** 0.5), config.merge

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([(self.side // self.merge) ** 2] * len(pixels_BCYX))

    def joined(self, x_BPD: jax.Array) -> jax.Array:
        """Returns the joined patches [B, P / s^2, M]."""
        return joined_squares(x_BPD, self.side, self.side, self.merge)


class Shuffled(Joining):
    """A norm and two matrices of joined patches: [B, P, D] to [B, P / s^2, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config)
        sizes, bias = config.sizes, config.projector_bias
        self.norm = LayerNorm("M", sizes, 1e-5, dtype=dtype)
        self.up = Einsum("BPM,MA->BPA", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPA,AO->BPO", sizes, bias=bias, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.down(self.act(self.up(self.norm(self.joined(x_BPD)))))


class Gated(Joining):
    """An MLP with a gate of joined patches, [B, P, D] to [B, P / s^2, O]; in some models behind a norm."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config)
        matrix = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = LayerNorm("M", config.sizes, config.norm_eps, dtype=dtype) if config.norm_eps else None
        self.up, self.gate, self.down = matrix("BPM,MA->BPA"), matrix("BPM,MA->BPA"), matrix("BPA,AO->BPO")

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPM = self.joined(x_BPD)
        x_BPM = x_BPM if self.norm is None else self.norm(x_BPM)
        return self.down(jax.nn.silu(self.gate(x_BPM)) * self.up(x_BPM))


class InternVit(ImageEncoder):
    """InternViT: a class token, and outputs of attention and MLP times a factor."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, act = config.sizes, ACTS_BY_NAME[config.hidden_act]
        layer_norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        rms_norm = partial(RMSNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        norm: Callable[[], Any] = layer_norm if config.norm_type == "layer_norm" else rms_norm
        qk_norm = partial(self.new_qk_norm, config, dtype) if config.use_qk_norm else None
        self.class_token = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.mask_token = nnx.Param(normal(keys(), (sizes["D"],), dtype)) if config.use_mask_token else None
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        has_positions = config.use_absolute_position_embeddings
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype)) if has_positions else None
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, bias=config.attention_bias, norm=qk_norm, dtype=dtype, keys=keys),
                    MLP(config, act, dtype=dtype, keys=keys),
                    scaled=True,
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.norm = layer_norm() if config.has_last_norm else None

    def new_qk_norm(self, config: Any, dtype: DTypeLike) -> RMSNorm:
        """Returns a norm of the queries or the keys of all heads together."""
        return RMSNorm("NH", config.sizes, 1e-6, dtype=dtype)

    def embedded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        x_BPD = with_class_token(self.class_token[...], x_BPD)
        return x_BPD if self.positions is None else x_BPD + self.positions[...]


class FirstHeadsNorm(RMSNorm):
    """RMS norm of heads [B, P, N, H] by the mean square of the first `count` heads."""

    def __init__(self, count: int, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        super().__init__("NH", sizes, eps, dtype=dtype)
        self.count = count

    def __call__(self, x_BPNH: jax.Array) -> jax.Array:
        exact_BPNH = x_BPNH.astype(jnp.float32)
        square_BP = jnp.square(exact_BPNH[:, :, : self.count]).mean(axis=(-2, -1))
        normed_BPNH = exact_BPNH * jax.lax.rsqrt(square_BP + self.eps)[..., None, None]
        return normed_BPNH.astype(x_BPNH.dtype) * self.scale[...]


class PaddedInternVit(InternVit):
    """InternViT with further heads, which norms of queries and keys do not count."""

    def new_qk_norm(self, config: Any, dtype: DTypeLike) -> RMSNorm:
        return FirstHeadsNorm(config.num_attention_heads, config.sizes, config.layer_norm_eps, dtype=dtype)
