"""Checkpoints for tests: random ones from a table alone, and ghosts, complete headers over holes."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.sources.headers import DTYPES

INDEX = "model.safetensors.index.json"


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray | tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file; a tensor given as (dtype, shape) is a hole. The library writes neither holes nor, from numpy,
    bfloat16."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, at = {}, 0
    for name, tensor in tensors.items():
        code, shape = tensor if isinstance(tensor, tuple) else (codes[tensor.dtype], tensor.shape)
        nbytes = prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            if not isinstance(tensor, tuple):
                file.write(np.ascontiguousarray(tensor).tobytes())
        file.truncate(8 + len(text) + at)


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], shards: int = 1) -> Path:
    """config.json and the tensors, dealt to shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names[i::shards]})
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Finite values of every sign and many magnitudes."""
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """A small Qwen3, in the form that files on the Hub have."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        **changes,
    }


def source_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the family's table asks for."""
    from tpuconv.models.registry import find_family

    family = find_family(config)
    bindings = family.table.bind(family.config.from_hf(config))
    return {name: shape for binding in bindings for name, shape in binding.src_shapes().items()}


def random_checkpoint(
    folder: Path, config: Mapping[str, Any], dtype: str = "bfloat16", shards: int = 1, seed: int = 0
) -> Path:
    """What the family's table asks for, with random values."""
    rng = np.random.default_rng(seed)
    tensors = {name: random_tensor(rng, shape, dtype) for name, shape in source_shapes(config).items()}
    return write_checkpoint(folder, config, tensors, shards)


def hollow_checkpoint(folder: Path, config: Mapping[str, Any], shards: int = 1) -> Path:
    """The same in bfloat16 with holes for values: zeros that take no room on the disk and no time to make."""
    tensors = {name: ("BF16", shape) for name, shape in source_shapes(config).items()}
    return write_checkpoint(folder, config, tensors, shards)


def json_headers(folder: Path) -> list[dict[str, Any]]:
    """The headers of all shards as JSON has them: the least that planning a checkpoint can take."""
    headers = []
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            headers.append(json.loads(file.read(length)))
    return headers


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, by the code under test's own header reader but not its transforms."""
    from tpuconv.sources.source import open_source

    source = open_source(folder)
    out = {}
    for info in source.tensors.values():
        data = (folder / info.shard).read_bytes()[info.offset : info.offset + info.nbytes]
        out[info.name] = np.frombuffer(data, DTYPES[info.dtype]).reshape(info.shape)
    return out
