"""Transformers' model of a source checkpoint, which the converted one is compared with."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.encodings.tensors import decode_names, is_encoded
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError, shorten
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import HIDDEN, LOGITS, SCORES
from tpuconv.models.logits import Window
from tpuconv.models.registry import find_family
from tpuconv.models.stored import model_config
from tpuconv.models.tokenizer import errors_alone
from tpuconv.names import collapse
from tpuconv.notation.letters import meaning
from tpuconv.notation.table import LAYERS
from tpuconv.sources.config import ENCODING_KEYS, read_config, read_json
from tpuconv.sources.files import ADAPTER_CONFIG, CONFIG_FILE, ENCODING_FILES
from tpuconv.sources.source import open_source
from tpuconv.text import format_count
from tpuconv.verify.logits import compare_logits
from tpuconv.verify.merged import WeightedAdapter, with_adapters
from tpuconv.verify.parts_of_reference import head_of
from tpuconv.verify.reference_calls import (
    ADDS_FEATURES,
    ATTENDS_TO_FEATURES,
    attention_of,
    encoder_in,
    inputs_of,
    mended,
)
from tpuconv.verify.reference_types import READ_WITHIN, reference_class, reference_config, released_names
from tpuconv.verify.sights import SightWindow

EMPTIES_PADDING = frozenset({"youtu"})
"""Model types whose embedding of the token of padding transformers sets to 0 after it was read, if the embedding is the
head too and config.json names the token."""


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Suppresses torch's warning about weights without elements, which a model without shared experts has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


class Reference(NamedTuple):
    """The outputs of transformers' model.

    Attributes:
        logits: [T, V] in float32 for each window, from its first token that counts on; of a model that returns them,
            hidden states [T, D] or scores [1, O].
        rounding_kl: how much one rounding changes: the mean divergence in nats from the logits with each number of the
            tokens' embeddings moved by half a spacing, up or down, and rounded again. None for models without logits,
            and in float32.
        sights: the same of prompts with images or sounds, whose features are moved too; None without them.
        features: the features [X, D] of each prompt with images or sounds.
    """

    logits: list[np.ndarray]
    rounding_kl: float | None
    sights: "Reference | None" = None
    features: Sequence[np.ndarray] = ()


def reference(
    source: Path,
    windows: Sequence[Window],
    dtype: str,
    returns: str = LOGITS,
    *,
    adapted: bool = False,
    adapters: Sequence[WeightedAdapter] = (),
    sights: Sequence[SightWindow] = (),
) -> Reference:
    """Runs transformers' model of a source checkpoint.

    Args:
        source: its folder.
        windows: what it runs on.
        dtype: of parameters and activations.
        returns: what the model returns.
        adapted: whether transformers is to apply an adapter that lies in the folder.
        adapters: adapters to merge into the model.
        sights: prompts with images and sounds.

    Raises:
        UsageError: transformers would read quantized values as weights, or needs a package to read them.
        UnsupportedConfig: transformers does not load all weights of its model from the source.
    """
    path = source / CONFIG_FILE
    if read_config(path) != read_json(path, ConfigError):
        raise UsageError(
            f"transformers would read the quantized values of {source} as weights: the encoding is described in "
            f"{next(name for name in ENCODING_FILES if (source / name).exists())}, which transformers does not read",
            hint="use `layerwise=True`, which gives transformers the decoded weights",
        )
    # Refuses an index with `../` in a file name, which transformers would follow.
    opened = open_source(source)
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = reference_config(source, sees=bool(sights))
    if config.model_type in EMPTIES_PADDING and returns != SCORES:
        for part in (config, config.get_text_config()):
            part.pad_token_id = None
    if not is_encoded(*decode_names(opened.tensors, opened.encoding)):
        for part in (config, config.get_text_config()):
            vars(part).pop(ENCODING_KEYS[0], None)  # left in config.json: transformers would quantize plain weights
    try:
        # `_check_loaded` says what is missing, and encoders are left out on purpose.
        with errors_alone("transformers"), empty_weights(), without_adapter(source, adapted) as folder:
            model, loaded = reference_class(config, returns, sees=bool(sights)).from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=attention_of(config),
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # named below
                key_mapping=released_names(source, opened.tensors, sees=bool(sights)),
                output_loading_info=True,
            )
    except ImportError as e:
        raise UsageError(
            f"transformers cannot load {source}: {str(e).strip().partition(chr(10))[0]}",
            hint="install the package, or use `layerwise=True`, which gives transformers the decoded weights",
        ) from e

    if read_json(path, ConfigError).get("model_type") not in READ_WITHIN:  # what sees has no weights there
        _check_loaded(source, model, loaded)
    model = with_adapters(mended(model), adapters).eval()
    logits, rounding_kl = list(_outputs(model, windows, returns)), None
    if returns == LOGITS and dtype != "float32":
        hook = model.get_input_embeddings().register_forward_hook(_rounded_otherwise)
        scored = [window.scored for window in windows]
        rounding_kl = compare_logits(scored, logits, _outputs(model, windows, returns), dtype, {}).mean_kl
        hook.remove()
    seen = _seen(model, sights, dtype, returns) if sights else None
    del model
    gc.collect()
    return Reference(logits, rounding_kl, seen)


def _seen(model: Any, windows: Sequence[SightWindow], dtype: str, returns: str = LOGITS) -> Reference:
    """Runs transformers' model on prompts with images and sounds. Features are what the text model gets in place of
    placeholders."""
    import torch

    def run() -> list[np.ndarray]:
        with torch.no_grad():
            found = [model(**inputs_of(model, window)) for window in windows]
        outputs = [each.last_hidden_state if returns == HIDDEN else each.logits for each in found]
        return [each[0].float().numpy() for each in outputs]

    with recorded_embeddings(model) as embedded:
        logits, rounding_kl = run(), None
    features = features_of(model, windows, embedded)
    if returns == LOGITS and dtype != "float32":
        hook = _on_embedded(model, lambda module, embedded, **_: _rounded_otherwise(module, None, embedded))
        rounding_kl = compare_logits([window.ids for window in windows], logits, run(), dtype, {}).mean_kl
        hook.remove()
    return Reference(logits, rounding_kl, features=features)


ATTENDED = "cross_attention_states"
"""The argument of a text model for the features that its layers attend to."""


@contextlib.contextmanager
def recorded_embeddings(model: Any) -> Iterator[list[np.ndarray]]:
    """Within the context, what the text model gets in place of token ids [T, D], or what its layers attend to [X, D],
    is added to the list, for each call."""
    out: list[np.ndarray] = []

    def record(module: Any, embedded: Any, deepstack_features: Any = None, vision_mask: Any = None, **_: Any) -> None:
        # Granite multiplies embeddings and features behind this; our features have the factor
        embedded_TD = embedded.flatten(0, -2).float().numpy() * getattr(module, "embedding_multiplier", 1.0)
        if deepstack_features and 0 in deepstack_features:  # of Granite Vision 4, which adds them behind the factor
            embedded_TD[vision_mask[0, :, 0].numpy()] += deepstack_features[0].float().numpy()
        out.append(embedded_TD)

    hook = _on_embedded(model, record)
    try:
        yield out
    finally:
        hook.remove()


def _on_embedded(model: Any, call: Callable[[Any, Any], Any]) -> Any:
    """Returns the handle of a hook: `call` is given the text model, what it gets in place of token ids [B, T, D] (or
    the features that its layers attend to), and its other arguments by name. What it returns stands in the place of
    the former, unless that is None."""
    text, merging = text_model(model), merging_module(model)
    if merging is not None:
        return merging.register_forward_hook(lambda module, inputs, embedded: call(text, embedded))

    def before(module: Any, inputs: Any, named: dict[str, Any]) -> Any:
        name = ATTENDED if ATTENDED in named else "inputs_embeds"
        found, others = named.get(name), {key: x for key, x in named.items() if key != name}
        other = None if found is None else call(module, found, **others)
        return None if other is None else (inputs, {**others, name: other})

    return text.register_forward_pre_hook(before, with_kwargs=True)


def features_of(model: Any, windows: Sequence[SightWindow], embedded: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the features [X, D] of prompts, of what `recorded_embeddings` has of each."""
    if model.config.model_type in ATTENDS_TO_FEATURES:
        return list(embedded)
    found = [each[np.array(window.ids) == window.placeholder] for each, window in zip(embedded, windows, strict=True)]
    if model.config.model_type in ADDS_FEATURES:
        embedding_VD = model.get_input_embeddings().weight.detach().float().numpy()
        found = [each - embedding_VD[window.placeholder] for each, window in zip(found, windows, strict=True)]
    return found


