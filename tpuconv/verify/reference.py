"""Transformers' model of a source checkpoint, which the converted one is compared with."""

import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.common.heads import HIDDEN, LOGITS, SCORES
from tpuconv.sources.config import read_config, read_json
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILE, INDEX_FILE
from tpuconv.sources.source import open_source
from tpuconv.verify.logits import compare_logits

READ_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "phi4mm": "phi4_multimodal"}
"""Model types for which transformers has no class of its own (it would need remote code), and the model type with the
same mathematics that is used instead."""

READ_WITHIN: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "step3p5": ("step3p7", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28})
}
"""Model types that transformers has as text models of multimodal ones alone: the type of that, and the `vision_config`
of a small one. What sees is not used."""

READ_ALONE = frozenset({"gemma3n"})
"""Multimodal model types of whose checkpoints transformers reads the text model by itself. For what sees it would need
a package for images, timm."""

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


def reference_config(source: Path) -> Any:
    """Returns transformers' config object of the source.

    Raises:
        UnsupportedConfig: transformers does not know the type of the model.
    """
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    raw = read_json(source / CONFIG_FILE, ConfigError)
    if raw.get("model_type") in READ_WITHIN:
        return whole_config(raw)
    if (other := READ_AS.get(raw.get("model_type", ""))) is None:
        if (kind := raw.get("model_type")) not in CONFIG_MAPPING:
            raise UnsupportedConfig(
                f"transformers {transformers.__version__} has no model of type {kind!r} to compare with",
                hint="try another version of transformers; `tpuconv verify` alone compares with the checksums",
            )
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.model_type in READ_ALONE:
            config.text_config.tie_word_embeddings = config.tie_word_embeddings
            return config.text_config
        return getattr(config, "thinker_config", config)  # the model of which returns logits; that around it speaks
    return AutoConfig.for_model(other, **{k: v for k, v in raw.items() if k not in ("model_type", "auto_map")})


def reference_class(config: Any, returns: str = LOGITS) -> Any:
    """Returns transformers' class of automatic models that has a model for a config that returns this
    (`tpuconv.models.common.heads`). For logits it is that of causal models; of multimodal models, of which the text is
    computed, it is mostly another one."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSequenceClassification,
    )

    if returns:
        return {SCORES: AutoModelForSequenceClassification, HIDDEN: AutoModel}[returns]
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in READ_WHOLE
    return AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM


def attention_of(config: Any) -> str:
    """Returns in which of transformers' forms of attention the model of a config is computed. With "eager" transformers
    5.23 adds the biases of Falcon's ALiBi twice: to the scores, and again with the mask."""
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Suppresses torch's warning about weights without elements, which a model without shared experts has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


class Reference(NamedTuple):
    """What transformers' model returns.

    Attributes:
        logits: [T, V] in float32 for each prompt; of a model that returns them, hidden states [T, D] or scores [1, O].
        rounding_kl: how much one rounding changes: the mean divergence in nats from the logits with each number of the
            tokens' embeddings moved by half a spacing, up or down, and rounded again. None of other models than those
            of logits, and in float32.
    """

    logits: list[np.ndarray]
    rounding_kl: float | None


def reference(source: Path, prompts: Sequence[Sequence[int]], dtype: str, returns: str = LOGITS) -> Reference:
    """Runs transformers' model of a source checkpoint.

    Raises:
        UsageError: transformers would read quantized values as weights, or needs a package to read them.
    """
    path = source / CONFIG_FILE
    if read_config(path) != read_json(path, ConfigError):
        raise UsageError(
            f"transformers would read the quantized values of {source} as weights: the encoding is described in "
            f"{ENCODING_FILE}, which transformers does not read",
            hint="use --layerwise, which gives transformers the decoded weights",
        )
    if (source / INDEX_FILE).exists():
        open_source(source)  # refuses an index with `../` in a file name, which transformers would follow
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = reference_config(source)
    try:
        with empty_weights():
            model = (
                reference_class(config, returns)
                .from_pretrained(
                    source,
                    config=config,
                    dtype=getattr(torch, dtype),
                    attn_implementation=attention_of(config),
                    trust_remote_code=False,
                    use_safetensors=True,
                )
                .eval()
            )
    except ImportError as e:
        raise UsageError(
            f"transformers cannot load {source}: {str(e).strip().partition(chr(10))[0]}",
            hint="install the package, or use --layerwise, which gives transformers the decoded weights",
        ) from e

    logits, rounding_kl = list(_outputs(model, prompts, returns)), None
    if returns == LOGITS and dtype != "float32":
        hook = model.get_input_embeddings().register_forward_hook(_rounded_otherwise)
        rounding_kl = compare_logits(prompts, logits, _outputs(model, prompts, returns), dtype, {}).mean_kl
        hook.remove()
    del model
    gc.collect()
    return Reference(logits, rounding_kl)


def _outputs(model: Any, prompts: Sequence[Sequence[int]], returns: str) -> Iterator[np.ndarray]:
    import torch

    for ids in prompts:
        with torch.no_grad():
            out = model(torch.tensor([list(ids)]))
        found = out.last_hidden_state[0] if returns == HIDDEN else out.logits
        yield (found[0] if found.ndim == 3 else found).float().numpy()


def _rounded_otherwise(module: Any, inputs: Any, embedded: Any) -> Any:
    """Moves each number by half a spacing, up or down, and rounds it: a hook of a module of embeddings."""
    import torch

    up = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    half = torch.finfo(embedded.dtype).eps / 2
    return (embedded.float() * torch.where(up, 1 + half, 1 - half)).to(embedded.dtype)
