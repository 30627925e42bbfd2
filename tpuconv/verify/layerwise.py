"""Compares a checkpoint with transformers layer by layer. Neither model is in memory as a whole.

The modules of transformers are created on torch's meta device, without memory. Each decoder layer is loaded from the
source, run, and moved back to the meta device. The other inputs of a layer (masks, rotary positions) are recorded
beforehand, by a forward pass whose layers are replaced by the identity. Our blocks are loaded one at a time, from
the checkpoint or the release.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import ReadArray, read_array
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.reshaped import shaped
from tpuconv.encodings.scheme import MXFP4
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import SourceError, UsageError
from tpuconv.models.logits import Window, padded_widths
from tpuconv.models.registry import get_family
from tpuconv.models.stored import model_config
from tpuconv.notation.table import MappingTable
from tpuconv.sources.source import open_source
from tpuconv.verify.parts_of_reference import (
    DECODER_NAMES,
    INPUT_NAMES,
    LAYER_NAMES,
    LOGIT_BIAS,
    NORM_NAMES,
    RETURNED,
    ROTARY_OPTIONS,
    first_of,
)
from tpuconv.verify.reference import attention_of, empty_weights, head_from, reference_class, reference_config

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


def compare_layers(
    manifest: Manifest,
    source: Path,
    windows: Sequence[Window],
    dtype: str,
    show: Callable[[LayerError], None] = lambda layer: None,
    read: ReadArray | None = None,
) -> tuple[list[LayerError], list[np.ndarray], list[np.ndarray]]:
    """Compares the embedding and every layer with transformers.

    Args:
        manifest: the checkpoint, or the planned one of a release or of a checkpoint for another program.
        source: the folder of its source.
        windows: what the models run on.
        dtype: of parameters and activations.
        show: called with each layer's error as soon as it is known.
        read: reads the arrays; None for a checkpoint, whose files are read.

    Returns:
        The errors; then transformers' logits and ours, [T, V] in float32 for each window, from its first token that
        counts on. They equal the logits of the complete models.

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
    theirs, ours = _Reference(source, manifest, windows, dtype), _Ours(manifest, windows, dtype, read)
    errors: list[LayerError] = []

    def add(name: str, reference: Sequence[np.ndarray], on_reference: Any, accumulated: Any) -> None:
        theirs, *sides = (
            [x_TD[window.first :] for x_TD, window in zip(states, windows, strict=True)]
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
        return errors, theirs.logits(), ours.logits()


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


class _Reference:
    """Transformers' model. `hidden` are the hidden states [1, T, D] of each prompt after the last layer that ran."""

    def __init__(self, source: Path, manifest: Manifest, windows: Sequence[Window], dtype: str):
        import torch
        from transformers.utils import logging

        from tpuconv.private import get_model_conversion_mapping

        logging.disable_progress_bar()
        self.torch, self.dtype = torch, getattr(torch, dtype)
        opened = open_source(source)
        self.folder, self.reader = source, opened.open(hashes=())
        known = get_family(manifest.family)
        config = known.read_config(opened.config, manifest.allow_config, opened.tensors)
        table = known.table_for(opened.tensors, config)
        shapes = {name: shape for binding in table.bind(config) for name, shape in binding.src_shapes().items()}
        self.tensors = shaped(decode_names(opened.tensors, opened.encoding)[0], shapes)
        self.sources = sources_by_target(table, config)
        config = reference_config(source)
        with torch.device("meta"), empty_weights():
            found = reference_class(config)
            create = getattr(found, "from_config", None) or found._from_config  # of a model without an automatic class
            self.model = create(config, dtype=self.dtype, attn_implementation=attention_of(config)).eval()
        self.conversions = get_model_conversion_mapping(self.model)
        base = getattr(self.model, "model", self.model.base_model)
        self.decoder = next((getattr(base, name) for name in DECODER_NAMES if hasattr(base, name)), base)
        if hasattr(base, "text_model"):  # some move what they embed to the device of their first parameter
            name, parameter = next(base.named_parameters())
            front, _, last = name.rpartition(".")
            there = torch.empty_like(parameter, device="cpu")
            setattr(base.get_submodule(front), last, torch.nn.Parameter(there, requires_grad=False))
        self.layers = list(first_of(self.decoder, LAYER_NAMES))
        self.norm = first_of(self.decoder, NORM_NAMES, self.torch.nn.Identity())
        # Its buffers are computed, not stored: create them outside the meta device.
        for name, module in list(self.decoder.named_children()):
            if type(module).__name__.endswith("RotaryEmbedding"):
                setattr(self.decoder, name, type(module)(config=self.decoder.config, **ROTARY_OPTIONS.get(name, {})))
        computing = []
        for module in self.decoder.modules():
            buffers = dict(module.named_buffers(recurse=False))
            if computed := [name for name in buffers if buffers[name].is_meta and name not in module.state_dict()]:
                for name in computed:
                    module._buffers[name] = torch.empty_like(buffers[name], device="cpu")
                computing.append(module)
        for module in (*computing, self.decoder) if computing else ():
            self.model._init_weights(module)
        self.prompts = [torch.tensor([list(window.ids)]) for window in windows]
        self.firsts = [window.first for window in windows]
        self.hidden: list[Any] = []
        self.given: list[list[tuple[Any, Any]]] = []

    def embed(self) -> list[np.ndarray]:
        """Runs the embedding and records the other inputs of each layer. Returns the hidden states [T, D] of each
        prompt."""
        torch = self.torch
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self._fill(embedding, "embed.", *(["embed_norm."] if hasattr(embedding, "embed_norm") else []))
        self._fill(self.norm, "norm.")
        for name, target in INPUT_NAMES.items():
            if hasattr(self.decoder, name) and any(parameter.startswith(target) for parameter in self.sources):
                self._fill(getattr(self.decoder, name), target)

        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(_replace_forward(layer, self._record))
            stack.enter_context(_replace_forward(head, lambda x: x[..., :1]))
            for ids in self.prompts:
                self.given.append([])
                with torch.no_grad():
                    self.model(ids, use_cache=False)
        self.hidden = [given[0][0][0] for given in self.given]
        self._empty(embedding)
        return self._states()

    def _record(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.given[-1].append(((x, *args), kwargs))
        return self._returned(x)

    def _returned(self, x: Any) -> Any:
        """Returns the output of a layer for the hidden states x."""
        length = RETURNED.get(self.decoder.config.model_type, 0)
        return (x, *[None] * (length - 1)) if length else x

    def layer(self, number: int) -> list[np.ndarray]:
        """Runs the next layer. Returns the hidden states [T, D] of each prompt."""
        layer = self.layers[number]
        self._fill(layer, f"layers.{number}.")
        with self.torch.no_grad():
            for i, given in enumerate(self.given):
                (_, *args), kwargs = given[number]
                out = layer(self.hidden[i], *args, **kwargs)
                self.hidden[i] = out[0] if isinstance(out, tuple | list) else out
        self._empty(layer)
        return self._states()

    def logits(self) -> list[np.ndarray]:
        """Returns the logits [T, V] of each window: transformers' forward pass, in which every layer returns
        `hidden`."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self._fill(head, "lm_head." if "lm_head.kernel" in self.sources else "embed.", LOGIT_BIAS)
        out = []
        for ids, hidden, first in zip(self.prompts, self.hidden, self.firsts, strict=True):
            with ExitStack() as stack:
                stack.enter_context(head_from(self.model, first))
                stack.enter_context(_replace_forward(embedding, lambda ids, x=hidden: x.clone()))  # CTRL changes it
                for layer in self.layers:
                    stack.enter_context(_replace_forward(layer, lambda *args, x=hidden, **kwargs: self._returned(x)))
                with self.torch.no_grad():
                    out.append(self.model(ids, use_cache=False).logits[0, -(ids.shape[1] - first) :].float().numpy())
        self._empty(head)
        return out

    def close(self) -> None:
        """Closes the files of the source."""
        self.reader.close()

    def _states(self) -> list[np.ndarray]:
        return [x[0].float().numpy() for x in self.hidden]

    def _fill(self, module: Any, target: str, *inside: str) -> None:
        """Loads a module's weights with transformers' own loader, which renames tensors and stacks experts.

        Args:
            module: a module of transformers' model.
            target: how the names of our parameters of this module begin.
            inside: the same of modules that only transformers has inside this module.
        """
        from tpuconv.private import LoadStateDictConfig, convert_and_load_state_dict_in_model

        filled = [names for parameter, names in self.sources.items() if parameter.startswith((target, *inside))]
        names = {name for each in filled for name in each}
        if absent := names - self.tensors.keys():
            raise SourceError(
                f"{self.folder} has no {', '.join(sorted(absent)[:5])}",
                hint="if it is not the source of this checkpoint, name the right one with `source=`",
            )
        state = {name: self._read(self.tensors[name]) for name in sorted(names)}
        convert_and_load_state_dict_in_model(
            self.model, state, LoadStateDictConfig(dtype=self.dtype, weight_mapping=self.conversions)
        )
        if module is self.model.get_output_embeddings() and "lm_head.kernel" not in self.sources:
            module.weight = self.model.get_input_embeddings().weight
        lacking = {name: value for name, value in module.state_dict().items() if value.is_meta}
        # A model without shared experts has matrices without elements for them, which its checkpoint lacks.
        empty = {name: self.torch.empty_like(x, device="cpu") for name, x in lacking.items() if not x.numel()}
        module.load_state_dict(empty, strict=False, assign=True)
        missing = [name for name in lacking if name not in empty]
        if missing:
            raise SourceError(
                f"{self.folder} has no tensors for {', '.join(missing[:5])} of transformers' {target[:-1]}",
                hint="compare without `layerwise=` to see transformers' own error",
            )

    def _read(self, tensor: Tensor) -> Any:
        """Returns the decoded values of a tensor, with the axes that transformers' module has."""
        out = np.empty(tensor.size, tensor.dtype)
        tensor.read(self.reader, 0, np.empty(tensor.values.nbytes, np.uint8), out)
        values = self._as_torch(tensor, out)
        # Experts in MXFP4 are stored (out, in). The module has (in, out), and its own loader would transpose them. AWQ
        # and GPTQ have (in, out) of modules with (out, in).
        is_swapped = tensor.scheme is not None and (tensor.scheme is MXFP4 or tensor.scheme.input_first)
        return values.transpose(-2, -1).contiguous() if is_swapped else values

    def _as_torch(self, tensor: Tensor, out: np.ndarray) -> Any:
        """Returns a torch tensor of the values. Numpy and torch do not share bfloat16, so its bits are
        reinterpreted."""
        if tensor.dtype.name == "bfloat16":
            return self.torch.from_numpy(out.view(np.int16)).view(self.torch.bfloat16).reshape(tensor.shape)
        return self.torch.from_numpy(out).reshape(tensor.shape)

    def _empty(self, module: Any) -> None:
        module.to("meta")
        gc.collect()


def sources_by_target(table: MappingTable, config: Any) -> dict[str, list[str]]:
    """Returns, for each parameter of the unstacked model, the names of the source tensors that it is made of."""
    return {
        target: [name for stack in binding.src for name in stack.names]
        for binding in table.bind(config)
        for target in binding.dst_shapes()
    }


@contextmanager
def _replace_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's forward function within the context."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # so that the one of the class is used again


def _padded(x_TD: np.ndarray, like: Any) -> Any:
    """Our hidden states [1, T, D], as many as `like` has, with these first."""
    import jax.numpy as jnp

    return jnp.zeros_like(like).at[0, : len(x_TD)].set(x_TD)


class _Ours:
    """Our model, without arrays. `hidden` are its hidden states [1, T, D] after the last layer that ran. Texts are
    padded on the right to few lengths, so that each kind of block is compiled for few."""

    def __init__(self, manifest: Manifest, windows: Sequence[Window], dtype: str, read: ReadArray | None):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from tpuconv.models.common.steps import NO_WINDOW, Steps
        from tpuconv.restore import abstract_model

        self.jax, self.nnx, self._read = jax, nnx, read or partial(read_array, manifest)
        self.model = abstract_model(manifest, dtype)
        config = self.model.config
        self.windows = [min(window or NO_WINDOW, NO_WINDOW) for window in config.windows]
        self.lengths, self.firsts = [len(window.ids) for window in windows], [window.first for window in windows]
        widths = padded_widths(self.lengths)
        self.ids = [
            jnp.array([[*window.ids, *[0] * (width - len(window.ids))]])
            for window, width in zip(windows, widths, strict=True)
        ]
        self.steps = []
        for length, width in zip(self.lengths, widths, strict=True):
            pos_BT = jnp.where(jnp.arange(width) < length, jnp.arange(width), -1)[None]
            self.steps.append(Steps.of(config, pos_BT, pos_BT, 0))
        self.hidden: list[Any] = []
        # By default a TPU multiplies float32 as bfloat16.
        self.precision = "highest" if dtype == "float32" else None
        self.run_embed = nnx.jit(
            lambda part, ids_BT, pos_BT: self.model.positioned(self.model.scaled(part(ids_BT)), pos_BT)
        )
        self.run_block = nnx.jit(
            lambda block, x_BTD, step, window: block(x_BTD, step, window, None)[0], static_argnames="window"
        )
        self.run_head = nnx.jit(
            lambda norm, head, x_BTD: self.model.adjusted(
                (head.attend if self.model.lm_head is None else head)(norm(x_BTD))
            ).astype(jnp.float32)
        )

    def embed(self) -> list[np.ndarray]:
        """Runs the embedding. Returns the hidden states [T, D] of each prompt."""
        part = self._filled(self.model.embed, "embed")
        for name in self.model.input_modules:
            setattr(self.model, name, self._filled(getattr(self.model, name), name))
        self.hidden = [
            self.run_embed(part, ids_BT, steps[0].pos_BT) for ids_BT, steps in zip(self.ids, self.steps, strict=True)
        ]
        return self._states(self.hidden)

    def layer(self, number: int, reference: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Runs the next layer on the reference's hidden states and on our own. Returns both outputs, [T, D] for each
        prompt."""
        block = self._filled(*self.model.block_of(number))
        padded = [_padded(x_TD, like) for x_TD, like in zip(reference, self.hidden, strict=True)]
        both = []
        for inputs in (padded, self.hidden):
            with self.jax.default_matmul_precision(self.precision):
                outs = [
                    self.run_block(block, x_BTD, steps[number], window=self.windows[number])
                    for x_BTD, steps in zip(inputs, self.steps, strict=True)
                ]
            both.append(outs)
        self.hidden = both[1]
        return self._states(both[0]), self._states(both[1])

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
                np.asarray(self.run_head(norm, head, x_BTD[:, first:length])[0], np.float32)
                for x_BTD, first, length in zip(self.hidden, self.firsts, self.lengths, strict=True)
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
