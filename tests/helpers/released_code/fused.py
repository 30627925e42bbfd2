"""Attention of transformers with queries, keys and values in one matrix."""

from typing import Any

from torch import Tensor, nn


class FusedProjections:
    """Stands before a class of attention with three matrices, of which `fuse` makes one."""

    fused: str
    """The name of the matrix."""

    def fuse(self, config: Any, bias: bool = False) -> None:
        width = config.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        for name in ("q_proj", "k_proj", "v_proj"):
            delattr(self, name)
        self.widths = [queries, keys, keys]
        setattr(self, self.fused, nn.Linear(config.hidden_size, queries + 2 * keys, bias=bias))

    def q_proj(self, x: Tensor) -> Tensor:
        return self._part(x, 0)

    def k_proj(self, x: Tensor) -> Tensor:
        return self._part(x, 1)

    def v_proj(self, x: Tensor) -> Tensor:
        return self._part(x, 2)

    def _part(self, x: Tensor, number: int) -> Tensor:
        return getattr(self, self.fused)(x).split(self.widths, -1)[number]
