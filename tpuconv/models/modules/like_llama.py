"""MLPs, norms and layers of single families that otherwise are as Llama."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Embed, Keys, PlainRMSNorm, RMSNorm, apply_rope, normalize
from tpuconv.models.common.steps import Step


class XIELU(nnx.Module):
    """The activation xIELU (arXiv:2411.13010), with two learned numbers, in the dtype of x."""

    def __init__(self, *, dtype: DTypeLike):
        self.alpha_p, self.alpha_n = nnx.Param(jnp.zeros(1, dtype)), nnx.Param(jnp.zeros(1, dtype))
        self.beta, self.eps = nnx.Param(jnp.full((), 0.5, dtype)), nnx.Param(jnp.full((), -1e-6, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        alpha_p, alpha_n, beta, eps = (
            param[...].astype(x.dtype) for param in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        positive = nnx.softplus(alpha_p) * x * x + beta * x
        negative = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + nnx.softplus(alpha_n)) + beta * x
        return jnp.where(x > 0, positive, negative)


class XIELUMLP(blocks.PlainMLP):
    """MLP without a gate with this activation, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, F: str, **options: Any):
        super().__init__(config, F, **options)
        self.xielu = XIELU(dtype=options["dtype"])

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return self.xielu(x_BTF)


class SubNormedAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], with a norm of all heads together before the last matrix.
    Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.sub_norm = RMSNorm("NH", config.sizes, config.rms_norm_eps, dtype=options["dtype"])

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return self.sub_norm(y_BTNH)


class SubNormedMLP(blocks.GatedMLP):
    """Gated MLP, x [B, T, D] to [B, T, D], with a norm before the last matrix."""

    def __init__(self, config: Any, F: str, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, F, dtype=dtype, keys=keys)
        self.sub_norm = RMSNorm("F", config.sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.sub_norm(self.act(self.gate(x_BTD)) * self.up(x_BTD)))

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return jnp.square(nnx.relu(x_BTF))


class SideBySideBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, one after the other with a norm each, or side by side after the same norm."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.parallel = config.use_parallel_residual
        if self.parallel:
            del self.mlp_norm

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if not self.parallel:
            return super().__call__(x_BTD, step, window, kv)
        normed_BTD = self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        return x_BTD + y_BTD + self.mlp(normed_BTD), kv


class BackwardAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn by negative angles; then queries and keys are normalized, each head separately."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.head_norm = PlainRMSNorm("H", config.sizes, config.rms_norm_eps, dtype=options["dtype"])

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos, sin = step.cos_sin_in(q_BTNH.dtype)
        return self.head_norm(apply_rope(q_BTNH, (cos, -sin))), self.head_norm(apply_rope(k_BTKH, (cos, -sin)))


class NormedInputs(Decoder):
    """A decoder whose embeddings are normalized."""

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return normalize(x_BTD, 1, self.config.rms_norm_eps).astype(x_BTD.dtype)


class InputEmbed(Embed):
    """The embedding matrix of a model whose head has fewer rows."""

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        super().__init__({**sizes, "V": sizes["input_vocab"]}, dtype=dtype, keys=keys)


class MoreTokensThanLogits(Decoder):
    """A decoder with logits of the first tokens of its vocabulary alone."""

    embed_type = InputEmbed
