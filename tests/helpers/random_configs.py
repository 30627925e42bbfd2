"""Configs of tiny models with some of their keys changed at random."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from helpers.families import CASES, SIZES, Case

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "hidden_size": (48, 72, 96),
    "num_attention_heads": (6, 12),
    "vocab_size": (103, 120, 137),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"), (1, 2, 3, 6)),
}
"""What a key may be where not any number makes a model."""

UNTOUCHED = {
    *("model_type", "architectures", "dtype", "transformers_version", "vision_config", "audio_config", "text_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "is_decoder", "id2label"),
    *(
        "max_position_embeddings",
        "problem_type",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    ),
}
"""Keys that say nothing of the mathematics, or without which no model is made."""


def _values(key: str, old: Any) -> st.SearchStrategy[Any] | None:
    if key in CHOICES:
        return st.sampled_from(CHOICES[key])
    match old:
        case bool():
            return st.just(not old)
        case int():
            return st.sampled_from([old + 1, max(1, old - 1), 2 * old, max(1, old // 2), old + 8])
        case float():
            return st.sampled_from([2 * old, old / 2, old + 0.1])
        case dict() if "rope_type" in old:
            return st.builds(_rope, st.just(old), st.sampled_from(["default", "linear", "yarn", "llama3", "dynamic"]))
        case list() if old and all(isinstance(kind, str) for kind in old):
            return st.permutations(old)
    return None


def _rope(old: Mapping[str, Any], kind: str) -> dict[str, Any]:
    out = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old} | {"rope_type": kind}
    if kind != "default":
        out["factor"] = 4.0
    if kind in ("yarn", "llama3"):
        out["original_max_position_embeddings"] = 12
    if kind == "llama3":
        out |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return out


@st.composite
def changed_cases(draw: st.DrawFn, family: str) -> Case:
    """Cases of a family with one to four keys of the text model's config changed. transformers may refuse them."""
    case = draw(st.sampled_from([case for case in CASES if case.family == family]))
    keys = case.hf_config().get_text_config().to_dict()
    values = {key: _values(key, old) for key, old in keys.items() if key not in UNTOUCHED}
    known = sorted(key for key, strategy in values.items() if strategy is not None)
    chosen = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
    changed = {key: draw(values[key]) for key in chosen}
    if "hidden_size" in changed:  # else sums are larger, and attention so sharp that it enlarges what float32 rounds
        changed["initializer_range"] = (
            SIZES["initializer_range"] * (keys["hidden_size"] / changed["hidden_size"]) ** 0.5
        )
    if "index_topk" in keys:  # all tokens: of fewer, scores that are equal or nearly so leave either one
        changed["index_topk"] = 64
    if keys.get("indexer_budget"):
        changed["indexer_budget"] = 64 * changed.get("indexer_compress_ratio", keys["indexer_compress_ratio"])
    return replace(case, id=f"{case.id}-changed", config=dict(case.config) | changed)
