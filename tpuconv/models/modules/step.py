"""The attention of Step-1, and the attention and the router of Step-3."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.alibi import root_alibi
from tpuconv.models.common.blocks import Attention
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, exact_product
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step


class RootAlibiAttention(Attention):
    """Attention biased by the root of the distance, x [B, T, D] to [B, T, D]. Also returns the keys and values of all
    tokens so far."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.heads = config.num_attention_heads

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        return q_BTNH, k_BTKH

    def score_bias(self, step: Step) -> jax.Array:
        return root_alibi(step.pos_BT, step.pos_BS, self.heads)


class FactorizedAttention(Attention):
    """Multi-matrix factorization attention (arXiv:2412.19255), x [B, T, D] to [B, T, D]. Also returns the keys and
    values of all tokens so far. Queries are made of a normalized latent vector."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys, **options: Any):
        super().__init__(config, dtype=dtype, keys=keys, **options)
        self.q_a = Einsum("BTD,DQ->BTQ", config.sizes, dtype=dtype, keys=keys)
        self.q_a_norm = RMSNorm("Q", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.q = Einsum("BTQ,QNH->BTNH", config.sizes, dtype=dtype, keys=keys)

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return self.q(self.q_a_norm(self.q_a(x_BTD)))


class ProbableRouter(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts, the most probable ones. Their weights are
    their probabilities, which are normalized if `norm_topk_prob` is set. Computed in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_BTE = placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E")
        weights_BTX, ids_BTX = jax.lax.top_k(nnx.softmax(logits_BTE), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True)
        return ids_BTX, weights_BTX