def text_model(model: Any) -> Any:
    """Returns the module within transformers' multimodal model that has the layers of the text."""
    found = getattr(encoder_in(model.base_model), "language_model", None) or model.get_decoder()
    found = getattr(found, "model", found)
    return getattr(found, "decoder", found)  # of OPT


def merging_module(model: Any) -> Any:
    """Returns the module within transformers' text model that has the encoders, and puts features in place of
    embeddings; None where that is done before the text model."""
    return getattr(text_model(model), "embed_tokens_extend", None)


@contextlib.contextmanager
def without_adapter(source: Path, adapted: bool) -> Iterator[Path]:
    """Yields a folder with the files of a source; without the adapter that it may hold, unless that is to be
    applied."""
    if adapted or not (source / ADAPTER_CONFIG).exists():
        yield source
        return
    with TemporaryDirectory() as name:
        for path in source.iterdir():
            if path.name != ADAPTER_CONFIG:
                (Path(name) / path.name).symlink_to(path.absolute())
        yield Path(name)


def _facts(config: DecoderConfig) -> dict[str, Any]:
    """Returns the sizes and the layers of a config, by letters and words."""
    return {**config.sizes, **config.layer_sets, LAYERS: len(config.layer_sets[LAYERS])}


def check_sizes(manifest: Manifest, source: Path) -> None:
    """Checks, by its config.json, that a source is a model of the family and the sizes of a checkpoint.

    Raises:
        UsageError: it is another model.
        UnsupportedConfig, ConfigError: see `tpuconv.models.registry.find_family` and `Family.read_config`.
    """
    raw = read_config(source / CONFIG_FILE)
    family = find_family(raw)
    faults = [f"it is of the family {family.name}, not {manifest.family}"] if family.name != manifest.family else []
    if not faults:
        # By the names of the checkpoint, as its own config is read.
        theirs = _facts(family.read_config(raw, manifest.allow_config, manifest.arrays, manifest.returns))
        ours = _facts(model_config(manifest))
        faults = [
            f"{meaning(letter).partition(':')[0]}: {theirs.get(letter)} instead of {ours.get(letter)}"
            for letter in sorted({*theirs, *ours})
            if theirs.get(letter) != ours.get(letter)
        ]
    if faults:
        raise UsageError(
            f"{source} is another model than the one in {manifest.folder}",
            details=shorten(faults),
            hint="give the source that was converted, or a model of the same sizes",
        )


