"""Modules of IQuest Coder Loop, Nanbeige 4.2 and Ouro, whose layers run several times."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import Einsum, Keys, attention
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.common.steps import NO_WINDOW, Step
from tpuconv.notation.letters import with_letters


class GateOfHeads(nnx.Module):
    """A gate for each head, of its queries: [B, T, N, H] to [B, T, N, 1]."""

    def __init__(self, config: Any, *, dtype: DTypeLike):
        sizes = config.sizes
        self.query = nnx.Param(jnp.zeros((sizes["N"], sizes["H"]), dtype))
        self.bias = nnx.Param(jnp.zeros(sizes["N"], dtype))

    def __call__(self, q_BTNH: jax.Array) -> jax.Array:
        # Not an einsum: adapters would change its vectors, which are no linear layer of releases.
        products_BTNH = q_BTNH.astype(jnp.float32) * self.query[...].astype(jnp.float32)
        logits_BTN = products_BTNH.sum(axis=-1).astype(q_BTNH.dtype) + self.bias[...]
        return nnx.sigmoid(logits_BTN)[..., None]


class MixingAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. From
    the second run of a layer on, `step.input` are the keys and values of the first. Then the output is a mixture of
    attention to these and of attention to its own within a window."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys, **options: Any):
        super().__init__(config, dtype=dtype, keys=keys, **options)
        self.gate = GateOfHeads(config, dtype=dtype)
        self.window = config.loop_window_size

    def seen(self, step: Step, window: jax.Array | int) -> jax.Array:
        return step.visible(window if step.input is None else self.window)

    def attended(self, q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, step: Step) -> jax.Array:
        near_BTNH = super().attended(q_BTNH, kv, visible_BTS, step)
        if step.input is None:
            return near_BTNH
        gate_BTN1 = self.gate(q_BTNH)
        first_BTNH = attention(q_BTNH, step.input, step.visible(NO_WINDOW))
        return gate_BTN1 * first_BTNH + (1 - gate_BTN1) * near_BTNH


class LoopCoder(LoopedDecoder):
    """A decoder whose layers read, from their second run on, the keys and values of their first one."""

    def leaving(self, execution: int, kv: Any, kept: dict[str, Any]) -> None:
        if execution < self.config.num_hidden_layers:
            kept[f"layer {execution}"] = kv

    def given_to(self, execution: int, step: Step, kept: dict[str, Any]) -> Step:
        run, layer = divmod(execution, self.config.num_hidden_layers)
        return step._replace(input=kept[f"layer {layer}"]) if run else step


class NormedLoops(LoopedDecoder):
    """A decoder whose layers read, from their second run on, what the last norm made of the run before."""

    def entering(self, execution: int, x_BTD: jax.Array, kept: dict[str, Any]) -> jax.Array:
        begins_again = execution > 0 and execution % self.config.num_hidden_layers == 0
        return self.norm(x_BTD) if begins_again else x_BTD


class GatedLoops(NormedLoops):
    """The same with a gate, by which a token may leave before the last run; here none does."""

    def __init__(self, config: Any, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any):
        rngs = rngs or nnx.Rngs(0)
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        sizes, keys = with_letters(config.sizes, {"e": "exits"}), Keys(rngs.params())
        self.exit_gate = Einsum("BTD,De->BTe", sizes, bias=True, dtype=dtype, keys=keys)
