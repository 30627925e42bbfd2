"""Modules of OPT."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm
from tpuconv.models.common.steps import Step
from tpuconv.models.modules.gpt import NoNorm, PositionedDecoder, SumNormBlock
from tpuconv.notation.letters import with_letters


class ChosenNormBlock(SumNormBlock):
    """One layer: attention, then an MLP, each after a norm, or with the norm behind the residual connection."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.norms_first = config.do_layer_norm_before

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if self.norms_first:
            return blocks.PreNormBlock.__call__(self, x_BTD, step, window, kv)
        return super().__call__(x_BTD, step, window, kv)


class Projection(nnx.Module):
    """Stands where other models have their last norm: x [B, T, D] to [B, T, token_width]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.out = Einsum("BTD,DE->BTE", with_letters(config.sizes, {"E": "token_width"}), dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.out(x_BTD)


class NormBeforeProjection(LayerNorm):
    """The last norm and a projection behind it, x [B, T, D] to [B, T, token_width]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.out = Projection(config, dtype=dtype, keys=keys).out

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.out(super().__call__(x_BTD))


class OptDecoder(PositionedDecoder):
    """A decoder with learned positions, whose embeddings may be narrower than its layers, and which may have no last
    norm."""

    config: Any

    def __init__(self, config: Any, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any):
        rngs = rngs or nnx.Rngs(0)
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        if not config.projects_embeddings:
            self.norm = self.norm if config.has_last_norm else NoNorm()
            return
        keys, sizes = Keys(rngs.params()), with_letters(config.sizes, {"E": "token_width"})
        self.project_in = Einsum("BTE,ED->BTD", sizes, dtype=dtype, keys=keys)
        self.norm = (NormBeforeProjection if config.has_last_norm else Projection)(config, dtype=dtype, keys=keys)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return (*super().input_modules, *(("project_in",) if self.config.projects_embeddings else ()))

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return self.project_in(x_BTD) if self.config.projects_embeddings else x_BTD
