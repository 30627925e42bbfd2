"""GLM-4 of April 2025 (arXiv:2406.12793): with norms after attention and MLP too."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.glm.modules import Attention
from tpuconv.models.glm4.family import Config


class Block(nnx.Module):
    """One layer: attention and MLP, each between two norms, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.post_attn_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.mlp_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, keys=keys)
        self.post_mlp_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.mlp(self.mlp_norm(x_BTD))), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
