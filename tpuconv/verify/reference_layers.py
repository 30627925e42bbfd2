"""Transformers' model of a source checkpoint, of which one layer at a time is in memory.

The modules are created on torch's meta device, without memory. Each decoder layer is loaded from the source, run, and
moved back to the meta device. The other inputs of a layer (masks, rotary positions) are recorded beforehand, by a
forward pass whose layers return 0.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.reshaped import shaped
from tpuconv.encodings.scheme import MXFP4
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import SourceError
from tpuconv.models.logits import Window
from tpuconv.models.registry import get_family
from tpuconv.notation.segments import undressed
from tpuconv.notation.table import MappingTable
from tpuconv.sources.source import open_source
from tpuconv.verify.parts_of_reference import (
    DECODER_NAMES,
    INPUT_NAMES,
    LAYER_NAMES,
    LOGIT_BIAS,
    NORM_NAMES,
    ROTARY_OPTIONS,
    first_of,
    head_of,
    returned_values,
)
from tpuconv.verify.reference import (
    empty_weights,
    features_of,
    head_from,
    merging_module,
    recorded_embeddings,
    text_model,
)
from tpuconv.verify.reference_calls import attention_of, encoder_alone, encoder_in, inputs_of, mended
from tpuconv.verify.reference_types import reference_class, reference_config, released_names
from tpuconv.verify.sights import SightWindow


def _one_by_one(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors by the names that transformers' loader knows: MLX stacks experts."""
    front, stacked, end = name.partition(".switch_mlp.")
    if not stacked:
        yield name, value
    else:
        yield from ((f"{front}.experts.{number}.{end}", each) for number, each in enumerate(value))


