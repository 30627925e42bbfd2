"""DSpark: modules of a draft model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Embed, Keys, normal
from tpuconv.models.dflash import modules as dflash
from tpuconv.models.dspark.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"r": "markov_rank", "j": "markov_inputs", "g": "markov_gates", "v": "draft_vocab"}


class MarkovHead(nnx.Module):
    """The matrix of pairs of tokens: what the token before adds to the logits of a token."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.config = config
        self.before = Embed(with_letters(sizes, {"D": "markov_rank"}), dtype=dtype, keys=keys)
        self.after = Einsum("BTr,rv->BTv", sizes, dtype=dtype, keys=keys)
        has_gates = config.is_gated or config.is_recurrent
        self.gates = Einsum("BTj,jg->BTg", sizes, bias=True, dtype=dtype, keys=keys) if has_gates else None

    def __call__(self, ids_B1: jax.Array, x_B1D: jax.Array, state_B1r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what is added to the logits [B, 1, v] behind the tokens `ids_B1`, and the state for the next token.
        `x_B1D` are the hidden states of the token whose logits they are."""
        row_B1r = self.before(ids_B1)
        if self.gates is None:
            return self.after(row_B1r), state_B1r
        if self.config.is_gated:
            gate_B1r = nnx.sigmoid(self.gates(jnp.concatenate([x_B1D, row_B1r], axis=-1)))
            return self.after(gate_B1r * row_B1r), state_B1r
        joined_B1j = jnp.concatenate([state_B1r, row_B1r, x_B1D], axis=-1)
        gate_B1r, new_B1r, out_B1r = jnp.split(self.gates(joined_B1j), 3, axis=-1)
        gate_B1r = nnx.sigmoid(gate_B1r)
        state_B1r = gate_B1r * state_B1r + (1 - gate_B1r) * jnp.tanh(new_B1r)
        return self.after(jnp.tanh(out_B1r)), state_B1r


class ConfidenceHead(nnx.Module):
    """The weights that predict whether a token is accepted. A step drafts the whole block, and does not ask."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.kernel = nnx.Param(normal(keys(), (1, config.sizes["confidence_inputs"]), dtype))
        self.bias = nnx.Param(jnp.zeros(1, dtype)) if config.has_confidence_bias else None


class Model(dflash.Model):
    """A draft: a block of tokens, and hidden states of the target before it, to hidden states of the block, of which
    tokens are chosen one after the other."""

    def build(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype=dtype, keys=keys)
        self.markov = MarkovHead(config, dtype=dtype, keys=keys) if config.has_markov else None
        self.confidence = ConfidenceHead(config, dtype=dtype, keys=keys) if config.has_confidence else None

    def drafted(self, target: Decoder, y_BID: jax.Array, last_B1: jax.Array) -> jax.Array:
        if self.markov is None:
            return super().drafted(target, y_BID, last_B1)
        logits_BIV = self.logits_of(target, y_BID).astype(jnp.float32)
        state_B1r = jnp.zeros((len(last_B1), 1, self.config.markov_rank), y_BID.dtype)
        ids_B1, drafts = last_B1, []
        for i in range(y_BID.shape[1]):
            here = slice(i, i + 1)
            more_B1V, state_B1r = self.markov(ids_B1, y_BID[:, here], state_B1r)
            if i or self.config.sample_from_anchor:
                ids_B1 = self.most_likely(logits_BIV[:, here] + more_B1V.astype(jnp.float32))
                drafts.append(ids_B1)
        return jnp.concatenate(drafts, axis=1)
