"""MiniCPM 3 (arXiv:2404.06395 has its factors): latent attention (arXiv:2405.04434) in a dense model, with factors of
embeddings, residuals and logits."""

from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Keys, times
from tpuconv.models.minicpm3.family import Config
from tpuconv.models.youtu import modules as youtu


class Block(youtu.Block):
    """One layer: attention and MLP, each after a norm, with residual connections and a factor of what they add."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.factor = config.residual_factor

    def joined(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        return x_BTD + times(y_BTD, self.factor)


class Model(youtu.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    config: Config

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return times(x_BTD, self.config.scale_emb)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return times(logits_BTV, self.config.logit_factor)
