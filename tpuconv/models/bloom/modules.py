"""BLOOM (arXiv:2211.05100)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.bloom.family import Config
from tpuconv.models.common.alibi import alibi
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, LayerNorm
from tpuconv.models.gpt2 import modules as gpt2


class Attention(gpt2.Attention):
    """Attention biased by distance, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.heads = config.num_attention_heads

    def score_bias(self, step: Step) -> jax.Array:
        return alibi(step.pos_BS, self.heads)


class Block(gpt2.Block):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]. Embeddings are normalized."""

    block = Block
    norm_type = LayerNorm

    def __init__(
        self,
        config: Config,
        *,
        scan_layers: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(config, scan_layers=scan_layers, dtype=dtype, rngs=rngs)
        self.embed_norm = LayerNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("embed_norm",)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return self.embed_norm(x_BTD)
