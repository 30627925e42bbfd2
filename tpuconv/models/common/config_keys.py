"""Keys of config.json that no family reads: they have no effect on logits, or the reference does not read them."""

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError, shorten
from tpuconv.jsonfile import short
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.sources.config import changed, parts_of

NO_EFFECT = frozenset(
    {
        # description and origin
        *("_name_or_path", "name_or_path", "architectures", "model_type", "dtype", "torch_dtype", "tokenizer_class"),
        *("transformers_version", "transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version"),
        "auto_map",
        # storage of weights, read by tpuconv.encodings.decode
        *("quantization_config", "compression_config", "quantization"),
        # training
        *(
            "attention_dropout",
            "hidden_dropout",
            "residual_dropout",
            "embedding_dropout",
            "output_dropout",
            "resid_pdrop",
        ),
        "embd_pdrop",
        *("initializer_range", "pretraining_tp", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        *("router_aux_loss_coef", "router_jitter_noise", "attn_pdrop", "task_specific_params", "summary_type"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_use_proj"),
        *("id2label", "label2id", "num_labels", "problem_type", "ep_size", "aux_loss_alpha", "seq_aux"),
        *("router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise", "for_llm_compressor"),
        *("classifier_dropout", "mtp_loss_scaling_factor", "linear_a_log_min", "linear_a_log_max", "linear_dt_min"),
        *("linear_dt_max", "linear_dt_init_floor", "learnable_sink_init", "ignore_index"),
        # layers for multi-token prediction, which the logits do not depend on
        *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "index_share_for_mtp_iteration"),
        # the placeholders of an image, which prompts have
        "num_image_tokens",
        # generation, and options of the forward pass
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "eod_token_id", "use_cache", "max_length"),
        *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "output_attentions"),
        *("output_hidden_states", "min_length", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "cache_implementation"),
        *("num_return_sequences", "output_scores", "typical_p", "return_dict_in_generate", "remove_invalid_values"),
        *("output_router_logits", "tf_legacy_loss", "return_dict", "torchscript", "attn_implementation"),
        *("_attn_implementation", "_attn_implementation_autoset", "num_logits_to_keep", "max_sequence_length"),
        # of layers with a state: how it is computed, and initial values
        *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "z_loss_coefficient"),
        *("time_step_max", "time_step_floor", "rescale_prenorm_residual", "moe_shared_expert_overlap"),
        *("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
        *("mamba_dt_max", "mamba_dt_init_floor", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    }
)
"""Keys that do not change the logits of a forward pass."""

VALUES_OF_ALL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "use_bfloat16": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
}
"""Values that transformers gives keys of each config, also of one that has `text_config`; no others are implemented."""

SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    **VALUES_OF_ALL,
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Keys for which only these values are implemented, in every family. The key may be absent."""


CAUSAL: Mapping[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False, None)}
"""Gemma's key for tokens that see those behind them."""


def ignored_keys(
    raw: Mapping[str, Any], known: Collection[str], only: Mapping[str, tuple[Any, ...]], model_type: str
) -> dict[str, Any]:
    """Returns the keys of a parsed config.json, with their values, that are neither `known` nor in `only` nor read by
    the reference. If the reference's keys are not known for a model type, every unknown key is an error.

    Raises:
        UnsupportedConfig: see `DecoderConfig.ignored_keys`.
    """
    read = keys_of_reference(model_type)
    faults: list[str] = []
    ignored: dict[str, Any] = {}
    for key, value in raw.items():
        if key in only:
            if value not in only[key]:
                allowed = " or ".join(map(repr, only[key]))
                faults.append(f"{key}={short(value)} is not implemented for {model_type}, only {allowed}")
        # A null means that the key is absent; a False may have an effect.
        elif value is not None and key not in known and key not in NO_EFFECT and key not in ROPE_KEYS:
            if read is not None and key not in read and len(key) <= LONGEST_KEY and len(ignored) < MOST_IGNORED:
                ignored[key] = value
            else:  # finding a similar key takes time
                near = near_key(key, known, only) if len(faults) < MOST_HINTS else ""
                faults.append(f"{key[:100]}={short(value)}{near}")
    if faults:
        keys = [fault.partition("=")[0] for fault in faults[:3]]
        raise UnsupportedConfig(
            f"config.json has keys or values that {model_type} does not support",
            details=shorten(faults),
            hint=f"if you know that they do not change the model, convert without them: `allow_config={keys}`",
        )
    return ignored


@cache
def _reference() -> dict[str, Any]:
    """Returns the keys of config.json that transformers reads; tools/reference_keys.py writes them."""
    table: dict[str, Any] = json.loads((files("tpuconv") / "models" / "common" / "reference_keys.json").read_bytes())
    return table


@cache
def keys_of_reference(model_type: str) -> frozenset[str] | None:
    """Returns the keys of config.json that transformers reads for a model type; None if they are not known."""
    table = _reference()
    return frozenset(table["shared"] + table[model_type]) if model_type in table else None


def aliases_of_reference(model_type: str) -> Mapping[str, str]:
    """Returns the other names of keys that transformers knows for a model type, and the keys."""
    aliases: dict[str, str] = _reference()["aliases"].get(model_type, {})
    return aliases


MOST_IGNORED, LONGEST_KEY = 200, 200
"""The largest number of ignored keys, and the largest length of one. A config.json with more is an error."""

MOST_HINTS = 20
"""The number of unknown keys for which a similar known key is suggested."""


def near_key(key: str, *known: Collection[str]) -> str:
    """Returns the key of these that is most like `key`, as the end of a message; empty if none is."""
    near = get_close_matches(key[:100], [*(name for names in known for name in names), *ROPE_KEYS], n=1)
    return f" (near: {near[0]})" if near else ""


def without_keys(raw: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Returns a parsed config.json without these keys, which are removed from its `text_config` too."""
    return changed(raw, lambda part: {key: value for key, value in part.items() if key not in keys})


def unnested(raw: Mapping[str, Any], *objects: str) -> dict[str, Any]:
    """Returns a parsed config.json with the keys of some of its objects beside its own, which win.

    Raises:
        ConfigError: one of them is no object.
    """
    out: dict[str, Any] = {}
    for key in objects:
        inner = raw.get(key)
        if not isinstance(inner, Mapping | None):
            raise ConfigError(f"config.json: {key}={short(inner)} is no object")
        out |= inner or {}
    return out | {key: value for key, value in raw.items() if key not in objects}


def given_keys(raw: Mapping[str, Any], allow: Collection[str]) -> dict[str, Any]:
    """Returns the keys and values of a parsed config.json and of its `text_config`.

    Raises:
        UsageError: a key of `allow` is not among them.
    """
    given = {key: value for part in reversed(parts_of(raw)) for key, value in part.items()}
    for key in allow:
        if key not in given:
            raise UsageError(
                f"config.json has no key {short(key)}{near_key(key, given)}",
                hint="leave `allow_config=` out for this key",
            )
    return given
