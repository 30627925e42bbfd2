"""config.json of DFlash drafts in the formats of speculators and of z-lab, which SGLang reads."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.dflash.family import OF_MODEL, OF_SPECULATORS, OWN_CONFIG, Config
from tpuconv.models.eagle3.family import LAYER_CONFIG, WITHOUT_EFFECT
from tpuconv.models.eagle3.formats import SPECULATORS, VERSION, with_verifier
from tpuconv.models.registry import SPECULATORS_TYPE
from tpuconv.sources.config import DTYPE_KEYS, ENCODING_KEYS

OF_BLOCK = (
    *("architectures", "auto_map", "transformers_version", "draft_vocab_size", "target_hidden_size", "block_size"),
    *("mask_token_id", "is_causal", "input_embedding_scale", "sample_from_anchor", "sliding_window_non_causal"),
    *("num_target_layers", "output_multiplier", "final_logit_softcapping", SPECULATORS_TYPE, OF_MODEL, OF_SPECULATORS),
    *(*WITHOUT_EFFECT, *DTYPE_KEYS, *ENCODING_KEYS),
)
"""Keys of a draft that its layers do not have."""


def keys_of_layers(raw: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Returns the keys of the layers of a draft, without `others`."""
    keys = unnested(raw, LAYER_CONFIG, OWN_CONFIG).items()
    layers = {key: value for key, value in keys if key not in OF_BLOCK and key not in others}
    return {**layers, "model_type": "qwen3", "tie_word_embeddings": False}


def keys_beside(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of dtypes and encodings."""
    return {key: raw[key] for key in (*DTYPE_KEYS, *ENCODING_KEYS) if key in raw}


def speculators_format(
    raw: Mapping[str, Any], config: Config, target: str | None, names: tuple[str, str], layers: Any, **others: Any
) -> dict[str, Any]:
    """Returns a parsed config.json of a draft in the format of speculators.

    Args:
        raw: the parsed config.json of the draft.
        config: the config of the draft.
        target: the name of the model that it drafts for.
        names: the architecture and the type of the draft in the format.
        layers: the keys of its layers.
        others: further keys.

    Raises:
        UsageError: config.json of the format names the target, and there is no name.
        UnsupportedConfig: the format cannot describe the draft.
    """
    if config.input_embedding_scale != 1 or config.is_causal is True:
        raise UnsupportedConfig(
            "the format of speculators has no drafts with input_embedding_scale or with is_causal=True"
        )
    architecture, kind = names
    return {
        "architectures": [architecture],
        SPECULATORS_TYPE: kind,
        "speculators_version": VERSION,
        "speculators_config": with_verifier(raw.get("speculators_config"), target, kind, config.drafts),
        LAYER_CONFIG: layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        OF_SPECULATORS: list(config.state_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        # Of layers without a window it says nothing, but vLLM makes them causal too if it is false.
        "sliding_window_non_causal": all(config.both_ways),
        **others,
        **keys_beside(raw),
    }


def dflash_format(raw: Mapping[str, Any], form: str, target: str | None) -> dict[str, Any]:
    """Returns a parsed config.json in another format; arguments are as of `tpuconv.models.eagle3.formats.in_format`.

    Raises:
        UsageError: config.json of the format names the target, and there is no name.
        UnsupportedConfig: the format cannot describe the draft.
    """
    config = Config.from_hf(raw)
    if config.is_muse:
        raise UnsupportedConfig(
            "Muse Glimmer's assistant has a format of its own, which vLLM and transformers read",
            hint="leave out `form=`",
        )
    layers = keys_of_layers(raw)
    if form == SPECULATORS:
        return speculators_format(raw, config, target, ("DFlashDraftModel", "dflash"), layers)
    if config.draft_vocab_size not in (None, config.vocab_size) or 0 in config.state_layers:
        raise UnsupportedConfig(
            "z-lab's format has no drafts with a part of the vocabulary, or that read embeddings",
            hint=f'give `form="{SPECULATORS}"`',
        )
    block = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    causal = {} if config.is_causal is None else {"is_causal": config.is_causal}
    scale = {} if config.input_embedding_scale == 1 else {"input_embedding_scale": config.input_embedding_scale}
    states = {OF_MODEL: [layer - 1 for layer in config.state_layers]}
    return {
        "architectures": ["DFlashDraftModel"],
        **layers,
        **causal,
        OWN_CONFIG: {**block, **states, **scale},
        **keys_beside(raw),
    }
