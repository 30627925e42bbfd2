"""Gemma 4's assistants: modules of a draft model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.drafting import Draft, Drafted, Kept
from tpuconv.models.common.layers import Einsum, Embed, Keys, ScaledRMSNorm
from tpuconv.models.common.steps import NO_WINDOW, Steps
from tpuconv.models.gemma4_assistant.family import Config
from tpuconv.models.gemma4_text import modules as gemma4_text
from tpuconv.notation.letters import with_letters

LEGEND = {"j": "target_pair", "w": "target_width", "c": "clusters"}

BEYOND_WINDOW = 2
"""How many positions further back than a layer of Gemma 4 a draft sees: its query is at the position after the last
key, and transformers counts the window from that key, both ends included."""


class Model(Draft):
    """A draft: embeddings and hidden states of the target, and its keys and values, to the logits of next tokens."""

    def build(self, config: Config, *, dtype: DTypeLike, keys: Keys) -> None:
        sizes = with_letters(config.sizes, LEGEND)
        self.embed = Embed(sizes, dtype=dtype, keys=keys)
        self.pre_projection = Einsum("BTj,jD->BTD", sizes, dtype=dtype, keys=keys)
        self.layers = nnx.List(
            [gemma4_text.Block(config, i, dtype=dtype, keys=keys) for i in range(config.num_hidden_layers)]
        )
        self.norm = ScaledRMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.post_projection = Einsum("BTD,Dw->BTw", sizes, dtype=dtype, keys=keys)
        if config.use_ordered_embeddings:
            self.centroids = Einsum("BTD,Dc->BTc", sizes, dtype=dtype, keys=keys)
            self.token_ordering = nnx.Variable(jnp.arange(sizes["V"], dtype=jnp.int32))

    def __call__(
        self,
        ids_BT: jax.Array,
        embedded_BTw: jax.Array | None = None,
        x_BTw: jax.Array | None = None,
        *,
        kvs: Mapping[str, KV] | None = None,
        pos_BT: jax.Array | None = None,
        pos_BS: jax.Array | None = None,
    ) -> Drafted:
        """Runs the draft.

        Args:
            ids_BT: the last token.
            embedded_BTw: its embedding in the target, with the target's factor; None for zeros, which show the shapes.
            x_BTw: the hidden states of the token before it, after the last norm of the target, or the hidden states
                of an earlier call; None for zeros.
            kvs: the keys and values of the target, by the kind of the layer; None for zeros.
            pos_BT: the position of the last token, the same in further calls; None for 1.
            pos_BS: positions of the keys, -1 for none; None for 0 of one key.
        """
        B, T = ids_BT.shape
        zeros_BTw = jnp.zeros((B, T, self.config.backbone_hidden_size), self.dtype)
        embedded_BTw, x_BTw = (zeros_BTw if given is None else given for given in (embedded_BTw, x_BTw))
        pos_BS = jnp.zeros((B, 1), jnp.int32) if pos_BS is None else pos_BS
        kvs = self._no_keys(*pos_BS.shape) if kvs is None else kvs
        steps = Steps.of(self.config, jnp.ones((B, T), jnp.int32) if pos_BT is None else pos_BT, pos_BS, 0)
        x_BTD = self.pre_projection(jnp.concatenate([embedded_BTw, x_BTw], axis=-1))
        for i, (block, kind, window) in enumerate(
            zip(self.layers, self.config.kinds, self.config.windows, strict=True)
        ):
            seen = NO_WINDOW if window is None else min(window + BEYOND_WINDOW, NO_WINDOW)
            x_BTD, _ = block(x_BTD, steps[i], seen, kvs[kind])
        x_BTD = self.norm(x_BTD)
        return Drafted(self._logits(x_BTD).astype(jnp.float32), self.post_projection(x_BTD))

    def propose(self, target: Decoder, kept: Kept, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `tpuconv.models.common.drafting.Draft`. All drafts of a step have the position of the first, as in
        transformers' `SinglePositionMultiTokenCandidateGenerator`."""
        config: Any = target.config
        kvs = {kind: cache.layers[layer] for kind, layer in config.last_keys.items()}
        pos_B1 = kept.last(kept.positions(cache)) + 1
        x_B1w, ids_BI = target.norm(kept.last(kept.states_BTs)), [kept.last(kept.next_BT)]
        for _ in range(self.ahead):
            embedded_B1w = target.scaled(target.embed(ids_BI[-1]))
            out = self(ids_BI[-1], embedded_B1w, x_B1w, kvs=kvs, pos_BT=pos_B1, pos_BS=cache.positions_BS)
            x_B1w = out.x_BTD
            ids_BI.append(jnp.argmax(out.logits_BTV, axis=-1).astype(jnp.int32))
        return jnp.concatenate(ids_BI, axis=1), cache

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V]. With clusters the tokens of the most likely ones have theirs, and all others
        the least of these less 1."""
        config, (B, T) = self.config, x_BTD.shape[:2]
        if not config.use_ordered_embeddings:
            return self.embed.attend(x_BTD)
        _, chosen_BTX = jax.lax.top_k(self.centroids(x_BTD), config.centroid_intermediate_top_k)
        ids_BTn = self.token_ordering[...].reshape(config.num_centroids, -1)[chosen_BTX].reshape(B, T, -1)
        logits_BTn = jnp.einsum("BTD,BTnD->BTn", x_BTD, self.embed(ids_BTn))
        others_BTV = jnp.full((B, T, config.vocab_size), logits_BTn.min() - 1)
        return jnp.put_along_axis(others_BTV, ids_BTn, logits_BTn, axis=-1, inplace=False)

    @property
    def looked_up(self) -> Any:
        return self.embed if self.config.use_ordered_embeddings else None

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        return None

    def _no_keys(self, batch: int, length: int) -> dict[str, KV]:
        """Returns zeros for keys and values of each kind of layers."""
        sizes, kvs = with_letters(self.config.sizes, gemma4_text.LEGEND), {}
        for layer, kind in enumerate(self.config.kinds):
            H, K = gemma4_text.head_letters(self.config, layer)
            zeros = jnp.zeros((batch, length, sizes[K], sizes[H]), self.dtype)
            kvs[kind] = KV(zeros, zeros)
        return kvs
