"""Granite 3, mixture of experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.moe import Experts
from tpuconv.models.common.placement import placed
from tpuconv.models.granite import modules as granite
from tpuconv.models.granitemoe.family import Config


class MoE(Experts):
    """The X experts with the highest scores of each token, and the shared one, if any, x [B, T, D] to [B, T, D]. The
    weights are the softmax of these X scores."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.count = config.num_experts_per_tok
        self.router = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys)
        self.shared = GatedMLP(config, "W", dtype=dtype, keys=keys) if config.has_shared_expert else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        scores_BTX, ids_BTX = jax.lax.top_k(placed(self.router(x_BTD), "B T E").astype(jnp.float32), self.count)
        y_BTD = super().__call__(x_BTD, ids_BTX, nnx.softmax(scores_BTX).astype(x_BTD.dtype))
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class Block(granite.Block):
    """One layer: attention and experts, each after a norm, with residual connections and a factor of what they add."""

    moe_type = MoE


class Model(granite.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
