"""Keys of the config.json of encoders and projectors: their other names, and values that are not implemented."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.key_types import object_of

TEXT_ALONE = "convert the text model alone: `text_only=True`"
"""A hint."""
ENCODER_ACTS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "silu", "swish", "relu")
"""The activations of towers and projectors, as config.json names them."""


def check_acts(config: Any) -> None:
    """Raises UnsupportedConfig if the config of a tower or a projector names an activation that no tower has."""
    for key, value in vars(config).items():
        if key.endswith(("_act", "_activation")) and value not in ENCODER_ACTS:
            raise UnsupportedConfig(f"{key}={short(value)} of an encoder is not implemented", hint=TEXT_ALONE)


def check_objects(outer: Mapping[str, Any], implemented: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UnsupportedConfig if a key of an object of config.json is not the one value that is implemented.

    Args:
        outer: the parsed config.json.
        implemented: the objects, and the values of their keys.
    """
    for name, values in implemented.items():
        given = object_of(outer, name)
        for key, value in values.items():
            if (found := given.get(key, value)) != value:
                raise UnsupportedConfig(f"config.json: {name}.{key}={short(found)} is not implemented", hint=TEXT_ALONE)


def in_our_keys(raw: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Returns an object of config.json with keys in place of their other names.

    Raises:
        ConfigError: two names of a key have different values.
    """
    out: dict[str, Any] = {}
    for given, value in raw.items():
        key = aliases.get(given, given)
        if key in out and out[key] != value:
            raise ConfigError(f"config.json: {key} of an encoder is {short(out[key])}, and by {given} {short(value)}")
        out[key] = value
    return out


def rope_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the rotary positions of an object of config.json.

    Raises:
        UnsupportedConfig: their kind is not implemented.
        ConfigError: they are not an object.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_parameters={short(rope)} is not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("axial", "default"):
        raise UnsupportedConfig(f"rope_type={short(kind)} of an encoder is not implemented", hint=TEXT_ALONE)
    return dict(rope)