def _check_loaded(source: Path, model: Any, loaded: Mapping[str, Any]) -> None:
    """Raises UnsupportedConfig if transformers did not find weights of its model in the source: it has filled in random
    numbers, with which nothing can be compared."""
    import transformers

    absent = {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}
    # A model without shared experts has empty matrices, and whole numbers of a model follow from its config.
    sizes = {name: values.numel() * values.is_floating_point() for name, values in model.state_dict().items()}
    missing = sorted(name for name in absent if sizes.get(name) != 0)
    if not missing:
        return
    unread = sorted(loaded["unexpected_keys"])
    raise UnsupportedConfig(
        f"transformers {transformers.__version__} did not load {format_count(len(unread or missing), 'weight')} of "
        f"{source}: nothing is said about the conversion",
        details=[
            *shorten([f"{pattern}: in the source, not read by transformers" for pattern in collapse(unread)]),
            *shorten(
                [
                    f"{pattern}: not found by transformers, which fills in random numbers"
                    for pattern in collapse(missing)
                ]
            ),
        ],
        hint="try another version of transformers; `tpuconv verify` alone compares with the checksums",
    )


def _outputs(model: Any, windows: Sequence[Window], returns: str) -> Iterator[np.ndarray]:
    import torch

    for window in windows:
        with torch.no_grad(), head_from(model, window.first):
            out = model(torch.tensor([list(window.ids)]))
        found = out.last_hidden_state[0] if returns == HIDDEN else out.logits
        found = found[0] if found.ndim == 3 else found
        yield (found if returns == SCORES else found[-len(window.scored) :]).float().numpy()


@contextlib.contextmanager
def head_from(model: Any, first: int) -> Iterator[None]:
    """Within the context transformers' model makes logits of the tokens from this one on alone. Not all models have an
    argument for that."""
    head = head_of(model)
    if not first or head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, first:], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _rounded_otherwise(module: Any, inputs: Any, embedded: Any) -> Any:
    """Moves each number by half a spacing, up or down, and rounds it: a hook of a module of embeddings."""
    import torch

    up = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    half = torch.finfo(embedded.dtype).eps / 2
    return (embedded.float() * torch.where(up, 1 + half, 1 - half)).to(embedded.dtype)
