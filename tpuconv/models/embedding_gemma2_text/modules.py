"""EmbeddingGemma 2, the text model: Gemma 4's layers, in which tokens see those behind them."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm
from tpuconv.models.embedding_gemma2_text.family import Config
from tpuconv.models.gemma4_text import modules as gemma4
from tpuconv.notation.letters import with_letters


class ProjectedNorm(ScaledRMSNorm):
    """The last norm and a projection behind it, x [B, T, D] to [B, T, sentence_dim]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.out = Einsum("BTD,DE->BTE", with_letters(config.sizes, {"E": "sentence_dim"}), dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.out(super().__call__(x_BTD))


class Model(gemma4.Model):
    """Token ids [B, T] to the embeddings of texts [B, T, sentence_dim], of which the mean over the tokens counts."""

    inputs_type: ClassVar[Any] = gemma4.ProjectedInputs
    init_cache = Decoder.init_cache  # refuses

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        rngs = rngs or nnx.Rngs(0)
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        self.norm = ProjectedNorm(config, dtype=dtype, keys=Keys(rngs.params()))
