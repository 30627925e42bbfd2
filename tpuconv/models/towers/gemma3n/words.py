"""The projector of Gemma 3n: a matrix between norms, for features, and for ids of the vocabulary that it embeds."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, normal, normalize


class WordEmbedder(nnx.Module):
    """Features [..., W] to [..., O]. The eps of norms is the tower's; the last one has no scale."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.config, sizes, self.eps = config, config.sizes, config.rms_norm_eps
        self.embedding = nnx.Param(normal(keys(), (sizes["V"], sizes["W"]), dtype))
        self.word_norm, self.norm = (ScaledRMSNorm("W", sizes, self.eps, dtype=dtype) for _ in range(2))
        self.matrix = Einsum("PW,WO->PO", sizes, dtype=dtype, keys=keys)

    def places(self, first: int) -> dict[int, int]:
        """Returns the numbers of the embeddings in the output of `with_words`, by id; `first` is the number of
        features before them. The placeholder has none."""
        words, placeholder = self.config.words, self.config.placeholder
        return {token: first + i for i, token in enumerate(words) if token != placeholder}

    def with_words(self, x_BPW: jax.Array) -> jax.Array:
        """Returns features, one image or sound after the other, and behind them the embeddings of ids [B P + V, O]."""
        x_PW = self.norm(x_BPW.reshape(-1, x_BPW.shape[-1]))
        y_PO = self.matrix(jnp.concatenate([x_PW, self.word_norm(self.embedding[...])]))
        return normalize(y_PO, 1, self.eps).astype(y_PO.dtype)
