"""DiffusionGemma: Gemma 4's layers as encoder and as decoder."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import TanhMLP
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.layers import Keys, ScaledRMSNorm, normalize
from tpuconv.models.common.steps import CANVAS, ImageBlocks, Step, Steps
from tpuconv.models.diffusion_gemma.family import Config
from tpuconv.models.gemma4_text import modules as gemma4


class Block(gemma4.Block):
    """One layer. The encoder multiplies its output by `layer_scalar`, the decoder by `canvas_scalar`."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.canvas_scalar = nnx.Param(jnp.ones(1, jnp.float32))

    def factor(self, step: Step) -> nnx.Param[jax.Array]:
        return self.canvas_scalar if step.of_canvas else self.layer_scalar


class SelfConditioning(nnx.Module):
    """Adds to the embeddings of a canvas what an MLP makes of the mean embeddings by the logits of the step before:
    [B, C, D] and [B, C, D] to [B, C, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.eps = config.rms_norm_eps
        self.norm = ScaledRMSNorm("D", config.sizes, self.eps, dtype=dtype)
        self.mlp = TanhMLP(config, "F", dtype=dtype, keys=keys)

    def __call__(self, x_BCD: jax.Array, mean_BCD: jax.Array) -> jax.Array:
        y_BCD = x_BCD + self.mlp(self.norm(mean_BCD))
        return normalize(y_BCD, 1, self.eps).astype(y_BCD.dtype)


class Model(gemma4.Model):
    """The encoder: token ids [B, T] to logits [B, T, V]; and with `denoise` the decoder."""

    block: ClassVar[Any] = Block
    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        self.self_conditioning = SelfConditioning(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(2)).params()))

    def denoise(self, ids_BC: jax.Array, cache: Cache, mean_BCD: jax.Array) -> tuple[jax.Array, Cache]:
        """Runs the decoder on a canvas. Its tokens see each other and the text in the cache: in a layer with a window
        all of them see the same tokens, those that the first one sees.

        Args:
            ids_BC: the tokens of the canvas.
            cache: of the text before it, with as many free slots, in which keys and values of the canvas are written.
            mean_BCD: the mean embeddings by the logits of the step before; zeros in the first step.

        Returns:
            Logits [B, C, V] in float32, and the cache of the same text.
        """
        first_B1 = cache.positions_BS.max(axis=1, keepdims=True) + 1
        pos_BC = first_B1 + jnp.arange(ids_BC.shape[1])
        taken = cache.take(pos_BC, ids_BC)
        is_canvas_BS = taken.positions_BS >= first_B1
        canvas = ImageBlocks(jnp.zeros_like(ids_BC), jnp.where(is_canvas_BS, 0, -1), CANVAS)
        first_BC = jnp.broadcast_to(first_B1, pos_BC.shape)
        steps = Steps.of(self.config, pos_BC, taken.positions_BS, cache.used)
        steps = replace(steps, kinds=[each._replace(pos_BT=first_BC, images=canvas) for each in steps.kinds])
        x_BCD = self.self_conditioning(self.scaled(self.embed(ids_BC)), mean_BCD)
        x_BCD, layers = self._run(x_BCD, steps, cache.layers)
        return self._logits(x_BCD), replace(cache, layers=layers)

    def mean_embeddings(self, logits_BCV: jax.Array) -> jax.Array:
        """Returns the mean embeddings [B, C, D] of tokens with these logits, which have their temperature."""
        embedding_VD = self.embed.embedding[...]
        rounded_BCV = logits_BCV.astype(embedding_VD.dtype).astype(jnp.float32)
        probs_BCV = jax.nn.softmax(rounded_BCV, axis=-1).astype(embedding_VD.dtype)
        return self.scaled(jnp.einsum("BCV,VD->BCD", probs_BCV, embedding_VD))
