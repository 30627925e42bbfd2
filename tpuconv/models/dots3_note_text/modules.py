"""dots3.note: DeepSeek V3.2 (arXiv:2512.02556) with scaled latent vectors and gates of heads. Layers with a sliding
window have sizes of their own, and no indexer."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, times
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v32 import modules as deepseek_v32
from tpuconv.models.dots3_note_text.family import Config
from tpuconv.models.glm_moe_dsa.modules import NeighbourIndexer


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention. Latent vectors are multiplied by (D / width)^0.5, rotary keys are normalized, and the
    output of each head has a gate."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        sizes, eps = config.sizes, config.rms_norm_eps
        self.score_scale = (sizes["P"] + sizes["R"]) ** -0.5
        self.q_a_norm = RMSNorm("Q", sizes, eps, dtype=dtype)
        self.kv_a_norm = RMSNorm("C", sizes, eps, dtype=dtype)
        self.k_rope_norm = RMSNorm("R", sizes, eps, dtype=dtype)
        self.gate = Einsum("BTD,DN->BTN", sizes, dtype=dtype, keys=keys)

    def query_latents(self, x_BTD: jax.Array) -> jax.Array:
        return times(super().query_latents(x_BTD), (self.sizes["D"] / self.sizes["Q"]) ** 0.5)

    def latents(self, x_BTD: jax.Array, step: Step) -> Any:
        k_BTR = self._rotated(self.k_rope_norm(self.k_rope(x_BTD))[:, :, None], step)[:, :, 0]
        c_BTC = times(self.kv_a_norm(self.kv_a(x_BTD)), (self.sizes["D"] / self.sizes["C"]) ** 0.5)
        return deepseek_v3.Latent(c_BTC, k_BTR)

    def gated(self, x_BTD: jax.Array, x_BTQ: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))[..., None]


class ScaledSelectingAttention(deepseek_v32.Attention, Attention):
    """The same to the tokens that an indexer selects."""

    indexer_type = NeighbourIndexer


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    moe_type = deepseek_v3.MoE

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = ScaledSelectingAttention if layer in config.layer_sets["indexer_layers"] else Attention
        return kind(config.of_layer(layer), dtype=dtype, keys=keys)


class Model(deepseek_v32.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    mtp_type: ClassVar[Any] = None

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        if layer in config.layer_sets["indexer_layers"]:
            return super().cached(config, layer, shape, dtype)
        return deepseek_v3.Latent.empty(config.of_layer(layer), layer, shape, dtype)
