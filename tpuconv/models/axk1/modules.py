"""A.X K1: DeepSeek V3 (arXiv:2412.19437) with a norm after the experts."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.axk1.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class Router(deepseek_v3.Router):
    """DeepSeek V3's router, in the release without corrections."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        if not config.is_corrected:
            del self.correction

    def corrected(self, scores_BTE: jax.Array) -> jax.Array:
        return super().corrected(scores_BTE) if hasattr(self, "correction") else scores_BTE


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections. Experts have a norm
    after them too."""

    attention_type = deepseek_v3.Attention
    moe_type = MoE

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        if hasattr(self, "moe"):
            self.post_mlp_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    def fed(self, x_BTD: jax.Array) -> jax.Array:
        y_BTD = super().fed(x_BTD)
        return self.post_mlp_norm(y_BTD) if hasattr(self, "post_mlp_norm") else y_BTD


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    cached = deepseek_v3.Latent.empty
