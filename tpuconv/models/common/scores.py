"""The head of classifiers: the matrix that makes scores of hidden states."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import TOKEN_SCORES
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.pooling import masked_mean, state_at
from tpuconv.notation.letters import with_letters


class Scores(Einsum):
    """Hidden states [B, T, D] to scores [B, T, O] in float32, in some models by way of a hidden layer with ReLU."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, head = config.outer_sizes, config.head
        inner = with_letters(sizes, {"h": "hidden_score"}) if head.is_mlp else {}
        self.hidden = Einsum("BTD,Dh->BTh", inner, bias=True, dtype=dtype, keys=keys) if head.is_mlp else None
        sizes = with_letters(sizes, {"D": "hidden_score"}) if head.is_mlp else sizes
        super().__init__("BTD,DO->BTO", sizes, bias=head.has_bias, dtype=dtype, keys=keys)
        self.head = head

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the scores of tokens."""
        x_BTD = x_BTD if self.hidden is None else nnx.relu(self.hidden(x_BTD))
        return super().__call__(x_BTD).astype(jnp.float32)

    def of_texts(self, x_BTD: jax.Array, ids_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """Returns the scores [B, O] of texts, or [B, T, O] of tokens, as GenericForSequenceClassification and
        GenericForTokenClassification of transformers have them. Those of a text are its last token's if config.json
        does not say another pooling."""
        if self.head.kind == TOKEN_SCORES:
            return self(x_BTD)
        counts_BT = mask_BT if self.head.pad is None else mask_BT & (ids_BT != self.head.pad)
        return self(self.pooled(x_BTD, counts_BT)[:, None])[:, 0] / self.head.temperature

    def pooled(self, x_BTD: jax.Array, counts_BT: jax.Array) -> jax.Array:
        """Returns the hidden state [B, D] of each text that is scored."""
        if self.head.pooling == "avg":
            return masked_mean(x_BTD, counts_BT.astype(jnp.float32)).astype(x_BTD.dtype)
        is_last = self.head.pooling == "last"
        place_B = (jnp.where(counts_BT, jnp.arange(counts_BT.shape[1]), 0) if is_last else counts_BT).argmax(axis=1)
        return state_at(x_BTD, place_B)
