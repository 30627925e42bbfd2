"""Granite with sinks, and with norms behind each part."""

from typing import Any

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.common.steps import Step


class PostNormedBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm and before another one, if there are these, with residual
    connections."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.post_attn_norm = self.post_norm(config, dtype)
        self.post_mlp_norm = self.post_norm(config, dtype)

    def post_norm(self, config: Any, dtype: DTypeLike) -> RMSNorm | None:
        """Returns a norm after a part; None in a model without."""
        return RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype) if config.use_post_norm else None

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = self.joined(x_BTD, y_BTD if self.post_attn_norm is None else self.post_attn_norm(y_BTD))
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        return self.joined(x_BTD, y_BTD if self.post_mlp_norm is None else self.post_mlp_norm(y_BTD)), kv
