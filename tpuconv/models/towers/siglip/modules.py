"""SigLIP."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, LayerNorm, normal
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given, patches_of
from tpuconv.models.towers.image_encoder import Arranged, ImageEncoder
from tpuconv.models.towers.vit import MLP, Attention, Block


class PoolingHead(nnx.Module):
    """The head that pools all patches to one vector. It is kept, and nothing reads it."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.probe = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.q, self.k, self.v = (Einsum("BPD,DNH->BPNH", sizes, bias=True, dtype=dtype, keys=keys) for _ in range(3))
        self.o = Einsum("BPNH,NHD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", sizes, config.layer_norm_eps, dtype=dtype)
        self.up = Einsum("BPD,DF->BPF", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPF,FD->BPD", sizes, bias=True, dtype=dtype, keys=keys)


class Siglip(ImageEncoder):
    """SigLIP.

    Attributes:
        rotate: see `Attention`.
    """

    rotate: ClassVar[Any] = None

    def build(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        sizes, act = config.sizes, ACTS_BY_NAME[config.hidden_act]

        def norm() -> LayerNorm:
            return LayerNorm("D", sizes, config.layer_norm_eps, dtype=dtype)

        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        if config.positions:
            self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, bias=config.attention_bias, rotate=type(self).rotate, dtype=dtype, keys=keys),
                    MLP(config, act, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )
        self.norm = norm()
        if config.vision_use_head:
            self.head = PoolingHead(config, dtype=dtype, keys=keys)

    def embedded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        return x_BPD + self.positions[...]


class Pooled(nnx.Module):
    """The mean over k x k neighbouring patches, an RMS norm with the eps of the tower, and a matrix: [B, P, D] to [B,
    tokens, O]."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.tokens = config.mm_tokens_per_image
        self.side, self.out_side = config.side, int(self.tokens**0.5)
        self.norm = CenteredRMSNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)
        self.matrix = Einsum("BPD,DO->BPO", config.sizes, dtype=dtype, keys=keys)

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        if not self.out_side or self.out_side**2 != self.tokens or self.side % self.out_side:
            raise UsageError(
                f"{self.side} x {self.side} patches cannot be {self.tokens} features",
                hint="correct `mm_tokens_per_image` of config.json",
            )
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.tokens] * len(pixels_BCYX))

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        B, _, D = x_BPD.shape
        k = self.side // self.out_side
        x_BPD = x_BPD.reshape(B, self.out_side, k, self.out_side, k, D).mean((2, 4)).reshape(B, -1, D)
        return self.matrix(self.norm(x_BPD))


class PromptMatrix(nnx.Module):
    """A matrix of each patch: [B, P, D] to [B, P, O]."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.patches = config.positions
        self.matrix = Einsum("BPD,DO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.patches] * len(pixels_BCYX))

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.matrix(x_BPD)