class LayeredReference:
    """Transformers' model, of which only the running layer has weights.

    Args:
        source: the folder of the source.
        manifest: the checkpoint.
        windows: what the model runs on.
        dtype: of parameters and activations.

    Attributes:
        layers: transformers' modules.
        hidden: the hidden states [1, T, D] of each window after the last layer that ran.
        features: the features [X, D] of each window with images or sounds, after `embed`.
    """

    def __init__(self, source: Path, manifest: Manifest, windows: Sequence[Window], dtype: str):
        import torch
        from transformers.utils import logging

        from tpuconv.private import get_model_conversion_mapping

        logging.disable_progress_bar()
        self.torch, self.dtype = torch, getattr(torch, dtype)
        opened = open_source(source)
        self.folder, self.reader = source, opened.open(hashes=())
        known = get_family(manifest.family)
        self.windows, sees = windows, any(window.features for window in windows)
        parts = manifest.parts if sees else ()
        config = known.read_config(opened.config, manifest.allow_config, opened.tensors, parts=parts)
        table = known.table_for(opened.tensors, config)
        shapes = {name: shape for binding in table.bind(config) for name, shape in binding.src_shapes().items()}
        self.tensors = shaped(decode_names(opened.tensors, opened.encoding)[0], shapes)
        self.sources, self.parts = sources_by_target(table, config), config.parts
        config = reference_config(source, sees=sees)
        with torch.device("meta"), empty_weights():
            found = reference_class(config, sees=sees)
            create = getattr(found, "from_config", None) or found._from_config  # of a model without an automatic class
            self.model = mended(create(config, dtype=self.dtype, attn_implementation=attention_of(config)).eval())
        names = (released_names(source, opened.tensors, sees=sees) or {}) | encoder_alone(self.model)
        self.conversions = get_model_conversion_mapping(self.model, names or None)
        base = encoder_in(getattr(self.model, "model", self.model.base_model))
        self.decoder = next((getattr(base, name) for name in DECODER_NAMES if hasattr(base, name)), base)
        if sees or hasattr(self.decoder, "lm_head"):  # a causal model inside another
            self.decoder = text_model(self.model)
        self.encoders = list(_beside(self.model, self.decoder, self._head())) if sees else []
        if sees and (inside := merging_module(self.model)) is not None:
            self.encoders.append(inside)
        self._stay_here()
        self.layers = list(first_of(self.decoder, LAYER_NAMES))
        self._returns = returned_values(self.layers[0], self.decoder.config.model_type)
        self.norm = first_of(self.decoder, NORM_NAMES, self.torch.nn.Identity())
        self._compute_buffers()
        self.features: list[np.ndarray] = []
        self.hidden: list[Any] = []
        self.given: list[dict[int, tuple[Any, Any]]] = []

    def _compute_buffers(self) -> None:
        """Creates the buffers that are computed, also where transformers stores them (MiniMax), outside the meta
        device."""
        for name, module in list(self.decoder.named_children()):
            if type(module).__name__.endswith("RotaryEmbedding"):
                setattr(self.decoder, name, type(module)(config=self.decoder.config, **ROTARY_OPTIONS.get(name, {})))
        computing = []
        for module in (*self.decoder.modules(), *(each for encoder in self.encoders for each in encoder.modules())):
            buffers = dict(module.named_buffers(recurse=False))
            stored = module.state_dict()
            computed = [
                name for name, x in buffers.items() if x.is_meta and (name not in stored or x.dtype.is_floating_point)
            ]
            for name in computed:
                empty = self.torch.empty_like(buffers[name], device="cpu")
                module._buffers[name] = empty.fill_(float("nan")) if name in stored else empty
            if computed:
                computing.append(module)
        owners = {  # an encoder is a model of its own, which knows its buffers
            id(part): model
            for model in self.model.modules()
            if hasattr(model, "_init_weights")
            for part in model.modules()
        }
        for module in (*computing, self.decoder) if computing else ():
            owners[id(module)]._init_weights(module)
            for name, x in module.named_buffers(recurse=False):
                if x.is_floating_point() and not x.is_meta and x.isnan().all():  # which has to be read
                    module._buffers[name] = x.to("meta")

    def embed(self) -> list[np.ndarray]:
        """Runs the embedding and the encoders, and records the other inputs of each layer. Returns the hidden states
        [T, D] of each window."""
        embedding, head = self.model.get_input_embeddings(), self._head()
        self._fill(embedding, "embed.", *(["embed_norm."] if hasattr(embedding, "embed_norm") else []))
        self._fill(self.norm, "norm.")
        for name, target in INPUT_NAMES.items():
            if hasattr(self.decoder, name) and any(parameter.startswith(target) for parameter in self.sources):
                self._fill(getattr(self.decoder, name), target)
        if self.encoders:
            self._load(*(f"{part}." for part in self.parts))
        for encoder in self.encoders:
            if not all(value.is_meta for value in encoder.state_dict().values()):  # Janus has what draws beside it
                _fill_by_config(encoder)
                self._check_filled(encoder, "encoders")

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                stack.enter_context(_replace_forward(layer, partial(self._record, number)))
            stack.enter_context(_replace_forward(head, lambda x: x[..., :1]))
            for window in self.windows:
                self.given.append({})
                with self.torch.no_grad(), recorded_embeddings(self.model) as embedded:
                    if isinstance(window, SightWindow):
                        self.model(**inputs_of(self.model, window), use_cache=False)
                        self.features += features_of(self.model, [window], embedded)
                    else:
                        self.model(self._ids(window), use_cache=False)
        self.hidden = [next(iter(given.values()))[0][0] for given in self.given]
        for module in (embedding, *self.encoders):
            self._empty(module)
        self._stay_here()
        return self._states()

    def _stay_here(self) -> None:
        """Gives the first parameter memory, if transformers moves what it embeds to the device of that."""
        base = getattr(self.model, "model", self.model.base_model)
        if hasattr(base, "text_model"):
            name, parameter = next(base.named_parameters())
            front, _, last = name.rpartition(".")
            there = self.torch.empty_like(parameter, device="cpu")
            setattr(base.get_submodule(front), last, self.torch.nn.Parameter(there, requires_grad=False))

    def _head(self) -> Any:
        return head_of(self.model)

    def _ids(self, window: Window) -> Any:
        return self.torch.tensor([list(window.ids)])

    def _record(self, number: int, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps what a layer is called with, by its number: some are not called without images. Its output is 0: the
        input of the next layer is then what images add to the output of this one."""
        self.given[-1][number] = ((x, *args), kwargs)
        return self._returned(self.torch.zeros_like(x))

    def _returned(self, x: Any) -> Any:
        """Returns the output of a layer for the hidden states x."""
        return (x, *[None] * (self._returns - 1)) if self._returns else x

    def layer(self, number: int) -> list[np.ndarray]:
        """Runs the next layer. Returns the hidden states [T, D] of each prompt."""
        layer = self.layers[number]
        self._fill(layer, f"layers.{number}.")
        with self.torch.no_grad():
            for i, given in enumerate(self.given):
                if number not in given:
                    continue
                (_, *args), kwargs = given[number]
                out = layer(self.hidden[i], *args, **kwargs)
                self.hidden[i] = out[0] if isinstance(out, tuple | list) else out
                if number + 1 in given and isinstance(self.windows[i], SightWindow):
                    self.hidden[i] = self.hidden[i] + given[number + 1][0][0]
        self._empty(layer)
        return self._states()

    def logits(self) -> list[np.ndarray]:
        """Returns the logits [T, V] of each window: transformers' forward pass, in which every layer returns
        `hidden`."""
        embedding, head = self.model.get_input_embeddings(), self._head()
        self._fill(head, "lm_head." if "lm_head.kernel" in self.sources else "embed.", LOGIT_BIAS)
        out = []
        for window, hidden in zip(self.windows, self.hidden, strict=True):
            ids = self._ids(window) * (not window.features)  # of text: placeholders without features are an error
            with ExitStack() as stack:
                stack.enter_context(head_from(self.model, window.first))
                nothing_BTD = hidden.new_zeros((*ids.shape, embedding.weight.shape[-1]))
                stack.enter_context(_replace_forward(embedding, lambda ids, x=nothing_BTD: x))
                for layer in self.layers:
                    stack.enter_context(_replace_forward(layer, lambda *args, x=hidden, **kwargs: self._returned(x)))
                with self.torch.no_grad():
                    logits_BTV = self.model(ids, use_cache=False).logits
                    out.append(logits_BTV[0, -len(window.scored) :].float().numpy())
        self._empty(head)
        return out

    def close(self) -> None:
        """Closes the files of the source."""
        self.reader.close()

    def _states(self) -> list[np.ndarray]:
        return [x[0].float().numpy() for x in self.hidden]

    def _fill(self, module: Any, target: str, *inside: str) -> None:
        """Loads a module's weights.

        Args:
            module: a module of transformers' model.
            target: how the names of our parameters of this module begin.
            inside: the same of modules that only transformers has inside this module.
        """
        self._load(target, *inside)
        if module is self._head() and "lm_head.kernel" not in self.sources:
            module.weight = self.model.get_input_embeddings().weight
        self._check_filled(module, target[:-1])

    def _load(self, *targets: str) -> None:
        """Loads the weights of our parameters whose names begin with one of these, with transformers' own loader, which
        renames tensors and stacks experts."""
        from tpuconv.private import LoadStateDictConfig, convert_and_load_state_dict_in_model

        filled = [names for parameter, names in self.sources.items() if parameter.startswith(targets)]
        names = {name for each in filled for name in each}
        if absent := names - self.tensors.keys():
            raise SourceError(
                f"{self.folder} has no {', '.join(sorted(absent)[:5])}",
                hint="if it is not the source of this checkpoint, name the right one with `source=`",
            )
        state = {
            own: value
            for name in sorted(names)
            for own, value in _one_by_one(undressed(name), self._read(self.tensors[name]))
        }
        convert_and_load_state_dict_in_model(
            self.model, state, LoadStateDictConfig(dtype=self.dtype, weight_mapping=self.conversions)
        )

    def _check_filled(self, module: Any, name: str) -> None:
        """Raises SourceError if a module lacks weights."""
        lacking = {name: value for name, value in module.state_dict().items() if value.is_meta}
        # A model without shared experts has matrices without elements for them, which its checkpoint lacks.
        empty = {name: self.torch.empty_like(x, device="cpu") for name, x in lacking.items() if not x.numel()}
        module.load_state_dict(empty, strict=False, assign=True)
        missing = [name for name in lacking if name not in empty]
        if missing:
            raise SourceError(
                f"{self.folder} has no tensors for {', '.join(missing[:5])} of transformers' {name}",
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


def _fill_by_config(module: Any) -> None:
    """Lets transformers set what its models compute from their config where a checkpoint lacks it: whole numbers, and
    weights that its loader does not miss."""
    import torch

    for model in (each for each in module.modules() if hasattr(each, "_init_weights")):
        known = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
        for at, part in model.named_modules():
            own = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
            lacking = {
                name: x
                for name, x in own.items()
                if x.is_meta and (not x.is_floating_point() or any(each.search(f"{at}.{name}") for each in known))
            }
            for name, x in lacking.items():
                empty = torch.empty_like(x, device="cpu")
                setattr(part, name, torch.nn.Parameter(empty) if name in part._parameters else empty)
            if lacking:
                model._init_weights(part)


@contextmanager
def _replace_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a module's forward function within the context."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # so that the one of the class is used again


def _beside(module: Any, *others: Any) -> Iterator[Any]:
    """Yields the largest modules within a module that neither are nor hold any of the others."""
    for child in module.children():
        held = [other for other in others if any(each is other for each in child.modules())]
        if not held:
            yield child
        elif not any(child is other for other in held):
            yield from _beside(child, *held)
