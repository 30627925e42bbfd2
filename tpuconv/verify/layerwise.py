"""Compares a checkpoint with transformers layer by layer. Neither model is in memory as a whole."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import ReadArray
from tpuconv.errors import UsageError
from tpuconv.models.logits import Window
from tpuconv.models.stored import model_config
from tpuconv.verify.model_layers import LayeredModel
from tpuconv.verify.reference import Reference
from tpuconv.verify.reference_layers import LayeredReference
from tpuconv.verify.sights import SightWindow

LAYER_GATES: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
"""The largest error of a layer on the reference's input, by dtype. Rounding gives about 1e-6 in float32 and 1e-2 in the
others; a wrong layer gives 0.1 or more."""

M_MMAP_THRESHOLD = -3
"""The parameter of mallopt(3) for the size from which each block is mapped separately."""


@dataclass(frozen=True)
class LayerError:
    """The error of one layer's output, or of the embedding's: |ours - reference| / |reference|, Euclidean norms over
    all tokens.

    Attributes:
        name: "embedding" or "layer 0".
        own_error: error of our layer on the reference's input.
        error: error of our layer on the output of our layers before it: the accumulated error.
        gate: largest `own_error` of a layer that does not diverge.
    """

    name: str
    own_error: float
    error: float
    gate: float

    @property
    def diverges(self) -> bool:
        """True if `own_error` is above the gate, or NaN."""
        return not self.own_error <= self.gate

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"name": self.name, "own_error": self.own_error, "error": self.error, "departs": self.diverges}


class ComparedOutputs(NamedTuple):
    """The outputs of two models.

    Attributes:
        errors: of the embedding and of every layer; empty if the models ran as a whole.
        theirs: the outputs of transformers' model. The complete model has the same.
        ours: our logits, [T, V] in float32 for each window from its first token that counts on; prompts with images
            or sounds come last.
        features: our features [X, D] of each prompt with images or sounds.
    """

    errors: list[LayerError]
    theirs: Reference
    ours: list[np.ndarray]
    features: list[np.ndarray]


def compare_layers(
    manifest: Manifest,
    source: Path,
    windows: Sequence[Window],
    dtype: str,
    show: Callable[[LayerError], None] = lambda layer: None,
    read: ReadArray | None = None,
    sights: Sequence[SightWindow] = (),
) -> ComparedOutputs:
    """Compares the embedding and every layer with transformers.

    Args:
        manifest: the checkpoint, or the planned one of a release or of a checkpoint for another program.
        source: the folder of its source.
        windows: what the models run on.
        dtype: of parameters and activations.
        show: called with each layer's error as soon as it is known.
        read: reads the arrays; None for a checkpoint, whose files are read.
        sights: prompts with images and sounds. The encoders that they need are in memory as a whole.

    Raises:
        UsageError: the checkpoint is quantized, or has only a part of the layers; or its layers cannot run one by one.
        SourceError: the source lacks a tensor that transformers needs.
    """
    manifest.check_complete()
    if manifest.quantization is not None:
        raise UsageError(f"{manifest.folder} is quantized: every layer diverges", hint="leave `layerwise=` out")
    config = model_config(manifest)
    if config.inseparable:
        raise UsageError(
            f"{manifest.folder} cannot be compared layer by layer: {config.inseparable}", hint="leave `layerwise=` out"
        )
    _return_freed_memory()
    every = [*windows, *sights]
    theirs, ours = LayeredReference(source, manifest, every, dtype), LayeredModel(manifest, every, dtype, read)
    errors: list[LayerError] = []

    def add(name: str, reference: Sequence[np.ndarray], on_reference: Any, accumulated: Any) -> None:
        theirs, *sides = (
            [x_TD[window.first :] for x_TD, window in zip(states, every, strict=True)]
            for states in (reference, on_reference, accumulated)
        )
        own_error, error = (_relative_error(theirs, states) for states in sides)
        errors.append(LayerError(name, own_error, error, LAYER_GATES[dtype]))
        show(errors[-1])

    with closing(theirs):
        before, embedded = theirs.embed(), ours.embed()
        add("embedding", before, embedded, embedded)
        for i in range(len(theirs.layers)):
            after = theirs.layer(i)
            add(f"layer {i}", after, *ours.layer(i, before))
            before = after
        logits, count = theirs.logits(), len(windows)
        seen = Reference(logits[count:], None, features=theirs.features) if sights else None
        return ComparedOutputs(errors, Reference(logits[:count], None, seen), ours.logits(), ours.features)


def _return_freed_memory() -> None:
    """Makes glibc return freed arrays of 1 MB or more to the system. By default its threshold grows to 32 MB, and the
    memory that it does not return adds up to several layers."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _relative_error(reference: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> float:
    difference = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in zip(reference, ours, strict=True))
    size = sum(float(np.square(a, dtype=np.float64).sum()) for a in reference)
    return float(np.sqrt(difference / max(size, 1e-300)))
