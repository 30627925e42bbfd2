"""Hy4: the attention of GLM-5 with gates and sinks, experts as DeepSeek V3's (arXiv:2412.19437), and several residual
streams that are not mixed with each other."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import clamped
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, apply_rope, deinterleave
from tpuconv.models.common.sinks import softmax_with_sinks
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import GatedStreams, JoinedNorm, StreamsBlock, StreamsDecoder
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v32 import modules as deepseek_v32
from tpuconv.models.deepseek_v32.modules import LEGEND
from tpuconv.models.glm_moe_dsa import modules as glm_moe_dsa
from tpuconv.models.hy_v4.family import Config
from tpuconv.notation.letters import with_letters


class LastRopeIndexer(deepseek_v32.Indexer):
    """DeepSeek V3.2's indexer. The last R dimensions have rotary positions."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.k_norm = LayerNorm("x", with_letters(config.sizes, LEGEND), config.rms_norm_eps, dtype=dtype)
        self.interleaved = config.rope_interleave

    def rotated(self, x_BTnx: jax.Array, step: Step) -> jax.Array:
        cos_sin = step.cos_sin_in(x_BTnx.dtype)
        plain, rotary = jnp.split(x_BTnx, [x_BTnx.shape[-1] - 2 * cos_sin[0].shape[-1]], axis=-1)
        rotary = deinterleave(rotary) if self.interleaved else rotary
        return jnp.concatenate([plain, apply_rope(rotary, cos_sin)], axis=-1)


class GatedSinks(deepseek_v3.Attention):
    """DeepSeek V3's attention. Each head has a score without a value, and each element of its output a gate."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.kv_a_norm.eps = config.latent_eps
        if self.q_a_norm is not None:
            self.q_a_norm.eps = config.latent_eps
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, dtype=dtype, keys=keys)
        self.sinks = nnx.Param(jnp.zeros(config.sizes["N"], jnp.float32))

    def gated(self, x_BTD: jax.Array, x_BTQ: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))

    def softmax(self, scores_BNTS: jax.Array) -> jax.Array:
        return softmax_with_sinks(scores_BNTS, self.sinks[...][:, None, None])


class GatedSelectingAttention(GatedSinks, glm_moe_dsa.SelectingAttention):
    """Attention to the tokens that an indexer selects. Returns the selected tokens too."""

    indexer_type: ClassVar[Any] = LastRopeIndexer


class GatedSharingAttention(GatedSinks, glm_moe_dsa.SharingAttention):
    """Attention to the tokens that an earlier layer selected. Returns the selected tokens too."""


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]. Hidden states of the chosen ones have a
    limit."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.limit = config.swiglu_limit

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return clamped(gate, up, self.limit)


class Block(StreamsBlock):
    """One layer: attention, then an MLP or experts, each after a norm and between the streams. Returns beside the cache
    the mask [B, T, S] of the tokens that it attended to."""

    moe_type: ClassVar[Any] = MoE
    streams_type = GatedStreams

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = GatedSelectingAttention if layer in config.layer_sets["indexer_layers"] else GatedSharingAttention
        return kind(config, dtype=dtype, keys=keys)


class LastNorm(JoinedNorm):
    """The last norm: of the weighted sum of the streams, x [B, T, (r D)] to [B, T, D]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return RMSNorm.__call__(self, self.joined(x))


class Model(StreamsDecoder, glm_moe_dsa.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    mtp_type: ClassVar[Any] = None
    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        self.norm = LastNorm(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(1)).params()))
