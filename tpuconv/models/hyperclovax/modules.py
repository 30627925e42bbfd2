"""HyperCLOVA X SEED: Granite with norms after each part."""

from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Keys, RMSNorm, times
from tpuconv.models.granite import modules as granite
from tpuconv.models.hyperclovax.family import Config


class Block(granite.Block):
    """One layer: attention and MLP, each after a norm and before another one, if there are these, with residual
    connections and a factor of what they add."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.post_attn_norm = self.post_norm(config, dtype)
        self.post_mlp_norm = self.post_norm(config, dtype)

    def post_norm(self, config: Config, dtype: DTypeLike) -> RMSNorm | None:
        """Returns a norm after a part; None in a model without."""
        return RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype) if config.use_post_norm else None

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = self.joined(x_BTD, y_BTD if self.post_attn_norm is None else self.post_attn_norm(y_BTD))
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        return self.joined(x_BTD, y_BTD if self.post_mlp_norm is None else self.post_mlp_norm(y_BTD)), kv


class Model(granite.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return times(logits_BTV, self.config.logits_scaling)
