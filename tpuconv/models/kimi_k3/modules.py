"""Kimi K3 (arXiv:2607.24653), text: Kimi delta attention, gated latent attention without rotary positions, experts that
read a latent vector, and attention over residuals.

Between layers the hidden states and the hidden states before blocks of layers are one array [B, T, (r D)], in this
order.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP
from tpuconv.models.common.kda import LEGEND, KimiDelta
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, normalize
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder, exact_einsum
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import with_stream
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.kimi_k3.family import Config
from tpuconv.models.kimi_linear import modules as kimi_linear
from tpuconv.notation.letters import with_letters


def situ(gate: jax.Array, up: jax.Array, config: Any) -> jax.Array:
    """Returns beta tanh(gate / beta) sigmoid(gate) times linear_beta tanh(up / linear_beta), or times `up` without a
    linear beta (SiTU), computed in float32, in the dtype of `gate`."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    u = u if linear_beta is None else linear_beta * jnp.tanh(u / linear_beta)
    y: jax.Array = beta * jnp.tanh(g / beta) * nnx.sigmoid(g) * u
    return y.astype(gate.dtype)


class MLP(GatedMLP):
    """Gated MLP with SiTU, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, width: str = "F", *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, width, dtype=dtype, keys=keys)
        self.config = config

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return situ(gate, up, self.config)


class MoE(GatedExperts):
    """The chosen experts, which read and write a latent vector, and the shared ones, x [B, T, D] to [B, T, D]. The sum
    of the chosen experts is normalized."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, {"c": "expert_dim"})
        super().__init__({**sizes, "D": sizes["expert_dim"]}, dtype=dtype, keys=keys)
        self.config = config
        self.router = deepseek_v3.Router(config, dtype=dtype, keys=keys)
        self.to_latent = Einsum("BTD,Dc->BTc", sizes, dtype=dtype, keys=keys)
        self.latent_norm = RMSNorm("c", sizes, config.rms_norm_eps, dtype=dtype)
        self.from_latent = Einsum("BTc,cD->BTD", sizes, dtype=dtype, keys=keys)
        self.shared = MLP(config, "W", dtype=dtype, keys=keys) if config.has_shared_experts else None

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return situ(gate, up, self.config)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        y_BTc = super().__call__(self.to_latent(x_BTD), *self.router(x_BTD))
        y_BTD = self.from_latent(self.latent_norm(y_BTc))
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention. Each element of a head's output has a gate."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, dtype=dtype, keys=keys)

    def gated(self, x_BTD: jax.Array, x_BTQ: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))


class PaddedDelta(KimiDelta):
    """Kimi delta attention whose decays may have a bound; one matrix makes the gates. The rates of decay are padded."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.a_log = nnx.Param(jnp.zeros(config.sizes["padded_groups"], jnp.float32))
        self.bound = config.gate_lower_bound

    def add_gates(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        sizes = with_letters(config.sizes, LEGEND)
        self.f_a = Einsum("BTD,Dw->BTw", sizes, dtype=dtype, keys=keys)
        self.f_b = Einsum("BTw,wnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.g = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        return self.g(x_BTD)


class ResidualAttention(nnx.Module):
    """Attention of each token to its hidden states before blocks of layers and to its current ones (arXiv:2607.24653,
    section 2.2), [B, T, r, D] to [B, T, D]. In float32, rounded to the dtype of the input."""

    def __init__(self, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(sizes["D"], dtype))
        self.query = nnx.Param(jnp.zeros(sizes["D"], dtype))

    def __call__(self, x_BTrD: jax.Array) -> jax.Array:
        query_D = self.scale[...].astype(jnp.float32) * self.query[...].astype(jnp.float32)
        weights_BTr = nnx.softmax((normalize(x_BTrD, 1, self.eps) * query_D).sum(-1))
        return exact_einsum("BTr,BTrD->BTD", weights_BTr, x_BTrD.astype(jnp.float32)).astype(x_BTrD.dtype)


class ResidualBlock(HybridBlock):
    """One layer: linear attention or attention, then experts or an MLP, each after a norm of what attention over
    residuals returns. The first layer of a block begins new hidden states.

    Attributes:
        always_attends: whether the first layer has weights for the embedding alone, which change nothing.
    """

    always_attends: ClassVar[bool] = True

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        sizes, size = config.sizes, config.attn_res_block_size
        self.width, self.is_first, self.blocks = sizes["D"], layer % size == 0, -(-layer // size)
        if layer or self.always_attends:
            self.attn_input = ResidualAttention(sizes, config.rms_norm_eps, dtype=dtype)
        self.mlp_input = ResidualAttention(sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        x_BTrD = x_BTD.reshape(*x_BTD.shape[:2], -1, self.width)
        x_BTD, blocks_BTrD = x_BTrD[:, :, 0], x_BTrD[:, :, 1 : 1 + self.blocks]
        read_BTD = self.attn_input(with_stream(blocks_BTrD, x_BTD)) if hasattr(self, "attn_input") else x_BTD
        y_BTD, kv = self.attn(self.attn_norm(read_BTD), step, window, kv)
        if self.is_first:
            x_BTD, blocks_BTrD = y_BTD, with_stream(blocks_BTrD, x_BTD)
        else:
            x_BTD = x_BTD + y_BTD
        x_BTD = x_BTD + self.fed(self.mlp_norm(self.mlp_input(with_stream(blocks_BTrD, x_BTD))))
        x_BTrD = jnp.concatenate([x_BTD[:, :, None], blocks_BTrD, x_BTrD[:, :, 1 + blocks_BTrD.shape[2] :]], axis=2)
        return x_BTrD.reshape(*x_BTD.shape[:2], -1), kv


class Block(ResidualBlock):
    """One layer: linear or latent attention, then experts or an MLP, each after a norm of what attention over residuals
    returns."""

    attention_type, mixer_type, moe_type, mlp_type = Attention, PaddedDelta, MoE, MLP


class ResidualNorm(RMSNorm):
    """The last norm: of attention over residuals, [B, T, (r D)] to [B, T, D]."""

    def __init__(self, letters: str, sizes: Mapping[str, int], eps: float, *, dtype: DTypeLike):
        super().__init__(letters, sizes, eps, dtype=dtype)
        self.input = ResidualAttention(sizes, eps, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.attended(x))

    def attended(self, x: jax.Array) -> jax.Array:
        """Returns what is normalized, [B, T, D]."""
        x_BTrD = x.reshape(*x.shape[:2], -1, self.scale.shape[0])
        return self.input(with_stream(x_BTrD[:, :, 1:], x_BTrD[:, :, 0]))


class ResidualDecoder(HybridDecoder):
    """A decoder whose layers attend to residuals."""

    norm_type: ClassVar[Any] = ResidualNorm
    config: Any

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        return jnp.pad(x_BTD, ((0, 0), (0, 0), (0, self.config.block_count * x_BTD.shape[-1])))


class Model(ResidualDecoder, kimi_linear.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
