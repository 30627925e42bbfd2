"""Mistral Large 4: latent attention (arXiv:2405.04434) to tokens that indexers select (arXiv:2512.02556), in some
layers without rotary positions, in others with the latent vectors of an earlier layer, and experts."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.cache import IndexKeys
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm, RMSNorm, soft_capped
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v3.modules import PlainLatent
from tpuconv.models.deepseek_v32.modules import INDEXER_EPS
from tpuconv.models.glm_moe_dsa.modules import NeighbourIndexer
from tpuconv.models.mistral_large4.family import Config


class Given(NamedTuple):
    """The inputs of a layer besides the hidden states.

    Attributes:
        factors_BTX: the factors of the rotary frequencies, the same for all tokens.
        selected_BTS: the mask of the tokens that the last indexer selected.
        rotary: the latent vectors that the last layer made with rotary positions that others read.
        plain: the same without rotary positions.
    """

    factors_BTX: Any = None
    selected_BTS: Any = None
    rotary: deepseek_v3.Latent | None = None
    plain: PlainLatent | None = None


class LearnedFrequencies(nnx.Module):
    """Learned factors of the rotary frequencies, exp(alpha), for each pair of dimensions."""

    def __init__(self, config: Config):
        self.alpha = nnx.Param(jnp.zeros(config.sizes["rotary_pairs"], jnp.float32))

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        """Returns the factors [B, T, X]."""
        return jnp.broadcast_to(jnp.exp(self.alpha[...]), (*ids_BT.shape, self.alpha[...].shape[0]))


def learned_cos_sin(rope: Rope, factors_BTX: jax.Array, pos_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `rope_cos_sin`, with factors of the frequencies."""
    rates, scale = rope.inverse_frequencies(2 * factors_BTX.shape[-1])
    angles = pos_BT[:, :, None, None].astype(jnp.float32) * (rates * factors_BTX[:, :, None])
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


class GrowingHeads(nnx.Module):
    """Queries that grow with the logarithm of the number n of tokens so far: q (s ln n + b), with s and b of each head
    (arXiv:2501.19399). `heads` is the letter or word of the heads."""

    def __init__(self, heads: str, config: Config, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.zeros(config.sizes[heads], dtype))
        self.bias = nnx.Param(jnp.ones(config.sizes[heads], dtype))

    def __call__(self, q_BTNH: jax.Array, step: Step) -> jax.Array:
        tokens_BT1 = jnp.maximum(step.pos_BT, 0)[:, :, None] + 1
        logs_BT1 = jnp.log(tokens_BT1.astype(jnp.float32)).astype(q_BTNH.dtype)
        factors_BTN = self.scale[...].astype(q_BTNH.dtype) * logs_BT1 + self.bias[...].astype(q_BTNH.dtype)
        return q_BTNH * factors_BTN[..., None]


