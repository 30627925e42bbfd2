"""Alice AI Foundation: Kimi delta attention and the attention of Qwen3-Next, experts chosen by corrected sigmoids, and
attention over residuals. Its module for multi-token prediction has plain residual connections."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.kda import KDAState, KimiDelta
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.kimi_k3.modules import ResidualBlock, ResidualDecoder, ResidualNorm
from tpuconv.models.qwen3_next.modules import Attention, DeltaBlock, JoinedDeltaLayer


class MoE(deepseek_v3.MoE):
    """The chosen experts and a shared one, x [B, T, D] to [B, T, D]. A sigmoid of the token weights the shared
    expert."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.router_shared = Einsum("BTD,D->BT", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        weight_BT = nnx.sigmoid(self.router_shared(x_BTD))
        y_BTD: jax.Array = self.chosen(x_BTD) + weight_BT[..., None] * self.shared(x_BTD)
        return y_BTD


class Block(ResidualBlock):
    """One layer: linear or full attention, then experts, each after a norm of what attention over residuals returns."""

    attention_type, mixer_type, moe_type, norm_type = Attention, KimiDelta, MoE, CenteredRMSNorm
    always_attends = False


class FurtherBlock(DeltaBlock):
    """The layer for multi-token prediction: full attention, then experts, each after a norm, with residual
    connections."""

    moe_type = MoE


class JoinedFurtherBlock(JoinedDeltaLayer):
    """The module for multi-token prediction."""

    block = FurtherBlock


class CenteredResidualNorm(ResidualNorm, CenteredRMSNorm):
    """The last norm: of attention over residuals, [B, T, (r D)] to [B, T, D], with a scale that is stored less 1."""


class Model(ResidualDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    norm_type = CenteredResidualNorm
    state_type = KDAState
    mtp_type = JoinedFurtherBlock

    def mtp_inputs(self, next_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `Decoder.mtp_inputs`, with the hidden states before the last norm."""
        return self.scaled(self.embed(next_BT)), self.norm.attended(x_BTD)
