"""Transformers' model of a source checkpoint, which the converted one is compared with."""

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.encodings.tensors import decode_names, is_encoded
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError, shorten
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import HIDDEN, LOGITS, SCORES, class_of
from tpuconv.models.logits import Window
from tpuconv.models.registry import find_family, type_of_family
from tpuconv.models.stored import model_config
from tpuconv.models.tokenizer import added_token, tokenizer_file
from tpuconv.models.towers.phi4.released import RELEASED_PARTS
from tpuconv.names import collapse
from tpuconv.notation.letters import meaning
from tpuconv.notation.segments import KEY_MAPPING, undressed
from tpuconv.notation.table import LAYERS
from tpuconv.sources.config import ENCODING_KEYS, read_config, read_json
from tpuconv.sources.files import ADAPTER_CONFIG, CONFIG_FILE, ENCODING_FILES
from tpuconv.sources.source import open_source
from tpuconv.text import format_count
from tpuconv.verify.logits import compare_logits
from tpuconv.verify.merged import WeightedAdapter, with_adapters
from tpuconv.verify.reference_calls import ADDS_FEATURES, attention_of, inputs_of, mended
from tpuconv.verify.sights import SightWindow

READ_AS = {
    **{"kimi_k2": "deepseek_v3", "mimo": "qwen2"},
    **{"phi4mm": "phi4_multimodal", "deepseek_vl_v2": "deepseek_ocr2"},
    **{"deepseek_ocr": "unlimited_ocr", "internvl_chat": "qianfan_ocr"},
}
"""Model types for which transformers has no class of its own (it would need remote code), and the model type with the
same mathematics that is used instead."""

READ_WITHOUT_WINDOW = frozenset({"deepseek_ocr"})
"""Types among them whose layers have no window, which layers of the other type have."""

NAMED_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "phi4mm": RELEASED_PARTS,
    "internvl_chat": {f".attention.{x}_norm.": f".attn.{x}_norm." for x in "qk"},
}
"""For some of these types parts of the names of the other one, and what the tensors of releases have in their place."""

READ_WITHIN: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "step3p5": ("step3p7", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28})
}
"""Model types that transformers has as text models of multimodal ones alone: the type of that, and the `vision_config`
of a small one. What sees is not used."""

SEES_BY_TIMM = frozenset({"gemma3n"})
"""Multimodal model types whose encoders of images transformers has of the package timm. It reads the text model of
their checkpoints by itself too."""


def unreadable(config: DecoderConfig) -> str:
    """Returns why transformers cannot read the encoders of a model with this config here; empty where it can."""
    from transformers.utils import is_timm_available

    is_known = config.model_type not in SEES_BY_TIMM or is_timm_available()
    return "" if is_known else "transformers needs the packages timm and torchvision to read its encoder of images"


EMPTIES_PADDING = frozenset({"youtu"})
"""Model types whose embedding of the token of padding transformers sets to 0 after it was read, if the embedding is the
head too and config.json names the token."""

READ_WHOLE = frozenset({"emu3"})
"""Multimodal model types whose causal model in transformers does not read the names of the complete model."""


def whole_config(raw: Mapping[str, Any]) -> Any:
    """Returns transformers' config object of the multimodal model around the text model of a parsed config.json whose
    type is one of `READ_WITHIN`."""
    from transformers import AutoConfig

    whole, vision = READ_WITHIN[raw["model_type"]]
    tied = raw.get("tie_word_embeddings", False)
    text = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map", "architectures")}
    return AutoConfig.for_model(whole, text_config=text, vision_config=dict(vision), tie_word_embeddings=tied)


def reference_config(source: Path, *, sees: bool = False) -> Any:
    """Returns transformers' config object of the source, from which a model that `sees` can be made.

    Raises:
        UnsupportedConfig: transformers does not know the type of the model.
    """
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = read_json(source / CONFIG_FILE, ConfigError)
    if raw.get("model_type") in READ_WITHIN:
        return whole_config(raw)
    kind = type_of_family({"model_type": "", **raw})
    if (other := READ_AS.get(kind, kind if kind != raw.get("model_type") else None)) is None:
        if kind not in CONFIG_MAPPING:
            raise UnsupportedConfig(
                f"transformers {transformers.__version__} has no model of type {kind!r} to compare with",
                hint="try another version of transformers, or register the classes of the model there "
                "(docs/families.md#a-family-of-another-package); `tpuconv verify` alone compares with the checksums",
            )
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.model_type in SEES_BY_TIMM and not sees:
            config.text_config.tie_word_embeddings = config.tie_word_embeddings
            return config.text_config
        return getattr(config, "thinker_config", config)  # the model of which returns logits; that around it speaks
    family = find_family(raw)
    around = {k: v for k, v in family.config.around_text(raw).items() if k not in ("model_type", "auto_map")}
    for token in (each.placeholder_token for each in family.modalities if each.placeholder_token):
        around["image_token_id"] = added_token(token, partial(tokenizer_file, source))
    config = AutoConfig.for_model(other, **around)
    if kind in READ_WITHOUT_WINDOW:
        config.text_config.layer_types = ["full_attention"] * config.text_config.num_hidden_layers
    return config


