"""Mixture of experts: MLPs of which each token uses a few."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Keys, normal
from tpuconv.models.common.placement import automatic_mesh
from tpuconv.models.kernels.grouped import grouped_matmul
from tpuconv.sharding import ACTIVATIONS, MESH_AXES, AxisSharding, Rules, partition

GATHER_LIMIT = 0.5
"""Rows for each expert, up to which the weights of every row's expert are gathered: no other expert is read. Where rows
are many, experts are read once for all of theirs (benchmarks/moe.py). A TPU has a kernel for both."""


class Rows(NamedTuple):
    """Tokens sorted by expert: the rows of one expert follow each other, so that a grouped product computes what was
    asked for and no more. A token has as many rows as experts (X)."""

    x: jax.Array
    """[B T X, D]"""
    order: jax.Array
    """Of each row its place among all (b, t, x)."""
    expert: jax.Array
    """The expert of each row, ascending."""
    counts_E: jax.Array
    experts: int
    """Of the layer, other chips' too."""

    @classmethod
    def of(cls, x_BTD: jax.Array, ids_BTX: jax.Array, here: int, experts: int) -> "Rows":
        """`ids_BTX` are the experts of each token: those from `here` on are other chips'."""
        ids = ids_BTX.reshape(-1)
        order = jnp.argsort(ids)
        tokens = x_BTD.reshape(-1, x_BTD.shape[-1])
        counts_E = jnp.bincount(ids, length=here).astype(jnp.int32)
        return cls(tokens[order // ids_BTX.shape[-1]], order, ids[order], counts_E, experts)

    def summed(self, y: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        """The outputs `y` of all rows back at their tokens, weighted and added up [B, T, D]: in float32, then
        rounded."""
        y_BTXD = jnp.zeros_like(y).at[self.order].set(y, unique_indices=True).reshape(*weights_BTX.shape, -1)
        weighted = y_BTXD.astype(jnp.float32) * weights_BTX.astype(jnp.float32)[..., None]
        return weighted.sum(axis=-2).astype(y.dtype)


class Expert(nnx.Module):
    """One matrix of every expert: `Expert("EDM", sizes)` takes rows of D to rows of M. The bias is [E, M]."""

    def __init__(self, letters: str, sizes: Mapping[str, int], *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        self.letters = letters
        shape = tuple(sizes[letter] for letter in letters)
        self.kernel = nnx.Param(normal(keys(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype)) if bias else None

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        kernel_EDM = self.kernel[...]
        # On a mesh rows of other chips' experts are among these, which the grouped product alone skips.
        gathers = jax.default_backend() != "tpu" and jax.sharding.get_abstract_mesh().empty
        if gathers and len(x) <= GATHER_LIMIT * self.kernel.shape[0]:
            y = jnp.einsum("RD,RDM->RM", x, kernel_EDM[rows.expert])
        else:
            y = grouped_matmul(x, kernel_EDM, rows.counts_E, groups=rows.experts).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...][rows.expert]


class Experts(nnx.Module):
    """Gated MLPs (arXiv:2002.05202), x [B, T, D] to [B, T, D]. Each token uses the X experts `ids_BTX`; their outputs
    are added up, weighted by `weights_BTX`."""

    def __init__(
        self, sizes: Mapping[str, int], act: Callable[[jax.Array], jax.Array], *, dtype: DTypeLike, keys: Keys
    ):
        self.act = act
        self.gate = Expert("EDM", sizes, dtype=dtype, keys=keys)
        self.up = Expert("EDM", sizes, dtype=dtype, keys=keys)
        self.down = Expert("EMD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, ids_BTX: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        act = self.act

        def feed(gate: Expert, up: Expert, down: Expert, rows: Rows) -> jax.Array:
            return down(act(gate(rows.x, rows)) * up(rows.x, rows), rows)

        return routed(feed, (self.gate, self.up, self.down), x_BTD, ids_BTX, weights_BTX)


EXPERT_RULES: Rules = {letter: names for letter, names in MESH_AXES.items() if letter != "D"}
"""How experts are divided where they multiply: the model width is gathered first."""


def routed(
    feed: Callable[..., jax.Array],
    experts: Sequence[Expert],
    x_BTD: jax.Array,
    ids_BTX: jax.Array,
    weights_BTX: jax.Array,
) -> jax.Array:
    """The outputs [B, T, D] of the experts `ids_BTX` of each token, weighted and added up. `feed(*experts, rows)`
    multiplies rows with the matrices of their experts.

    On a mesh every chip takes its own experts' rows through its part of their width, and one all-reduce adds up: the
    compiler, left to itself, would gather all experts on every chip.
    """
    E = experts[0].kernel.shape[0]
    mesh = automatic_mesh()
    if mesh is None:
        rows = Rows.of(x_BTD, ids_BTX, E, E)
        return rows.summed(feed(*experts, rows), weights_BTX)

    sizes = dict(mesh.shape)
    graphs, states = zip(*map(nnx.split, experts), strict=True)
    specs = tuple(_spec(expert, state, sizes) for expert, state in zip(experts, states, strict=True))
    by_expert, by_width = (_names(partition("E D M", _shape("EDM", experts), sizes, EXPERT_RULES)[at]) for at in (0, 2))
    batch = PartitionSpec(partition("B", x_BTD.shape[:1], sizes, ACTIVATIONS)[0])  # type: ignore[no-untyped-call]

    def on_one_chip(states: Any, x_BTD: jax.Array, ids_BTX: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        own: list[Expert] = [nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)]
        count = own[0].kernel.shape[0]
        ids_BTX = ids_BTX - (jax.lax.axis_index(by_expert) * count if by_expert else 0)
        is_mine_BTX = (ids_BTX >= 0) & (ids_BTX < count)
        ids_BTX = jnp.where(is_mine_BTX, ids_BTX, count)  # those of others last, without a product
        rows = Rows.of(x_BTD, ids_BTX, count, E)
        for expert in own:
            if expert.bias is not None and expert.letters == "EMD" and by_width:  # once, not for each part of a width
                expert.bias[...] = jnp.where(jax.lax.axis_index(by_width) == 0, expert.bias[...], 0)
        y = jnp.where((rows.expert < count)[:, None], feed(*own, rows), 0)
        y_BTD: jax.Array = jax.lax.psum(rows.summed(y, weights_BTX), (*by_expert, *by_width))  # type: ignore[no-untyped-call]
        return y_BTD

    divided = jax.shard_map(on_one_chip, in_specs=(specs, batch, batch, batch), out_specs=batch, check_vma=False)
    return divided(states, x_BTD, ids_BTX, weights_BTX)


def _shape(letters: str, experts: Sequence[Expert]) -> tuple[int, ...]:
    return next(tuple(expert.kernel.shape) for expert in experts if expert.letters == letters)


def _spec(expert: Expert, state: Any, sizes: Mapping[str, int]) -> Any:
    """How each array of one matrix is divided; of a quantized one values and scales, of which each has all axes."""

    def one(x: jax.Array) -> PartitionSpec:
        letters = expert.letters if x.ndim == 3 else expert.letters[0] + expert.letters[2]
        return PartitionSpec(*partition(" ".join(letters), x.shape, sizes, EXPERT_RULES))  # type: ignore[no-untyped-call]

    return jax.tree.map(one, state)


def _names(part: AxisSharding) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part or ()
