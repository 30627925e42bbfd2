"""Lightning attention (arXiv:2401.04658): linear attention with a fixed decay for each head. A layer's cache is a state
whose size does not depend on the number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.mamba2 import state_space
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder, LayerState
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"n": "groups", "k": "key_dim", "w": "value_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LightningState(LayerState):
    """The cache of a layer: the state of each head."""

    axes: ClassVar[tuple[str, ...]] = ("B groups key_dim value_dim",)

    s_Bnkw: jax.Array


class LightningAttention(nnx.Module):
    """Linear attention with a fixed decay for each head, x [B, T, D] to [B, T, D]. Also returns the state after these
    tokens. The output is normalized and gated. It is the recurrence of Mamba-2 (arXiv:2405.21060) with the same time
    step for all tokens.

    Attributes:
        rates: returns by how much the logarithm of the state of each head [n] decays with each token, from the config
            and the number of the layer.
    """

    rates: ClassVar[Callable[[Any, int], np.ndarray]]

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.config, self.layer = config, layer
        self.q = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)
        self.norm = self.new_norm(sizes, dtype=dtype)
        self.gate = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTnw,nwD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: LightningState | None
    ) -> tuple[jax.Array, LightningState]:
        state = LightningState.empty(self.config, len(x_BTD)) if state is None else state
        is_real_BT11 = (step.pos_BT >= 0)[..., None, None]
        q_BTnk, k_BTnk, v_BTnw = (y.astype(jnp.float32) for y in self.heads(x_BTD, step))
        # A token with k = 0 and g = 0, which is padding, leaves the state as it is.
        k_BTnk = jnp.where(is_real_BT11, k_BTnk, 0)
        g_BTn1 = jnp.where(is_real_BT11, -type(self).rates(self.config, self.layer)[:, None], 0)
        # The axis r of values that share a key has one element.
        y_BTn1w, s_Bn1kw = state_space(q_BTnk, k_BTnk, v_BTnw[:, :, :, None], g_BTn1, state.s_Bnkw[:, :, None])
        y_BTnw = self.norm(y_BTn1w[:, :, :, 0].astype(x_BTD.dtype))
        y_BTD = self.o(nnx.sigmoid(self.gate(x_BTD)) * y_BTnw)
        return y_BTD, LightningState(s_Bn1kw[:, :, 0])

    def new_norm(self, sizes: Any, *, dtype: DTypeLike) -> Any:
        """Returns the norm of the output [B, T, n, w]."""
        raise NotImplementedError

    def heads(self, x_BTD: jax.Array, step: Step) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries and keys [B, T, n, k], and values [B, T, n, w]."""
        raise NotImplementedError


class LightningBlock(HybridBlock):
    """One layer: lightning or softmax attention, then experts or an MLP. Each layer has decays of its own."""

    def new_mixer(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return self.mixer_type(config, layer, dtype=dtype, keys=keys)


class LightningDecoder(HybridDecoder):
    """A decoder with lightning attention in `state_layers`."""

    state_type: ClassVar[Any] = LightningState