def released_names(source: Path, tensors: Collection[str]) -> dict[str, str] | None:
    """Returns the patterns in names of a source's `tensors` that transformers is to replace, for its `key_mapping`:
    segments of trainers, and other names of encoders. None if there are none."""
    found = dict(KEY_MAPPING) if any(undressed(name) != name for name in tensors) else {}
    raw = read_json(source / CONFIG_FILE, ConfigError)
    parts = NAMED_OTHERWISE.get(type_of_family({"model_type": "", **raw}), {})
    return found | {re.escape(other): name for name, other in parts.items()} or None


def reference_class(config: Any, returns: str = LOGITS, *, sees: bool = False) -> Any:
    """Returns transformers' class of automatic models that has a model for a config that returns this
    (`tpuconv.models.common.heads`). For logits it is the class of causal models; of multimodal models it is mostly
    another one, and always if the model `sees`."""
    import transformers
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
    )

    if returns:
        return {SCORES: AutoModelForSequenceClassification, HIDDEN: AutoModel}[returns]
    if sees and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in READ_WHOLE
    if is_causal:
        return AutoModelForCausalLM
    # transformers 5.24 lists some models that hear for none of its tasks.
    known = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if known else getattr(transformers, class_of(config.architectures[0]))


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
        with empty_weights(), without_adapter(source, adapted) as folder:
            model, loaded = reference_class(config, returns, sees=bool(sights)).from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=attention_of(config),
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # named below
                key_mapping=released_names(source, opened.tensors),
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
    seen = _seen(model, sights, dtype) if sights else None
    del model
    gc.collect()
    return Reference(logits, rounding_kl, seen)


def _seen(model: Any, windows: Sequence[SightWindow], dtype: str) -> Reference:
    """Runs transformers' model on prompts with images and sounds. Features are what the text model gets in place of
    placeholders."""
    import torch

    def run() -> list[np.ndarray]:
        with torch.no_grad():
            return [model(**inputs_of(model, window)).logits[0].float().numpy() for window in windows]

    with recorded_embeddings(model) as embedded:
        logits, rounding_kl = run(), None
    features = features_of(model, windows, embedded)
    if dtype != "float32":
        hook = _on_embedded(model, lambda module, embedded, **_: _rounded_otherwise(module, None, embedded))
        rounding_kl = compare_logits([window.ids for window in windows], logits, run(), dtype, {}).mean_kl
        hook.remove()
    return Reference(logits, rounding_kl, features=features)


@contextlib.contextmanager
def recorded_embeddings(model: Any) -> Iterator[list[np.ndarray]]:
    """Within the context, what the text model gets in place of token ids [T, D] is added to the list, for each call."""
    out: list[np.ndarray] = []

    def record(module: Any, embedded: Any, deepstack_features: Any = None, vision_mask: Any = None, **_: Any) -> None:
        # Granite multiplies embeddings and features behind this; our features have the factor
        embedded_TD = embedded[0].float().numpy() * getattr(module, "embedding_multiplier", 1.0)
        if deepstack_features and 0 in deepstack_features:  # of Granite Vision 4, which adds them behind the factor
            embedded_TD[vision_mask[0, :, 0].numpy()] += deepstack_features[0].float().numpy()
        out.append(embedded_TD)

    hook = _on_embedded(model, record)
    try:
        yield out
    finally:
        hook.remove()


def _on_embedded(model: Any, call: Callable[[Any, Any], Any]) -> Any:
    """Returns the handle of a hook: `call` is given the text model, what it gets in place of token ids [B, T, D], and
    its other arguments by name. What it returns stands in the place of the former, unless that is None."""
    text, merging = text_model(model), merging_module(model)
    if merging is not None:
        return merging.register_forward_hook(lambda module, inputs, embedded: call(text, embedded))

    def before(module: Any, inputs: Any, named: dict[str, Any]) -> Any:
        found, others = named.get("inputs_embeds"), {key: x for key, x in named.items() if key != "inputs_embeds"}
        other = None if found is None else call(module, found, **others)
        return None if other is None else (inputs, {**others, "inputs_embeds": other})

    return text.register_forward_pre_hook(before, with_kwargs=True)


def features_of(model: Any, windows: Sequence[SightWindow], embedded: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the features [X, D] of prompts, of what `recorded_embeddings` has of each."""
    found = [each[np.array(window.ids) == window.placeholder] for each, window in zip(embedded, windows, strict=True)]
    if model.config.model_type in ADDS_FEATURES:
        embedding_VD = model.get_input_embeddings().weight.detach().float().numpy()
        found = [each - embedding_VD[window.placeholder] for each, window in zip(found, windows, strict=True)]
    return found


def text_model(model: Any) -> Any:
    """Returns the module within transformers' multimodal model that has the layers of the text."""
    found = getattr(model.base_model, "language_model", None) or model.get_decoder()
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
    sizes = {name: values.numel() for name, values in model.state_dict().items()} if absent else {}
    missing = sorted(name for name in absent if sizes.get(name) != 0)  # a model without shared experts has empty ones
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
    head = model.get_output_embeddings()
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
