"""Mixture of experts: each token uses a few of many MLPs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tpuconv.models.common import lora
from tpuconv.models.common.blocks import GatedMLP
from tpuconv.models.common.layers import Keys, normal
from tpuconv.models.common.observe import observed
from tpuconv.models.common.placement import automatic_mesh
from tpuconv.models.kernels.grouped import grouped_matmul
from tpuconv.notation.pairs import RANK
from tpuconv.notation.sharding import ACTIVATIONS, MESH_AXES, AxisSharding, Rules, partition

GATHER_LIMIT = 0.5
"""Up to this ratio of rows to experts, the matrix of each row's expert is gathered, and no other expert is read. With
more rows a grouped product reads each expert once (benchmarks/moe.py). Not used on TPU, which has a kernel for both."""


class Rows(NamedTuple):
    """Tokens sorted by expert, for a grouped product: the rows of each expert are adjacent. A token has X rows, one for
    each of its experts.

    Attributes:
        x: rows [B T X, D].
        order: index of each row before sorting, in the flattened [B, T, X].
        expert: expert of each row, ascending.
        counts_E: number of rows of each expert.
        experts: number of experts of the layer, those on other chips included.
    """

    x: jax.Array
    order: jax.Array
    expert: jax.Array
    counts_E: jax.Array
    experts: int

    @classmethod
    def of(cls, x_BTD: jax.Array, ids_BTX: jax.Array, here: int, experts: int) -> "Rows":
        """Returns the rows of tokens for the X experts `ids_BTX` of each token. This chip has the first `here` experts;
        larger ids stand for experts of other chips."""
        ids = ids_BTX.reshape(-1)
        order = jnp.argsort(ids)
        tokens = x_BTD.reshape(-1, x_BTD.shape[-1])
        counts_E = jnp.bincount(ids, length=here).astype(jnp.int32)
        return cls(tokens[order // ids_BTX.shape[-1]], order, ids[order], counts_E, experts)

    def summed(self, y: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        """Returns the weighted sums [B, T, D] of each token's rows `y`. They are added in float32, then rounded."""
        y_BTXD = jnp.zeros_like(y).at[self.order].set(y, unique_indices=True).reshape(*weights_BTX.shape, -1)
        weighted = y_BTXD.astype(jnp.float32) * weights_BTX.astype(jnp.float32)[..., None]
        return weighted.sum(axis=-2).astype(y.dtype)


