"""LoRA of experts by Qwix (`qwix.apply_lora_to_model`), whose provider does not see the grouped products of experts.

Qwix makes the pair of a kernel [E, D, M] at a product over all experts, of no rows: `kernel_lora_a` [E, D, r] and
`kernel_lora_b` [E, r, M], under the rule and with the initializers of the user. The change of the rows is computed
here, by the same grouped products as the rows.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig

A, B = "kernel_lora_a", "kernel_lora_b"
GroupedProduct = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps rows [R, D] and matrices [E, D, M] to the rows [R, M], each by the matrix of its expert."""


def make_pair(kernel_EDM: jax.Array) -> None:
    """Lets Qwix make the pair of a module's kernel, if a rule is for it, and it has none. Qwix takes the `self` of the
    caller for the module."""
    no_rows = jnp.zeros((kernel_EDM.shape[0], 0, kernel_EDM.shape[1]), kernel_EDM.dtype)
    jax.lax.dot_general(no_rows, kernel_EDM, (((2,), (1,)), ((0,), (0,))))


def change_of(module: nnx.Module, x: jax.Array, provider: Any, product: GroupedProduct) -> jax.Array | None:
    """Returns the change of the rows `x` [R, D] by the pair of the module's kernel: [R, M]; None if it has none.

    Raises:
        UnsupportedConfig: the rule has dropout.
    """
    rule = provider._get_current_rule_and_op_id("dot_general", repeated_call=True)[0]
    if not hasattr(module, A) or rule is None:
        return None
    if rule.dropout:
        raise UnsupportedConfig(
            f"LoRA with dropout={rule.dropout} is not implemented for experts",
            hint="give them a rule without dropout: qwix.LoraProvider takes several rules",
        )
    a_EDr, b_ErM = (getattr(module, name)[...] for name in (A, B))
    change: jax.Array = product(product(x, a_EDr), b_ErM) * (rule.alpha / rule.rank)
    return change


def dequantized(kernel: Any, dtype: DTypeLike) -> jax.Array:
    """Returns the values [E, D, M] of a kernel, which Qwix may have quantized (QLoRA, arXiv:2305.14314)."""
    from tpuconv.private import flax_util, ptq, qarray

    if not isinstance(kernel, ptq.WithAux):
        values: jax.Array = kernel[...]
        return values
    decoded: jax.Array = qarray.dequantize(flax_util.unbox(kernel.array))
    return decoded.astype(dtype)


@contextmanager
def without_interception() -> Iterator[None]:
    """Products are not intercepted: within a kernel Qwix would take them for products with a parameter."""
    from tpuconv.private import interception

    manager = interception.interception_manager
    disabled = manager.disable_interception()
    try:
        yield
    finally:
        manager.enable_interception(disabled)


def find_provider() -> Any:
    """Returns Qwix's provider of LoRA, if it intercepts products of this thread, else None."""
    if "qwix" not in sys.modules:
        return None
    from qwix import LoraProvider

    from tpuconv.private import interception

    manager, thread = interception.interception_manager, threading.get_ident()
    owners = (
        getattr(function, "__self__", None)
        for interceptor in manager._interceptors
        if manager._intercepted_threads.get((thread, interceptor.id))
        for function in interceptor.values()
    )
    return next((owner for owner in owners if isinstance(owner, LoraProvider)), None)
