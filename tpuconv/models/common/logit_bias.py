"""A bias of the logits, also where these are products with the embedding."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.decoder import Decoder


class LogitBias(nnx.Module):
    """A bias of each logit, where the embedding may be the head: logits [B, T, V] to [B, T, V]."""

    def __init__(self, config: Any, *, dtype: DTypeLike):
        self.bias = nnx.Param(jnp.zeros(config.sizes["V"], dtype))

    def __call__(self, logits_BTV: jax.Array) -> jax.Array:
        return logits_BTV + self.bias[...]


class BiasedLogits(Decoder):
    """A decoder whose logits have a bias, if its config `has_logit_bias`."""

    def __init__(self, config: Any, *, dtype: DTypeLike = jnp.bfloat16, **options: Any):
        super().__init__(config, dtype=dtype, **options)
        if config.has_logit_bias:
            self.logit_bias = LogitBias(config, dtype=dtype)

    @property
    def output_modules(self) -> tuple[str, ...]:
        return ("logit_bias",) if hasattr(self, "logit_bias") else ()

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        biased_BTV: jax.Array = self.logit_bias(logits_BTV) if hasattr(self, "logit_bias") else logits_BTV
        return biased_BTV
