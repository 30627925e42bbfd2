"""Inkling 2 with looped layers. In each pass after the first, the looped layers begin with the same hidden states, and
read messages: mixtures of the outputs of blocks of the pass before."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, exact_product, normalize
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.common.steps import Step
from tpuconv.models.inkling2_loop_text.family import Config
from tpuconv.models.inkling2_text import modules as inkling2_text
from tpuconv.models.inkling2_text.modules import mixed_streams
from tpuconv.notation.letters import with_letters

LEGEND = {"m": "message_rank"}
"""The words of this module, by the letters of its einsums and arrays."""


class ExactEinsum(Einsum):
    """An einsum in float32."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return exact_product(self.equation, x, self.kernel[...])


class MessageGate(nnx.Module):
    """Mixes hidden states x with a message, each [B, T, D], to (1 - forget) x + gain message in float32. The gates
    are tanh of low rank, made of both after normalization."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.eps = config.rms_norm_eps
        self.from_hidden = Einsum("BTD,Dm->BTm", sizes, dtype=dtype, keys=keys)
        self.from_message = Einsum("BTD,Dm->BTm", sizes, dtype=dtype, keys=keys)
        self.forget = ExactEinsum("BTm,mD->BTD", sizes, dtype=dtype, keys=keys)
        self.gain = ExactEinsum("BTm,mD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, message_BTD: jax.Array, dtype: DTypeLike) -> jax.Array:
        first_BTD, second_BTD = (normalize(each, 1, self.eps).astype(dtype) for each in (x_BTD, message_BTD))
        gate_BTm = self.from_hidden(first_BTD) + self.from_message(second_BTD)
        forget_BTD, gain_BTD = jnp.tanh(self.forget(gate_BTm)), jnp.tanh(self.gain(gate_BTm))
        return (1 - forget_BTD) * x_BTD.astype(jnp.float32) + gain_BTD * message_BTD


class Block(inkling2_text.Block):
    """A layer of Inkling 2. In a looped one the inputs of queries, keys, values and experts are mixed with messages,
    `step.input`, in the passes after the first."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        if layer in config.looped:
            self.q_message_gate = MessageGate(config, dtype=dtype, keys=keys)
            self.k_message_gate = MessageGate(config, dtype=dtype, keys=keys)
            self.v_message_gate = MessageGate(config, dtype=dtype, keys=keys)
            self.mlp_message_gate = MessageGate(config, dtype=dtype, keys=keys)

    def mixtures(self, x_BTD: jax.Array, blocks_BTrD: jax.Array, step: Step) -> list[jax.Array]:
        mixtures = super().mixtures(x_BTD, blocks_BTrD, step)
        if step.input is None:
            return mixtures
        gates = (self.q_message_gate, self.k_message_gate, self.v_message_gate)
        pairs = zip(gates, mixtures, step.input[:3], strict=True)
        return [gate(each, message_BTD, x_BTD.dtype) for gate, each, message_BTD in pairs]

    def fed_by(self, blocks_BTrD: jax.Array, x_BTD: jax.Array, step: Step) -> jax.Array:
        y_BTD = super().fed_by(blocks_BTrD, x_BTD, step)
        return y_BTD if step.input is None else self.mlp_message_gate(y_BTD, step.input[3], blocks_BTrD.dtype)


class Messages(nnx.Module):
    """Attention of each token to the outputs of the looped blocks of a pass and to its last hidden states,
    [B, T, r, D] to the four messages of a looped layer, [4, B, T, D] in float32."""

    def __init__(self, config: Any):
        shape = (config.sizes["looped_count"], config.sizes["D"])
        self.q_query = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.k_query = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.v_query = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.mlp_query = nnx.Param(jnp.zeros(shape, jnp.float32))

    def __call__(self, x_BTrD: jax.Array, place: int) -> jax.Array:
        queries = (self.q_query, self.k_query, self.v_query, self.mlp_query)
        return mixed_streams(x_BTrD, jnp.stack([query[...][place] for query in queries]))


class Model(inkling2_text.Model, LoopedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    config: Config

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, **options: Any):
        super().__init__(config, dtype=dtype, **options)
        self.messages = Messages(config)

    def entering(self, execution: int, x_BTD: jax.Array, kept: dict[str, jax.Array]) -> jax.Array:
        """As `LoopedDecoder.entering`. Each pass begins with the input of the first."""
        run, place = self.pass_of(execution)
        if place or run is None:
            return x_BTD
        kept["last"] = x_BTD
        return kept.setdefault("first", x_BTD)

    def given_to(self, execution: int, step: Step, kept: dict[str, jax.Array]) -> Step:
        """As `LoopedDecoder.given_to`, with the messages of the pass before."""
        run, place = self.pass_of(execution)
        if not run:
            return step
        last_BTD, size = kept["last"], self.config.n_layers_per_attn_res_block
        last_BTrD = last_BTD.reshape(*last_BTD.shape[:2], -1, self.config.sizes["D"])
        first, end = self.config.looped.start // size + 2, self.config.looped.stop // size + 1
        x_BTrD = jnp.concatenate([last_BTrD[:, :, first:end], last_BTrD[:, :, :1]], axis=2)
        return step._replace(input=self.messages(x_BTrD, place))

    def pass_of(self, execution: int) -> tuple[int | None, int]:
        """Returns the pass of an execution, None outside of the loop, and its place in the pass."""
        looped = self.config.looped
        run, place = divmod(execution - looped.start, len(looped))
        return (run if 0 <= run < self.config.loop_num_passes else None), place
