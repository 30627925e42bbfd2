"""Our model of a checkpoint, of which one layer at a time is in memory."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import ReadArray, read_array
from tpuconv.models.logits import Window, features_in_order, padded_widths

if TYPE_CHECKING:
    from tpuconv.models.common.seen import Seen


def _padded(x_TD: np.ndarray, like: Any) -> Any:
    """Our hidden states [1, T, D], as many as `like` has, with these first."""
    import jax.numpy as jnp

    return jnp.zeros_like(like).at[0, : len(x_TD)].set(x_TD.astype(like.dtype))


class LayeredModel:
    """Our model, without arrays. `hidden` are its hidden states [1, T, D] after the last layer that ran. Texts are
    padded on the right to few lengths, so that each kind of block is compiled for few."""

    def __init__(self, manifest: Manifest, windows: Sequence[Window], dtype: str, read: ReadArray | None):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from tpuconv.models.common.steps import Steps, windows_of
        from tpuconv.restore import abstract_model

        self.jax, self.nnx, self._read = jax, nnx, read or partial(read_array, manifest)
        self.model = abstract_model(manifest, dtype)
        config = self.model.config
        self.windows = windows
        self.spans = windows_of(config)
        self.lengths = [len(window.ids) for window in windows]
        widths = padded_widths(self.lengths)
        self.ids, self.positions = [], []
        for window, width in zip(windows, widths, strict=True):
            length = len(window.ids)
            self.ids.append(jnp.array([[*window.ids, *[0] * (width - length)]]))
            self.positions.append(jnp.where(jnp.arange(width) < length, jnp.arange(width), -1)[None])
        self.kinds = Steps.of(config, self.positions[0], self.positions[0], 0).of_layer
        self.seen: list[Seen | None] = [None] * len(windows)
        self.hidden: list[Any] = []
        # By default a TPU multiplies float32 as bfloat16.
        self.precision = "highest" if dtype == "float32" else None

        def run_block(block: Any, x_BTD: Any, pos_BT: Any, seen: Any, kind: int, window: int) -> Any:
            step = Steps.of(config, pos_BT, pos_BT, 0, seen=seen).kinds[kind]
            return block(x_BTD, step, window, None)[0]

        self.run_embed = nnx.jit(
            lambda part, ids_BT, pos_BT, seen: self.model.first_input(
                part(self.model.readable(ids_BT, seen)), pos_BT, seen
            )
        )
        self.run_block = nnx.jit(run_block, static_argnames=("kind", "window"))
        self.run_head = nnx.jit(
            lambda norm, head, x_BTD: self.model.adjusted(
                (head.attend if self.model.lm_head is None else head)(norm(x_BTD))
            ).astype(jnp.float32)
        )

    def embed(self) -> list[np.ndarray]:
        """Runs the embedding and the encoders. Returns the hidden states [T, D] of each window."""
        from tpuconv.models.common.seen import see

        if any(window.features for window in self.windows):
            encoders = {part: self._filled(getattr(self.model, part), part) for part in self.model.config.parts}
            for i, (window, ids_BT, pos_BT) in enumerate(zip(self.windows, self.ids, self.positions, strict=True)):
                if window.features:
                    with self.jax.default_matmul_precision(self.precision):
                        given = np.asarray(ids_BT), np.asarray(pos_BT >= 0), window.features
                        self.seen[i] = see(self.model.config, encoders, *given)
            del encoders
        part = self._filled(self.model.embed, "embed")
        for name in self.model.input_modules:
            setattr(self.model, name, self._filled(getattr(self.model, name), name))
        self.hidden = list(map(partial(self.run_embed, part), self.ids, self.positions, self.seen))
        return self._states(self.hidden)

    @property
    def features(self) -> list[np.ndarray]:
        """The features [X, D] of each window with images or sounds, after `embed`."""
        return [features_in_order(seen) for seen in self.seen if seen is not None]

    def layer(self, number: int, reference: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Runs the next layer on the reference's hidden states and on our own. Returns both outputs, [T, D] for each
        window."""
        block = self._filled(*self.model.block_of(number))

        def run(x_BTD: Any, pos_BT: Any, seen: Any) -> Any:
            x_BTD = self.run_block(block, x_BTD, pos_BT, seen, kind=self.kinds[number], window=self.spans[number])
            return x_BTD if seen is None else seen.deepened(x_BTD, number)

        padded = [_padded(x_TD, like) for x_TD, like in zip(reference, self.hidden, strict=True)]
        with self.jax.default_matmul_precision(self.precision):
            on_reference, self.hidden = (
                list(map(run, inputs, self.positions, self.seen)) for inputs in (padded, self.hidden)
            )
        return self._states(on_reference), self._states(self.hidden)

    def logits(self) -> list[np.ndarray]:
        """Returns the logits [T, V] of each window."""
        norm = self._filled(self.model.norm, "norm")
        for name in self.model.output_modules:
            setattr(self.model, name, self._filled(getattr(self.model, name), name))
        if self.model.lm_head is None:
            head = self._filled(self.model.embed, "embed")
        else:
            head = self._filled(self.model.lm_head, "lm_head")
        with self.jax.default_matmul_precision(self.precision):
            return [
                np.asarray(self.run_head(norm, head, x_BTD[:, window.first : len(window.ids)])[0], np.float32)
                for x_BTD, window in zip(self.hidden, self.windows, strict=True)
            ]

    def _states(self, padded: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(x[0, :n], np.float32) for x, n in zip(padded, self.lengths, strict=True)]

    def _filled(self, part: Any, prefix: str, layer: int | None = None) -> Any:
        """Returns a module with its arrays; `layer` selects one layer of stacked arrays."""
        graph, state = self.nnx.split(part)
        flat = []
        for path, value in self.nnx.to_flat_state(state):
            array = self._read(".".join(map(str, (prefix, *path))), layer)
            flat.append((path, value.replace(self.jax.numpy.asarray(array, value.dtype))))
        return self.nnx.merge(graph, self.nnx.from_flat_state(flat))
