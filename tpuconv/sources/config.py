"""config.json, and what it says of how the weights are encoded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, SourceError
from tpuconv.jsonfile import MAX_BYTES, parse, read_bytes
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILE

ENCODING_KEYS = ("quantization_config", "compression_config")
"""Of config.json; the second one older versions of compressed-tensors wrote."""


def encoding_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how the weights are encoded."""
    return next((config[key] for key in ENCODING_KEYS if config.get(key) is not None), None)


def read_json(path: Path, error: type[ConfigError] | type[SourceError], limit: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON file that must hold an object without duplicate keys.

    Raises:
        error: it is missing, or holds no such object.
        SourceError: it cannot be read, is larger than `limit` bytes, or something else lies in its place.
    """
    if not os.path.lexists(path):
        raise error(f"{path} is missing", hint="give a folder that holds all files of the model, or its Hub id")
    value = parse(read_bytes(path, limit, SourceError), str(path), error)
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; where it does not say how weights are encoded, with what ModelOpt's own file beside it says.

    Raises:
        ConfigError: one of them is no JSON object, or config.json is missing.
        SourceError: one of them cannot be read, or something else lies in its place.
    """
    raw, beside = read_json(path, ConfigError), path.with_name(ENCODING_FILE)
    return with_encoding(raw, beside) if path.name == CONFIG_FILE and os.path.lexists(beside) else raw


def with_encoding(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """A parsed config.json; where it does not say how weights are encoded, with what ModelOpt's own file says.

    Raises:
        ConfigError: the file is no JSON object.
    """
    if encoding_of(raw) is not None:
        return raw
    return raw | {ENCODING_KEYS[0]: {"quant_method": "modelopt", **read_json(path, ConfigError)}}
