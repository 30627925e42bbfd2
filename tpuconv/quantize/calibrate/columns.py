"""The inputs of layers besides hidden states, as further columns of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.models.common.seen import Seen
from tpuconv.models.common.steps import Step


@dataclass(frozen=True)
class Columns:
    """The columns of states that hold a tree of arrays.

    Attributes:
        start: the first column.
        leaves: shape [1, T, ...] and dtype of each array.
        form: of the tree.
    """

    start: int
    leaves: tuple[tuple[tuple[int, ...], Any], ...]
    form: Any

    @property
    def stop(self) -> int:
        """The column after the last one."""
        return self.start + sum(prod(shape[2:]) for shape, _ in self.leaves)

    def read(self, states_TW: np.ndarray | jax.Array) -> Any:
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

    def replaced(self, states_TW: jax.Array, tree: Any) -> jax.Array:
        """Returns the states with another tree."""
        leaves = [leaf.astype(jnp.float32).reshape(len(states_TW), -1) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate([states_TW[:, : self.start], *leaves, states_TW[:, self.stop :]], axis=1)

    @classmethod
    def of(cls, start: int, shapes: Any) -> Self:
        """Returns columns for a tree of arrays [1, T, ...]."""
        leaves, form = jax.tree.flatten(shapes)
        return cls(start, tuple((leaf.shape, leaf.dtype) for leaf in leaves), form)


@dataclass(frozen=True)
class LayerColumns:
    """The columns that a layer reads and changes.

    Attributes:
        hidden: the number of the first ones, which are hidden states.
        input: its inputs besides hidden states; None without any.
        given: what an earlier layer handed on to it; None without any.
        handed: what it hands on; None without any.
        deep: what images add to its output; None without any.
    """

    hidden: int
    input: Columns | None = None
    given: Columns | None = None
    handed: Columns | None = None
    deep: Columns | None = None

    def read(self, model: Any, states_TW: np.ndarray | jax.Array, step: Step) -> tuple[jax.Array, Step, Any]:
        """Returns the hidden states [1, T, D], the step and the cache of the layer."""
        kv = None
        if self.input is not None:
            step = step._replace(input=self.input.read(states_TW))
        if self.given is not None:
            step, kv = model.given(step, self.given.read(states_TW))
        return jnp.asarray(states_TW[:, : self.hidden])[None], step, kv

    def replaced(self, model: Any, states_TW: jax.Array, y_BTD: jax.Array, result: Any) -> jax.Array:
        """Returns the states after the layer, of its output and its cache."""
        if self.deep is not None:
            y_BTD = y_BTD + self.deep.read(states_TW)
        states_TW = jnp.concatenate([y_BTD[0], states_TW[:, self.hidden :]], axis=1)
        if self.handed is None:
            return states_TW
        return self.handed.replaced(states_TW, model.by_token(model.handed_on(result)))


class _Places(NamedTuple):
    """The places of images in a text, by token: `block_BT` of `Seen`, and `at_ABT` with its first axis last."""

    block_BT: Any
    at_BTA: Any


@dataclass(frozen=True)
class SeenColumns:
    """The columns of what images and sounds change in layers.

    Attributes:
        places: which tokens see each other, and rotary positions.
        deep: what is added to the output of each of the first layers.
    """

    places: Columns
    deep: Sequence[Columns]

    @classmethod
    def of(cls, start: int, form: Seen) -> Self:
        """Returns columns for samples whose abstract images have this form."""
        places, deep = jax.eval_shape(_by_token, form)
        columns = [Columns.of(start, places)]
        for each in deep:
            columns.append(Columns.of(columns[-1].stop, each))
        return cls(columns[0], columns[1:])

    @property
    def stop(self) -> int:
        """The column after the last one."""
        return (self.places, *self.deep)[-1].stop

    def write(self, states_TW: np.ndarray, seen: Seen | None) -> None:
        """Sets the columns, which are 0, for images; None of a text."""
        places, deep = (self._of_text(len(states_TW)), ()) if seen is None else _by_token(seen)
        self.places.write(states_TW, places)
        for columns, each in zip(self.deep, deep, strict=False):
            columns.write(states_TW, each)

    def _of_text(self, length: int) -> _Places:
        shapes: _Places = jax.tree.unflatten(self.places.form, [shape for shape, _ in self.places.leaves])
        at_BTA = shapes.at_BTA and jnp.broadcast_to(jnp.arange(length)[:, None], (1, length, shapes.at_BTA[-1]))
        return _Places(shapes.block_BT and jnp.full((1, length), -1), at_BTA)

    def read(self, states_TW: np.ndarray) -> Seen:
        """Returns the places of images."""
        found: _Places = self.places.read(states_TW)
        at_ABT = None if found.at_BTA is None else jnp.moveaxis(found.at_BTA, -1, 0)
        return Seen(jnp.zeros((1, 1)), jnp.zeros((1, len(states_TW)), jnp.int32), found.block_BT, at_ABT)


def _by_token(seen: Seen) -> tuple[_Places, list[jax.Array]]:
    """Returns the places of images, and what is added to each layer's output [1, T, D]."""
    at_BTA = None if seen.at_ABT is None else jnp.moveaxis(seen.at_ABT, 0, -1)
    nothing_BTD = jnp.zeros((*seen.slot_BT.shape, seen.features_XD.shape[-1]), jnp.float32)
    return _Places(seen.block_BT, at_BTA), [seen.deepened(nothing_BTD, layer) for layer in range(len(seen.deep))]
