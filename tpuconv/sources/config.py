"""config.json, and what it says about how the weights are encoded."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tpuconv.errors import ConfigError, SourceError
from tpuconv.jsonfile import MAX_BYTES, parse, read_bytes
from tpuconv.location import Location
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILES
from tpuconv.storage.places import is_there

ENCODING_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json; older versions of compressed-tensors wrote the second one."""
MLX_KEY = "quantization"
"""The key of MLX's description of encoded weights, of which only newer files have a copy under the first of
`ENCODING_KEYS`."""
MLX_METHOD = "mlx"
"""The method that `encoding_of` adds to a description by MLX, which names none."""
EXPERT_KEY = "expert_dtype"
"""The key of the encoding of experts, if other weights have another encoding."""

DTYPE_KEYS = ("dtype", "torch_dtype")
"""The keys of the dtype in config.json; files of transformers before 5 have the second."""
DTYPE_NAME = re.compile(r"(?i)(torch\.)?(u?int\d+|b?float\d+\w*|half|float|double|bool|auto|none)")
"""A dtype of PyTorch, which transformers looks up by its name."""


INSIDE_KEYS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys of config.json whose objects describe the text model inside a multimodal one; the second may be in the first."""


def parts_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Returns a parsed config.json, and the objects in it that describe its text model: the last one is the text
    model's."""
    parts = [config]
    for key in INSIDE_KEYS:
        if isinstance(inner := parts[-1].get(key), Mapping):
            parts.append(inner)
    return tuple(parts)


def changed(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]], keys: Sequence[str] = INSIDE_KEYS
) -> dict[str, Any]:
    """Returns a parsed config.json with each of `parts_of` it changed."""
    out = change(config)
    for at, key in enumerate(keys, 1):
        if isinstance(inner := config.get(key), Mapping):
            return out | {key: changed(inner, change, keys[at:])}
    return out


def encoding_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the description, in a parsed config.json, of how the weights are encoded; None if there is none. Some
    multimodal models have it in `text_config`. DeepSeek V4 has `EXPERT_KEY` beside it."""
    places = parts_of(config)
    keys = (MLX_KEY, *ENCODING_KEYS)
    of_mlx = next((place[key] for place in places for key in keys if _is_of_mlx(place.get(key))), None)
    if of_mlx is not None:  # whose changes depend on the model
        return {"quant_method": MLX_METHOD, "model_type": config.get("model_type"), **of_mlx}
    found = next((place[key] for place in places for key in ENCODING_KEYS if place.get(key) is not None), None)
    beside = config.get(EXPERT_KEY)
    return found if beside is None or not isinstance(found, Mapping) else {EXPERT_KEY: beside, **found}


def without_encoding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json without the description of how the weights are encoded."""

    def plain(part: Mapping[str, Any]) -> dict[str, Any]:
        is_encoding = {key: key in ENCODING_KEYS or (key == MLX_KEY and _is_of_mlx(part[key])) for key in part}
        return {key: value for key, value in part.items() if not is_encoding[key]}

    return changed(config, plain)


def _is_of_mlx(description: Any) -> bool:
    """Returns True if MLX wrote a description: it has these keys, and names no method."""
    if not isinstance(description, Mapping) or not {"bits", "group_size"} <= description.keys():
        return False
    return description.get("quant_method") in (None, MLX_METHOD)


def stated_dtype(config: Mapping[str, Any]) -> str:
    """Returns the dtype of plain weights that a parsed config.json states: "float32", or else "bfloat16", which has the
    size of float16 too."""
    stated = [part[key] for part in parts_of(config) for key in DTYPE_KEYS if isinstance(part.get(key), str)]
    return "float32" if stated and stated[-1].removeprefix("torch.") == "float32" else "bfloat16"


def with_dtype(config: Mapping[str, Any], dtype: str) -> Mapping[str, Any]:
    """Returns a parsed config.json with another dtype of the weights, such as that which they were cast to."""
    out = changed(config, lambda part: {key: dtype if key in DTYPE_KEYS else value for key, value in part.items()})
    return out if set(DTYPE_KEYS) & set(config) else out | {DTYPE_KEYS[0]: dtype}


def read_json(path: Location, error: type[ConfigError] | type[SourceError], limit: int = MAX_BYTES) -> dict[str, Any]:
    """Returns a JSON file that must hold an object without duplicate keys.

    Raises:
        error: it is missing, or holds no such object.
        SourceError: it cannot be read, is larger than `limit` bytes, or is not a regular file.
    """
    if not is_there(path):
        raise error(f"{path} is missing", hint="give a folder that holds all files of the model, or its Hub id")
    again = "download it again; if you wrote it, compare it with the file of the release"
    try:
        value = parse(read_bytes(path, limit, SourceError), str(path), error)
    except error as e:
        e.hint = e.hint or again
        raise
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object", hint=again)
    return value


def read_config(path: Location) -> dict[str, Any]:
    """Returns a parsed config.json. If it does not say how the weights are encoded, the description beside it is added.

    Raises:
        ConfigError: config.json is missing or says a dtype that does not exist, or a file holds no JSON object.
        SourceError: one of them cannot be read, or is not a regular file.
    """
    raw = read_json(path, ConfigError)
    if path.name != CONFIG_FILE:
        return raw
    for key, value in ((key, part.get(key)) for part in parts_of(raw) for key in DTYPE_KEYS):
        if isinstance(value, str) and not DTYPE_NAME.fullmatch(value):
            raise ConfigError(f"{path}: {key}={value[:40]!r} is no dtype of PyTorch", hint="bfloat16 is the usual one")
    return with_encoding(raw, path.parent)


def with_encoding(raw: dict[str, Any], folder: Location, names: Collection[str] = ENCODING_FILES) -> dict[str, Any]:
    """Returns a parsed config.json; if it does not say how the weights are encoded, with the first description of
    `ENCODING_FILES` in the folder, of those in `names`.

    Raises:
        ConfigError: a file holds no JSON object.
    """
    if encoding_of(raw) is not None:
        return raw
    for name in ENCODING_FILES:
        if name in names and is_there(folder / name):
            found = _description(name, read_json(folder / name, ConfigError))
            if found is not None:
                return raw | {ENCODING_KEYS[0]: found}
    return raw


def _description(name: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the `quantization_config` that the content of a file stands for; None if it is of something else, such as
    a conversion to ONNX."""
    if name == ENCODING_FILES[0]:
        return {"quant_method": "modelopt", **content}
    if isinstance(content.get("quant_method"), str):
        return dict(content)
    if {"w_bit", "q_group_size"} <= content.keys():
        return {"quant_method": "awq", "bits": content["w_bit"], "group_size": content["q_group_size"], **content}
    return {"quant_method": "gptq", **content} if {"bits", "group_size"} <= content.keys() else None
