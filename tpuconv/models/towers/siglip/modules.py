"""SigLIP."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.towers.encoder import ACTS_BY_NAME, patches_of
from tpuconv.models.towers.image_encoder import ImageEncoder
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
