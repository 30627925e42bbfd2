"""CLIP."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import ACTS_BY_NAME, patches_of
from tpuconv.models.towers.image_encoder import ImageEncoder
from tpuconv.models.towers.vit import MLP, Attention, Block


def with_class_token(token_D: jax.Array, x_BPD: jax.Array) -> jax.Array:
    """Returns patches [B, P + 1, D] with the class token before them."""
    token_BPD = jnp.broadcast_to(token_D.astype(x_BPD.dtype), (len(x_BPD), 1, x_BPD.shape[-1]))
    return jnp.concatenate([token_BPD, x_BPD], axis=1)


def clip_layers(config: Any, norm: Callable[[], LayerNorm], dtype: DTypeLike, keys: Keys) -> Any:
    """Returns the layers of CLIP, each of which is called with patches [B, P, D]; `norm` creates their norms."""
    act = ACTS_BY_NAME[config.hidden_act]
    return nnx.List(
        [
            Block(
                config,
                norm,
                Attention(config, dtype=dtype, keys=keys),
                MLP(config, act, dtype=dtype, keys=keys),
                dtype=dtype,
            )
            for _ in range(config.sizes["L"])
        ]
    )


class ClipParts(nnx.Module):
    """The parameters of CLIP but its last norm."""

    def build_parts(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        """Creates them."""
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        self.class_token = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.pre_norm = norm()
        self.layers = clip_layers(config, norm, dtype, keys)


class Clip(ClipParts, ImageEncoder):
    """CLIP: a class token before the patches, and a norm before the first layer."""

    def build(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        self.build_parts(config, dtype, keys)
        self.norm = LayerNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)

    def embedded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        return self.pre_norm(with_class_token(self.class_token[...], x_BPD) + self.positions[...])


class NoProjector(nnx.Module):
    """No projector of its own. It has the arguments of one."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        pass


class ClipOfVideos(Clip):
    """CLIP for the frames of videos. It is kept, and nothing reads it."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """No features."""
        return ()

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        raise UsageError("videos are not implemented for this model", hint="give single frames as images")
