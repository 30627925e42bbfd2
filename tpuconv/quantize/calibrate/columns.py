"""The inputs of layers besides hidden states, as further columns of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.models.common.seen import Seen


@dataclass(frozen=True)
class Columns:
    """The columns of states that hold a tree of arrays.

    Attributes:
        start: the first column.
        leaves: shape [1, T, ...] and dtype of each array.
        form: of the tree.
    """

    start: int
    leaves: Sequence[tuple[tuple[int, ...], Any]]
    form: Any

    @property
    def stop(self) -> int:
        """The column after the last one."""
        return self.start + sum(prod(shape[2:]) for shape, _ in self.leaves)

    def read(self, states_TW: np.ndarray) -> Any:
        """Returns the tree."""
        out, start = [], self.start
        for shape, dtype in self.leaves:
            stop = start + prod(shape[2:])
            out.append(jnp.asarray(states_TW[:, start:stop].reshape(shape)).astype(dtype))
            start = stop
        return jax.tree.unflatten(self.form, out)

    def write(self, states_TW: np.ndarray, tree: Any) -> None:
        """Replaces the tree."""
        start = self.start
        for leaf in jax.tree.leaves(tree):
            stop = start + prod(leaf.shape[2:])
            states_TW[:, start:stop] = np.asarray(leaf, np.float32).reshape(len(states_TW), -1)
            start = stop

    @classmethod
    def of(cls, start: int, shapes: Any) -> Self:
        """Returns columns for a tree of arrays [1, T, ...]."""
        leaves, form = jax.tree.flatten(shapes)
        return cls(start, [(leaf.shape, leaf.dtype) for leaf in leaves], form)


class SeenColumns(Columns):
    """Columns of what images and sounds change in layers: which tokens see each other, rotary positions, and what is
    added to the outputs of the first layers."""

    @classmethod
    def of_seen(cls, start: int, form: Seen) -> Self:
        """Returns columns for samples whose abstract images have this form."""
        return cls.of(start, jax.eval_shape(_by_token, form))

    def write_seen(self, states_TW: np.ndarray, seen: Seen | None) -> None:
        """Replaces the images; None of a text."""
        self.write(states_TW, self._of_text(len(states_TW)) if seen is None else _by_token(seen))

    def _of_text(self, length: int) -> "_ByToken":
        shapes: _ByToken = jax.tree.unflatten(self.form, [shape for shape, _ in self.leaves])
        at_BT3 = jnp.broadcast_to(jnp.arange(length)[:, None], (1, length, 3))
        return _ByToken(
            shapes.block_BT and jnp.full((1, length), -1),
            shapes.at_BT3 and at_BT3,
            tuple(jnp.zeros(shape) for shape in shapes.deep),
        )

    def read_seen(self, states_TW: np.ndarray) -> Seen:
        """Returns the images, with a row of `deep` for each token."""
        found: _ByToken = self.read(states_TW)
        at_3BT = None if found.at_BT3 is None else jnp.moveaxis(found.at_BT3, -1, 0)
        slot_BT = jnp.arange(len(states_TW))[None]
        deep = tuple(each_BTD[0] for each_BTD in found.deep)
        return Seen(jnp.zeros((1, 1)), slot_BT, found.block_BT, at_3BT, deep=deep)


class _ByToken(NamedTuple):
    """The fields of `Seen` that layers use, by token."""

    block_BT: Any
    at_BT3: Any
    deep: tuple[Any, ...]


def _by_token(seen: Seen) -> _ByToken:
    at_BT3 = None if seen.at_3BT is None else jnp.moveaxis(seen.at_3BT, 0, -1)
    is_feature_BT1 = seen.slot_BT[..., None] >= 0
    deep = tuple(jnp.where(is_feature_BT1, each_XD[seen.slot_BT], 0).astype(jnp.float32) for each_XD in seen.deep)
    return _ByToken(seen.block_BT, at_BT3, deep)
