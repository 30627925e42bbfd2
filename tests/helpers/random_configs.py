"""Configs of tiny models with some of their keys changed at random."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st

from helpers.families import CASES, SIZES, Case

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "hidden_size": (48, 72, 96),
    "num_attention_heads": (6, 12),
    "vocab_size": (103, 120, 137),
    "hidden_size_per_layer_input": (0, 10, 16),  # a norm of one number is its sign, which rounding turns
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"), (1, 2, 3, 6)),
}
"""What a key of a text model may be where not any number makes a model."""

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh")
"""Some of transformers' ACT2FN."""

UNTOUCHED = {
    *("model_type", "architectures", "dtype", "transformers_version", "vision_config", "audio_config", "text_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "is_decoder", "id2label"),
    *("max_position_embeddings", "problem_type", "label2id", "output_attentions", "output_hidden_states"),
    *("return_dict", "is_encoder_decoder", "chunk_size_feed_forward"),
}
"""Keys that say nothing of the mathematics, or without which no model is made."""

Strategy = st.SearchStrategy[Any]


@cache
def _source(kind: type) -> str:
    """The code of transformers, or of a release, that reads a class of configs; "" of None."""
    if kind is type(None):
        return ""
    names = [kind.__module__, kind.__module__.replace("configuration_", "modeling_")]
    return "\n".join(inspect.getsource(import_module(name)) for name in dict.fromkeys(names) if find_spec(name))


@cache
def compared_texts(kind: type, key: str) -> tuple[str, ...]:
    """The texts that transformers' code compares a key with, or to which its type is limited."""
    source, found = _source(kind), set[str]()
    found.update(re.findall(rf"\b{key}\s*[!=]=\s*[\"']([\w-]+)[\"']", source))
    for several in re.findall(rf"\b{key}\s+(?:not )?in\s+[\[({{]([^])}}]*)[\])}}]", source):
        found.update(re.findall(r"[\"']([\w-]+)[\"']", several))
    if get_origin(hint := type_of(kind, key)) is Literal:
        found.update(each for each in get_args(hint) if isinstance(each, str))
    return tuple(sorted(found))


def type_of(kind: type, key: str) -> Any:
    """The type of a key in transformers' class; None without one."""
    field = getattr(kind, "__dataclass_fields__", {}).get(key)
    return None if field is None else field.type


def values_of(kind: type, key: str, old: Any) -> Strategy | None:
    """Other values of a key of a class of configs; None where none are known."""
    options = list(_options(kind, key, old))
    if type(None) in get_args(type_of(kind, key)):
        if old is not None:
            options.append(st.none())
        elif int in get_args(type_of(kind, key)):
            options.append(st.sampled_from([1, 2, 4, 8, 12, 16]))
        elif float in get_args(type_of(kind, key)):
            options.append(st.sampled_from([0.5, 1.5, 4.0]))
        elif bool in get_args(type_of(kind, key)):
            options.append(st.booleans())
    return st.one_of(options) if options else None


def _options(kind: type, key: str, old: Any) -> Iterator[Strategy]:
    match old:
        case bool():
            yield st.just(not old)
        case int():
            yield st.sampled_from([old + 1, max(1, old - 1), 2 * old, max(1, old // 2), old + 8])
        case float():
            yield st.sampled_from([2 * old, old / 2, old + 0.1])
        case str():
            others = ACTIVATIONS if re.search("act$|activation", key) else compared_texts(kind, key)
            if others := tuple(text for text in others if text != old):
                yield st.sampled_from(others)
        case dict() if "rope_type" in old:
            yield _ropes(old)
        case dict() if old and all(isinstance(each, dict) and "rope_type" in each for each in old.values()):
            yield st.fixed_dictionaries({name: _ropes(each) for name, each in old.items()})
        case dict():
            inner = {name: values_of(type(None), name, value) for name, value in old.items() if name not in UNTOUCHED}
            for name, values in inner.items():
                if values is not None:
                    yield st.builds(lambda value, name=name: {**old, name: value}, values)
        case list() if old and all(isinstance(each, str) for each in old):
            yield st.permutations(old)
            yield st.lists(st.sampled_from(sorted(set(old))), min_size=len(old), max_size=len(old))
        case list() if old and all(type(each) is int for each in old):
            yield st.permutations(old)
            yield st.lists(st.sampled_from([*old, old[0] + 1, max(0, old[0] - 1)]), min_size=1, max_size=len(old))


@st.composite
def _ropes(draw: st.DrawFn, old: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ["default", "linear", "yarn", "llama3", "dynamic"]
    kind = draw(st.sampled_from(kinds if old["rope_type"] in kinds else [old["rope_type"], "linear"]))
    out = {key: value for key, value in old.items() if key in ("rope_theta", "partial_rotary_factor", "mrope_section")}
    out["rope_type"] = kind
    if old.get("rope_theta") is not None:  # null: no rotary positions
        out["rope_theta"] = draw(st.sampled_from([old["rope_theta"], 4 * old["rope_theta"], 100.0]))
    if kind not in ("default", "axial"):
        out["factor"] = 4.0
    if kind in ("yarn", "llama3"):
        out["original_max_position_embeddings"] = 12
    if kind == "llama3":
        out |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        further = {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7}
        out |= {key: further[key] for key in draw(st.sets(st.sampled_from(sorted(further)), max_size=2))}
    if out.get("partial_rotary_factor") is not None:
        out["partial_rotary_factor"] = draw(st.sampled_from([out["partial_rotary_factor"], 0.25, 0.5, 1.0]))
    return out


def changes_of(draw: st.DrawFn, config: Any, choices: Mapping[str, tuple[Any, ...]], most: int) -> dict[str, Any]:
    """Other values of one key of a config of transformers, up to `most`."""
    known: dict[str, Strategy] = {}
    for key, old in config.to_dict().items():
        if key in choices:
            known[key] = st.sampled_from(choices[key])
        elif key not in UNTOUCHED and not key.startswith("_"):
            values = values_of(type(config), key, old)
            if values is not None:
                known[key] = values
    chosen = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=most, unique=True)) if known else []
    return {key: draw(known[key]) for key in chosen}


@st.composite
def changed_cases(draw: st.DrawFn, family: str) -> Case:
    """Cases of a family with one to four keys of the text model's config changed. transformers may refuse them."""
    case = draw(st.sampled_from([case for case in CASES if case.family == family]))
    config = case.hf_config().get_text_config()
    changed, keys = changes_of(draw, config, CHOICES, 4), config.to_dict()
    names = case.traits.released_keys  # a key without a name there is said by keys that only the release has
    changed = {key: value for key, value in changed.items() if names.get(key, key)}
    if "hidden_size" in changed:  # else sums are larger, and attention so sharp that it enlarges what float32 rounds
        usual = (SIZES | dict(case.config))["initializer_range"]
        changed["initializer_range"] = usual * (keys["hidden_size"] / changed["hidden_size"]) ** 0.5
    if "index_topk" in keys:  # all tokens: of fewer, scores that are equal or nearly so leave either one
        changed["index_topk"] = 64
    if keys.get("indexer_budget"):
        changed["indexer_budget"] = 64 * changed.get("indexer_compress_ratio", keys["indexer_compress_ratio"])
    return replace(case, id=f"{case.id}-changed", config=dict(case.config) | changed)