class Expert(nnx.Module):
    """One matrix of each expert. `Expert("EDM", sizes)` has a kernel [E, D, M] and a bias [E, M]: it maps rows [R, D]
    to rows [R, M]."""

    def __init__(self, letters: str, sizes: Mapping[str, int], *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        self.letters = letters
        shape = tuple(sizes[letter] for letter in letters)
        self.kernel = nnx.Param(normal(keys(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype)) if bias else None

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Returns the product of each row of `x` with the matrix of its expert, plus the bias, in the dtype of `x`."""
        E, D, M = tuple(self.letters)
        observed(self, f"R{D},{E}{D}{M}->R{M}", x, rows.counts_E)
        kernel_EDM = self.kernel[...]
        provider = lora.find_provider()
        y = _product(x, kernel_EDM, rows) if provider is None else self._with_lora(provider, x, rows)
        return y if self.bias is None else y + self.bias[...][rows.expert]

    def make_lora(self) -> None:
        """Lets Qwix make the pair of LoRA of the kernel, if it has none and a rule is for it."""
        lora.make_pair(self.kernel[...])

    def _with_lora(self, provider: Any, x: jax.Array, rows: Rows) -> jax.Array:
        self.make_lora()
        with lora.without_interception():
            y = _product(x, lora.dequantized(self.kernel, x.dtype), rows)
            change = lora.change_of(self, x, provider, lambda x, matrices: _product(x, matrices, rows))
        return y if change is None else y + change


def _product(x: jax.Array, kernel_EDM: jax.Array, rows: Rows) -> jax.Array:
    """Each row of `x` [R, D] times the matrix of its expert: [R, M]."""
    # On a mesh there are rows of other chips' experts. Only the grouped product skips them.
    gathers = jax.default_backend() != "tpu" and jax.sharding.get_abstract_mesh().empty
    if gathers and len(x) <= GATHER_LIMIT * kernel_EDM.shape[0]:
        return jnp.einsum("RD,RDM->RM", x, kernel_EDM[rows.expert])
    return grouped_matmul(x, kernel_EDM, rows.counts_E, groups=rows.experts).astype(x.dtype)


class GatedExperts(nnx.Module):
    """Experts that are gated MLPs (arXiv:2002.05202), x [B, T, D] to [B, T, D]. The result is the sum of the outputs of
    each token's X experts `ids_BTX`, weighted by `weights_BTX`, each after `norm` if there is one."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        act: Callable[[jax.Array], jax.Array] = nnx.silu,
        *,
        bias: bool = False,
        dtype: DTypeLike,
        keys: Keys,
    ):
        self.act = act
        self.gate = Expert("EDM", sizes, bias=bias, dtype=dtype, keys=keys)
        self.up = Expert("EDM", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Expert("EMD", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(
        self,
        x_BTD: jax.Array,
        ids_BTX: jax.Array,
        weights_BTX: jax.Array,
        norm: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        hidden = self.hidden

        def feed(gate: Expert, up: Expert, down: Expert, rows: Rows) -> jax.Array:
            return down(hidden(gate(rows.x, rows), up(rows.x, rows)), rows)

        return routed(feed, (self.gate, self.up, self.down), x_BTD, ids_BTX, weights_BTX, norm)

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns the hidden states [R, M] of rows, from their products with both matrices."""
        return self.act(gate) * up


class RoutedExperts(GatedExperts):
    """The experts that a router chooses, and the shared experts, if the config has any, x [B, T, D] to [B, T, D].

    Attributes:
        router_type: the class of the router: x [B, T, D] to ids and weights [B, T, X].
        shared_type: the class of the shared experts, an MLP of width W.
    """

    router_type: ClassVar[Callable[..., Any]]
    shared_type: ClassVar[Callable[..., Any]] = GatedMLP

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.router = self.router_type(config, dtype=dtype, keys=keys)
        has_shared = getattr(config, "has_shared_experts", False)
        self.shared: Any = self.shared_type(config, "W", dtype=dtype, keys=keys) if has_shared else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        y_BTD = self.chosen(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    def chosen(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the output [B, T, D] of the experts that the router chooses."""
        return super().__call__(x_BTD, *self.router(x_BTD))


EXPERT_RULES: Rules = {letter: names for letter, names in MESH_AXES.items() if letter != "D"}
"""The sharding of experts for their products: not over the model width, which is gathered first."""


def routed(
    feed: Callable[..., jax.Array],
    experts: Sequence[Expert],
    x_BTD: jax.Array,
    ids_BTX: jax.Array,
    weights_BTX: jax.Array,
    norm: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Returns the weighted sum [B, T, D] of the outputs of each token's experts.

    On a mesh each chip computes the rows of its own experts with its shard of their width, and one all-reduce adds the
    results. Without `shard_map` the compiler would gather all experts on each chip.

    Args:
        feed: computes the outputs of rows: `feed(*experts, rows)`.
        experts: the matrices of the experts.
        x_BTD: tokens.
        ids_BTX: the X experts of each token.
        weights_BTX: their weights.
        norm: what is applied to the output of each expert before the sum. Not linear, so that on a mesh it needs the
            output of all chips that have a part of the width.
    """
    E = experts[0].kernel.shape[0]
    mesh = automatic_mesh()
    if mesh is None:
        rows = Rows.of(x_BTD, ids_BTX, E, E)
        y = feed(*experts, rows)
        return rows.summed(y if norm is None else norm(y), weights_BTX)

    if lora.find_provider() is not None:
        for expert in experts:  # in the `shard_map` no parameter can be made
            expert.make_lora()
    sizes = dict(mesh.shape)
    graphs, states = zip(*map(nnx.split, experts), strict=True)
    kernel_EDM = _shape("EDM", experts)
    # Tiles of M have fewer scales than M is long: what does not divide them would cut through a tile. Outputs of the
    # width M are not sums over it, so that each chip needs all of it.
    sums = any(expert.letters == "EMD" for expert in experts)
    width = min(n for pair in zip(experts, states, strict=True) for n in _widths(*pair)) if sums else 1
    parts = partition("E D M", (*kernel_EDM[:2], width), sizes, EXPERT_RULES)
    by_expert, by_width = (_names(parts[at]) for at in (0, 2))
    specs = tuple(_spec(expert, state, sizes, parts[2]) for expert, state in zip(experts, states, strict=True))
    batch = PartitionSpec(partition("B", x_BTD.shape[:1], sizes, ACTIVATIONS)[0])  # type: ignore[no-untyped-call]

    def on_one_chip(states: Any, norm: Any, x_BTD: jax.Array, ids_BTX: jax.Array, weights_BTX: jax.Array) -> jax.Array:
        local: list[Expert] = [nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)]
        count = local[0].kernel.shape[0]
        ids_BTX = ids_BTX - (jax.lax.axis_index(by_expert) * count if by_expert else 0)
        is_mine_BTX = (ids_BTX >= 0) & (ids_BTX < count)
        ids_BTX = jnp.where(is_mine_BTX, ids_BTX, count)  # rows of other chips' experts come last, without a product
        rows = Rows.of(x_BTD, ids_BTX, count, E)
        for expert in local:
            if expert.bias is not None and expert.letters == "EMD" and by_width:  # added on one chip of the width only
                expert.bias[...] = jnp.where(jax.lax.axis_index(by_width) == 0, expert.bias[...], 0)
        y = jnp.where((rows.expert < count)[:, None], feed(*local, rows), 0)
        parts_of_sum = (*by_expert, *by_width)
        if norm is not None:
            y, parts_of_sum = norm(jax.lax.psum(y, by_width)), by_expert  # type: ignore[no-untyped-call]
        y_BTD: jax.Array = jax.lax.psum(rows.summed(y, weights_BTX), parts_of_sum)  # type: ignore[no-untyped-call]
        return y_BTD

    in_specs = (specs, PartitionSpec(), batch, batch, batch)  # type: ignore[no-untyped-call]
    sharded = jax.shard_map(on_one_chip, in_specs=in_specs, out_specs=batch, check_vma=False)
    return sharded(states, norm, x_BTD, ids_BTX, weights_BTX)


def _shape(letters: str, experts: Sequence[Expert]) -> tuple[int, ...]:
    return next(tuple(expert.kernel.shape) for expert in experts if expert.letters == letters)


def _letters(expert: Expert, path: Any, x: jax.Array) -> Sequence[str]:
    """Returns the axes of an array of an expert's state. Quantized values and scales have the axes of the kernel, and
    random numbers, which Qwix adds, have none."""
    if not x.ndim:
        return ()
    E, D, M = tuple(expert.letters)
    pairs = {lora.A: (E, D, RANK), lora.B: (E, RANK, M)}
    return pairs.get(path[0].key, (E, D, M) if x.ndim == 3 else (E, M))


def _widths(expert: Expert, state: Any) -> list[int]:
    """How long the axis M is in each array that has it. A scale of complete columns has it with one element."""
    arrays = jax.tree_util.tree_leaves_with_path(state)
    found = (dict(zip(_letters(expert, path, x), x.shape, strict=True)).get("M", 1) for path, x in arrays)
    return [n for n in found if n > 1]


def _spec(expert: Expert, state: Any, sizes: Mapping[str, int], width: AxisSharding) -> Any:
    """Returns the sharding of each array of an expert's state, over `width` where it has the axis M."""

    def spec(path: Any, x: jax.Array) -> PartitionSpec:
        letters = _letters(expert, path, x)
        parts = partition(" ".join(letters), x.shape, sizes, EXPERT_RULES)
        own = (
            (width if n > 1 else None) if letter == "M" else part
            for letter, n, part in zip(letters, x.shape, parts, strict=True)
        )
        return PartitionSpec(*own)  # type: ignore[no-untyped-call]

    return jax.tree_util.tree_map_with_path(spec, state)


def _names(part: AxisSharding) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part or ()
