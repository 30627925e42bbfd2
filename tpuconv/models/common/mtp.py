"""Modules for multi-token prediction (MTP): from a token's hidden state and the embedding of the next token they
predict the token after it (arXiv:2412.19437, section 2.2)."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, RMSNorm
from tpuconv.models.common.steps import NO_WINDOW, Step


class JoinedInputs(nnx.Module):
    """The parts of a module besides its layer: norms, the products that join both inputs, and the norm before the head,
    which is the model's own. `window` is the window of the layer."""

    norm_type: ClassVar[Callable[..., Any]] = RMSNorm
    window: int = NO_WINDOW

    def add_parts(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        """Creates the parts."""
        self.add_joining(config, dtype=dtype, keys=keys)
        self.norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    def add_joining(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        """Creates the parts that join both inputs."""
        sizes, eps = config.sizes, config.rms_norm_eps
        self.embed_norm, self.hidden_norm = (self.norm_type("D", sizes, eps, dtype=dtype) for _ in range(2))
        self.from_embed = Einsum("BTA,AD->BTD", sizes, dtype=dtype, keys=keys)
        self.from_hidden = Einsum("BTA,AD->BTD", sizes, dtype=dtype, keys=keys)

    def joined_inputs(self, next_BTD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Returns the layer's input [B, T, D], made of the embeddings of the next tokens and of hidden states."""
        return self.from_embed(self.embed_norm(next_BTD)) + self.from_hidden(self.hidden_norm(x_BTD))


class MTPLayer(JoinedInputs):
    """A layer that has these parts beside its own, as in DeepSeek V3. A family's class derives from this one and from
    its `Block`."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)  # type: ignore[call-arg]  # of the family's `Block`
        self.add_parts(config, dtype=dtype, keys=keys)

    def predict(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        """Returns hidden states for the head [B, T, D] and the cache; see `MTPModule`."""
        block: Any = self
        y_BTD, kv = block(self.joined_inputs(next_BTD, x_BTD), step, self.window, kv)
        return self.norm(y_BTD), kv


FIRST = "0"
"""The name of the layer of a `JoinedLayer`."""


class JoinedLayer(JoinedInputs):
    """The module of a model that stores the joined inputs beside the layer, as Qwen3-Next does. See `MTPModule`.

    Attributes:
        block: creates the layer.
    """

    block: ClassVar[Callable[..., Any]]

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.add_parts(config, dtype=dtype, keys=keys)
        setattr(self, FIRST, self.block(config, config.num_hidden_layers, dtype=dtype, keys=keys))

    def __call__(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        y_BTD, kv = getattr(self, FIRST)(self.joined_inputs(next_BTD, x_BTD), step, self.window, kv)
        return self.norm(y_BTD), kv


class MTPModule(nnx.Module):
    """The module of a model whose further layers have numbers that follow the numbers of its own layers. Only the first
    one is used, which predicts the token after the next.

    Attributes:
        layer_type: creates the layer, an `MTPLayer`.
    """

    layer_type: ClassVar[Callable[..., Any]]

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.number = str(config.layer_sets["U"][0])  # the name of the attribute that has the layer
        setattr(self, self.number, self.layer_type(config, config.num_hidden_layers, dtype=dtype, keys=keys))

    def __call__(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        """Runs the module.

        Args:
            next_BTD: embeddings of the tokens after these.
            x_BTD: hidden states of these tokens, as the model's `mtp_inputs` returns them.
            step: positions of these tokens.
            kv: cache of the module's layer.

        Returns:
            Hidden states for the model's head [B, T, D], and the cache with these tokens.
        """
        y_BTD, kv = getattr(self, self.number).predict(next_BTD, x_BTD, step, kv)
        return y_BTD, kv


def mtp_module(layer: Any, joining: Any = MTPLayer) -> Any:
    """Returns the class of the module whose layer is of a class: an `MTPLayer`, or a layer of the model, to which the
    parts of `joining` are added."""
    made = layer if issubclass(layer, JoinedInputs) else type("MTPLayer", (joining, layer), {})
    return type("MTPModule", (MTPModule,), {"layer_type": made})
