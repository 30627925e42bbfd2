"""Experts: feed-forward networks of which each token goes through a few."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.layers import Keys, normal

FEW = 0.5
"""Rows for each expert, up to which the weights of every row's expert are gathered: no other expert is read. Where rows
are many, experts are read once for all of theirs (benchmarks/moe.py)."""


class Rows(NamedTuple):
    """Tokens sorted by expert: the rows of one expert follow each other, so that a grouped product (`ragged_dot`)
    computes what was asked for and no more. A token has as many rows as experts (X)."""

    x: jax.Array
    """[B T X, D]"""
    order: jax.Array
    """Of each row its place among all (b, t, x)."""
    expert: jax.Array
    """The expert of each row, ascending."""
    counts_E: jax.Array

    @classmethod
    def of(cls, x_BTD: jax.Array, ids_BTX: jax.Array, experts: int) -> "Rows":
        """`ids_BTX` are the experts of each token."""
        ids = ids_BTX.reshape(-1)
        order = jnp.argsort(ids)
        tokens = x_BTD.reshape(-1, x_BTD.shape[-1])
        counts_E = jnp.bincount(ids, length=experts).astype(jnp.int32)
        return cls(tokens[order // ids_BTX.shape[-1]], order, ids[order], counts_E)

    def summed(self, y: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        """The outputs `y` of all rows back at their tokens, weighted and added up [B, T, D]: in float32, then
        rounded."""
        y_BTXD = jnp.zeros_like(y).at[self.order].set(y, unique_indices=True).reshape(*weights_BTX.shape, -1)
        weighted = y_BTXD.astype(jnp.float32) * weights_BTX.astype(jnp.float32)[..., None]
        return weighted.sum(axis=-2).astype(y.dtype)


class Expert(nnx.Module):
    """One matrix of every expert: `Expert("EDM", sizes)` takes rows of D to rows of M. The bias is [E, M]."""

    def __init__(self, letters: str, sizes: Mapping[str, int], *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        shape = tuple(sizes[letter] for letter in letters)
        self.kernel = nnx.Param(normal(keys(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype)) if bias else None

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        kernel_EDM = self.kernel[...]
        if len(x) <= FEW * self.kernel.shape[0]:
            y = jnp.einsum("RD,RDM->RM", x, kernel_EDM[rows.expert])
        else:
            y = jax.lax.ragged_dot(x, kernel_EDM, rows.counts_E)
        return y if self.bias is None else y + self.bias[...][rows.expert]


class Experts(nnx.Module):
    """Gated feed-forward networks (arXiv:2002.05202), x [B, T, D] to [B, T, D]. Each token goes through the X experts
    of `ids_BTX`; what they make of it is added up with `weights_BTX`."""

    def __init__(
        self, sizes: Mapping[str, int], act: Callable[[jax.Array], jax.Array], *, dtype: DTypeLike, keys: Keys
    ):
        self.act = act
        self.gate = Expert("EDM", sizes, dtype=dtype, keys=keys)
        self.up = Expert("EDM", sizes, dtype=dtype, keys=keys)
        self.down = Expert("EMD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, ids_BTX: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        rows = Rows.of(x_BTD, ids_BTX, self.gate.kernel.shape[0])
        hidden = self.act(self.gate(rows.x, rows)) * self.up(rows.x, rows)
        return rows.summed(self.down(hidden, rows), weights_BTX)
