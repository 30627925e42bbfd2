"""FlexOlmo (arXiv:2507.07024): OLMo 2 with experts."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, ScaledRMSNorm
from tpuconv.models.flex_olmo.family import Config
from tpuconv.models.olmo2.modules import Attention
from tpuconv.models.qwen3_moe.modules import MoE


class Block(nnx.Module):
    """One layer: attention and experts, each before a norm, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn = Attention(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]
        self.post_attn_norm = ScaledRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.moe = MoE(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]
        self.post_mlp_norm = ScaledRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.moe(x_BTD)), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