class GrowingIndexer(NeighbourIndexer):
    """GLM-5's indexer, of which the queries are made of hidden states and grow with their position. In layers without
    rotary positions it has none either."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.has_rope = config.with_rope[layer]
        self.q_norm = LayerNorm("D", config.sizes, INDEXER_EPS, dtype=dtype)
        self.ssmax = GrowingHeads("index_heads", config, dtype=dtype)

    def queries(self, x_BTQ: jax.Array, step: Step) -> jax.Array:
        return self.rotated(self.ssmax(self.q(self.q_norm(x_BTQ)), step), step)

    def rotated(self, x_BTnx: jax.Array, step: Step) -> jax.Array:
        return super().rotated(x_BTnx, step) if self.has_rope else x_BTnx


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention, x [B, T, D] to [B, T, D], with queries that grow with their position. Also returns the
    layer's caches, of latent vectors and of the indexer's keys, and what it hands on to later layers."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.of_layer(layer), dtype=dtype, keys=keys)
        self.rope, self.is_read = config.ropes[layer], layer in config.kv_producers
        self.has_latents = config.kv_sources[layer] == layer
        if self.rope is None:
            del self.q_rope
        if self.has_latents:
            self.kv_a_norm = RMSNorm("C", config.sizes, config.rms_norm_eps, dtype=dtype)
        else:
            del self.kv_a, self.kv_a_norm
        if self.rope is None or not self.has_latents:
            del self.k_rope
        self.ssmax = GrowingHeads("N", config, dtype=dtype)
        if layer in config.layer_sets["indexer_layers"]:
            self.indexer = GrowingIndexer(config, layer, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any) -> tuple[jax.Array, Any]:
        given: Given = step.input
        own, indexed = kv or (None, None)
        if self.rope is not None:
            step = step._replace(cos_sin=learned_cos_sin(self.rope, given.factors_BTX, step.pos_BT))
        if self.has_latents:
            own = self.appended(own, self.latents(x_BTD, step), step)
        latent: Any = own if self.has_latents else given.plain if self.rope is None else given.rotary
        if self.is_read:
            given = given._replace(plain=latent) if self.rope is None else given._replace(rotary=latent)
        if hasattr(self, "indexer"):
            indexed = self.appended(indexed, IndexKeys(self.indexer.key(x_BTD, step)), step)
            selected_BTS = self.indexer(x_BTD, x_BTD, indexed, step, step.visible(window))
            given = given._replace(selected_BTS=selected_BTS)
        latent = latent.with_keys() if self.rope is None else latent
        return self.attend(x_BTD, x_BTD, latent, step, given.selected_BTS), ((own, indexed), given)

    def queries(self, x_BTQ: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNP = self.ssmax(self.q_nope(x_BTQ), step)
        if self.rope is None:
            return q_BTNP, q_BTNP[..., :0]
        return q_BTNP, self.ssmax(self._rotated(self.q_rope(x_BTQ), step), step)

    def latents(self, x_BTD: jax.Array, step: Step) -> Any:
        return PlainLatent(self.kv_a_norm(self.kv_a(x_BTD))) if self.rope is None else super().latents(x_BTD, step)


class Router(deepseek_v3.Router):
    """DeepSeek V3's router by probabilities, without corrections."""

    outside = 0.0

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        del self.correction

    def scores(self, x_BTD: jax.Array) -> jax.Array:
        return nnx.softmax(self.logits(x_BTD))

    def corrected(self, scores_BTE: jax.Array) -> jax.Array:
        return scores_BTE


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections. Returns beside the
    caches what it hands on to later layers."""

    moe_type = MoE

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return Attention(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        self.rotary = LearnedFrequencies(config)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("rotary",)

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty caches of a layer, of latent vectors and of the indexer's keys, None for one that it does
        not have; `shape` is [B, S]."""
        own: Any = None
        if layer in config.layer_sets["rotary_kv_layers"]:
            own = deepseek_v3.Latent.empty(config, layer, shape, dtype)
        elif layer in config.layer_sets["plain_kv_layers"]:
            own = PlainLatent.empty(config, shape, dtype)
        if layer not in config.layer_sets["indexer_layers"]:
            return own, None
        return own, IndexKeys.empty(config, shape, self.embed.embedding.dtype)

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Given]:
        """Returns the factors of the rotary frequencies for each layer."""
        return [Given(self.rotary(ids_BT))] * self.config.num_hidden_layers

    def source_of(self, layer: int) -> int | None:
        """Returns the last layer before this one that selected tokens, or made latent vectors that others read. It
        hands on what earlier ones did too."""
        return max((i for i in {*self.config.indexers, *self.config.kv_producers} if i < layer), default=None)

    def handed_on(self, result: Any) -> Given:
        """Returns the selected tokens and the latent vectors, without the layer's own caches."""
        given: Given = result[1]._replace(factors_BTX=None)
        return given

    def kept(self, layer: int, result: Any) -> Any:
        return result[0]

    def given(self, step: Step, handed: Given) -> tuple[Step, Any]:
        """Returns the step with what an earlier layer hands on."""
        return step._replace(input=handed._replace(factors_BTX=step.input.factors_BTX)), None

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Limits the logits [B, T, V] softly."""
        return soft_capped(logits_BTV, self.config.final_logit_softcapping)
