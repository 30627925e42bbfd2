"""The keys of rotary positions in config.json: the keys of transformers 5, and the keys of older programs.

transformers 5 writes `rope_parameters` alone. Programs that read `rope_theta` and `rope_scaling` take their own default
without them, and compute other logits without an error.
"""

from collections.abc import Mapping
from typing import Any

OLDER_NAMES = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
"""Parameters that are keys of config.json itself in the older form."""
_OF_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
OWN_OLDER_NAMES = {"gpt_neox": _OF_NEOX, "gpt_neox_japanese": _OF_NEOX}
"""The same for a `model_type` that has other ones."""
_WITH_LOCAL_BASE = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
BASES = {
    "gemma3_text": _WITH_LOCAL_BASE,
    "gemma3n_text": _WITH_LOCAL_BASE,
    "olmo3": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
}
"""By `model_type` where each type of layers has parameters of its own: the older key of its base. The scaling is that
of full attention."""


def with_older_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the older keys of rotary positions, in the configs of its parts too. They are left out
    where they cannot say the same as `rope_parameters`, or the config has others already."""
    whole = {key: with_older_rope_keys(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    older = _older(config)
    return whole | older if _holds(config, older) else whole


def without_older_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json without the older keys that say the same as `rope_parameters`: the inverse."""
    older = _older(config)
    said_twice = older if _holds(config, older) else {}
    return {
        key: without_older_rope_keys(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in said_twice
    }


def _holds(config: Mapping[str, Any], older: Mapping[str, Any]) -> bool:
    """Returns True if a config has no other values of these keys."""
    return all(config.get(key) in (None, value) for key, value in older.items())


def _older(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters, kind = config.get("rope_parameters"), str(config.get("model_type"))
    if not isinstance(parameters, Mapping):
        return {}
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        return _of_one_type(parameters, OWN_OLDER_NAMES.get(kind, OLDER_NAMES))
    if parameters.keys() != BASES.get(kind, {}).keys():
        return {}
    if not all(isinstance(value, Mapping) for value in parameters.values()):  # a type of layers with the defaults
        return {}
    full, sliding = (_of_one_type(parameters[name], {"rope_theta": key}) for name, key in BASES[kind].items())
    says_the_same = "rope_scaling" not in sliding and all(
        full.get(key, sliding[key]) == sliding[key] for key in sliding
    )
    return full | sliding if says_the_same else {}


def _of_one_type(parameters: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    older = {key: parameters[name] for name, key in names.items() if name in parameters}
    scaling = {name: value for name, value in parameters.items() if name not in names}
    return older if scaling in ({}, {"rope_type": "default"}) else older | {"rope_scaling": scaling}
