"""Shows the inputs of products with kernels to a function that records them, as the calibration of a quantization
does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from flax import nnx

Observer = Callable[[nnx.Module, str, jax.Array, jax.Array | None], None]
"""Gets the module of a kernel, the equation of the product, its first operand, and, if the rows of that are sorted by
expert, how many rows each expert has. Within `jax.jit` the arrays are traced."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Calls `observer` with each product of the models that run in the context, before it is computed."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observed(module: nnx.Module, equation: str, x: jax.Array, counts_E: jax.Array | None = None) -> None:
    """Shows a product to the observer, if there is one."""
    if (observer := _observer.get()) is not None:
        observer(module, equation, x, counts_E)
