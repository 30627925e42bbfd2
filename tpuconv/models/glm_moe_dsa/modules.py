"""GLM-5: DeepSeek V3.2 (arXiv:2512.02556) in which layers may attend to the tokens that an earlier one selected
(arXiv:2603.12201)."""

from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.layers import Keys, apply_rope_to_neighbours
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v32 import modules as deepseek_v32
from tpuconv.models.glm_moe_dsa.family import Config


class NeighbourIndexer(deepseek_v32.Indexer):
    """DeepSeek V3.2's indexer. Rotary positions turn adjacent pairs."""

    def rotated(self, x_BTnx: jax.Array, step: Step) -> jax.Array:
        return apply_rope_to_neighbours(x_BTnx, step.cos_sin_in(x_BTnx.dtype))


class SelectingAttention(deepseek_v32.Attention):
    """DeepSeek V3.2's attention. Returns the selected tokens too."""

    indexer_type = NeighbourIndexer

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any) -> tuple[jax.Array, Any]:
        x_BTQ = self.query_latents(x_BTD)
        kv = self.appended(kv, self.latents(x_BTD, step), step)
        selected_BTS = self.visible(x_BTD, x_BTQ, kv, step, window)
        return self.attend(x_BTD, x_BTQ, kv, step, selected_BTS), (kv, selected_BTS)


class SharingAttention(deepseek_v3.Attention):
    """DeepSeek V3's attention to the tokens that an earlier layer selected. Returns the selected tokens too."""

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any) -> tuple[jax.Array, Any]:
        y_BTD, kv = super().__call__(x_BTD, step, window, kv)
        return y_BTD, (kv, step.input)

    def visible(self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: Any, step: Step, window: jax.Array | int) -> jax.Array:
        selected_BTS: jax.Array = step.input
        return selected_BTS


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections. Returns beside the
    cache the mask [B, T, S] of the tokens that it attended to."""

    moe_type = deepseek_v3.MoE

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = SelectingAttention if layer in config.layer_sets["indexer_layers"] else SharingAttention
        return kind(config, dtype=dtype, keys=keys)


class MTPLayer(mtp.MTPLayer, Block):
    """The layer for multi-token prediction, which has an indexer."""

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return SelectingAttention(config, dtype=dtype, keys=keys)

    def predict(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        y_BTD, (kv, _) = super().predict(next_BTD, x_BTD, step, kv)
        return y_BTD, kv


class Model(deepseek_v32.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    mtp_type: ClassVar[Any] = mtp.mtp_module(MTPLayer)

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        if layer in config.layer_sets["indexer_layers"] or layer >= config.num_hidden_layers:
            return super().cached(config, layer, shape, dtype)
        return deepseek_v3.Latent.empty(config, layer, shape, dtype)

    def source_of(self, layer: int) -> int | None:
        """Returns the layer whose selected tokens a layer without an indexer attends to."""
        own = self.config.layer_sets["indexer_layers"]
        return None if layer in own else max(i for i in own if i < layer)

    def handed_on(self, result: Any) -> Any:
        """Returns the mask of the selected tokens, without the cache."""
        return result[1]

    def kept(self, layer: int, result: Any) -> Any:
        return result[0]

    def given(self, step: Step, handed: Any) -> tuple[Step, Any]:
        """Returns the step with the selected tokens."""
        return step._replace(input=handed), None
