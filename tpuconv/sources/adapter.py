"""Reads LoRA adapters as PEFT 0.21 writes them (arXiv:2106.09685): adapter_config.json and adapter_model.safetensors.

Each pair of matrices A [R, in] and B [out, R] changes a weight by B A times a factor: alpha / R, or alpha / sqrt(R)
(rsLoRA, arXiv:2312.03732). What changes weights in another way is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.errors import ConfigError, SourceError, UnsupportedConfig, UsageError, shorten
from tpuconv.jsonfile import Each, Optional, check, parse, read_bytes
from tpuconv.layout import Shape
from tpuconv.patterns import check_patterns
from tpuconv.sources.headers import DTYPES, TensorInfo, read_header
from tpuconv.storage.hashes import hash_bytes, hash_file, stamp

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
REFUSED = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "use_qalora",
    "megatron_config",
    "target_parameters",
    "modules_to_save",
    "alora_invocation_tokens",
)
"""Keys that change weights in a way that is not implemented, unless they are false or empty."""
MAX_ADAPTER_CONFIG_BYTES = 1 << 20
_CONFIG = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    "alpha_pattern": Optional((Each(float), None)),
    "use_rslora": Optional((bool, None)),
}
_PART = re.compile(r"(.*)\.lora_(embedding_)?([AB])(?:\.weight)?")


@dataclass(frozen=True)
class AdapterFile:
    """The file of an adapter's matrices, with the stamp that it had when it was read."""

    path: Path
    stamp: tuple[int, ...]

    def check_unchanged(self) -> None:
        """Raises SourceError if the file was changed or replaced."""
        try:
            same = stamp(self.path.stat()) == self.stamp
        except OSError:
            same = False
        if not same:
            raise SourceError(f"{self.path} was changed while it was read", hint="run the command again")


@dataclass(frozen=True)
class LowRank:
    """The change of a weight: `left` [rows, R] times `right` [R, columns], times `scaling`. Both are stored, perhaps
    with their axes swapped, and are read when they are needed. PEFT computes changes in float32; those of embeddings it
    rounds to the dtype of the weight before it adds them (`rounded`)."""

    left: np.ndarray
    right: np.ndarray
    scaling: float
    file: AdapterFile
    rounded: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the weight."""
        return self.left.shape[0], self.right.shape[1]


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read.

    Attributes:
        name: as the user gave it.
        weight: by which its changes are multiplied.
        digest: hash of its two files.
        changes: by the name of the tensor.
    """

    name: str
    weight: float
    digest: str
    changes: Mapping[str, LowRank]

    def to_json(self) -> dict[str, Any]:
        """What the manifest says about it."""
        return {"name": self.name, "weight": self.weight, "xxh3_128": self.digest}


def read_adapter(given: str) -> Adapter:
    """Reads the adapter of a folder or a Hub id, perhaps followed by a colon and a weight: `my-lora:0.5`.

    Raises:
        UsageError: there is no such adapter, or the weight is no number.
        ConfigError: adapter_config.json is malformed.
        UnsupportedConfig: it changes weights in a way that is not implemented.
        SourceError: the weights are damaged, or some of them are not understood.
    """
    place, weight = _parsed(given)
    folder = _folder(place)
    path = folder / ADAPTER_CONFIG
    data = read_bytes(path, MAX_ADAPTER_CONFIG_BYTES, ConfigError)
    config = check(parse(data, str(path), ConfigError), dict, str(path), ConfigError)
    _check_config(config, path)
    check(config, _CONFIG, str(path), ConfigError)
    weights = folder / ADAPTER_WEIGHTS
    file = AdapterFile(weights, stamp(weights.stat()))
    _, _, infos = read_header(weights)
    pairs: dict[str, dict[str, TensorInfo]] = {}
    embeddings: set[str] = set()
    unknown = []
    for info in infos:
        name = info.name.removeprefix(PEFT_PREFIX)
        found = _PART.fullmatch(name)
        if found is None or name == info.name or len(info.shape) != 2:
            unknown.append(info.name)
            continue
        pairs.setdefault(found[1], {})[found[3]] = info
        embeddings |= {found[1]} if found[2] else set()
    # With an adapted embedding PEFT saves the unchanged matrix too.
    copies = {f"{PEFT_PREFIX}{module}.base_layer.weight" for module in embeddings}
    unknown = [name for name in unknown if name not in copies]
    unknown += [part.name for pair in pairs.values() if len(pair) != 2 for part in pair.values()]
    if unknown:
        raise UnsupportedConfig(
            f"{weights} has tensors that are not matrices of LoRA",
            details=shorten(unknown),
            hint="modules_to_save, biases, DoRA and experts are not implemented: merge them with peft first",
        )
    patterns = {pattern: rf"(.*\.)?({pattern})$" for pattern in config.get("alpha_pattern") or {}}
    named = [(f"{path}, alpha_pattern", pattern) for pattern in patterns.values()]
    check_patterns(named, pairs, ConfigError, method="match")
    changes = {}
    for module, pair in pairs.items():
        a, b = (_mapped(weights, pair[part]) for part in "AB")
        if a.shape[0] != b.shape[1] or not a.shape[0]:
            raise SourceError(f"{weights}: {module} has matrices of the shapes {a.shape} and {b.shape}")
        left, right = (a.T, b.T) if module in embeddings else (b, a)
        # As PEFT chooses: the first pattern that the end of the module's name matches.
        alpha = next((config["alpha_pattern"][key] for key, p in patterns.items() if re.match(p, module)), None)
        alpha = config["lora_alpha"] if alpha is None else alpha
        rank = a.shape[0]
        scaling = weight * (alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank)
        changes[f"{module}.weight"] = LowRank(left, right, scaling, file, rounded=module in embeddings)
    contents = f"{hash_bytes(data)} {hash_file(weights)}"
    file.check_unchanged()
    return Adapter(place, weight, hash_bytes(contents.encode())["xxh3_128"], changes)


def _parsed(given: str) -> tuple[str, float]:
    place, colon, number = given.rpartition(":")
    if not colon or Path(given).is_dir():
        return given, 1.0
    try:
        if isfinite(weight := float(number)):
            return place, weight
        raise ValueError
    except ValueError:
        raise UsageError(
            f"--adapter {given}: {number!r} is not a number", hint="give a folder or a Hub id, and perhaps :WEIGHT"
        ) from None


def _folder(place: str) -> Path:
    folder = Path(place)
    if not folder.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        from huggingface_hub import snapshot_download

        from tpuconv.sources.hub_errors import client_errors

        with client_errors(place, "main"):
            folder = Path(snapshot_download(place, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"{place} is no LoRA adapter: it has no {name}", hint="give a folder that peft wrote")
    return folder


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedConfig(f"{path}: peft_type={config.get('peft_type')!r} is not implemented, only LORA")
    faults = [f"{key}={config[key]!r}" for key in REFUSED if config.get(key)]
    if config.get("bias", "none") != "none":
        faults.append(f"bias={config['bias']!r}")
    if faults:
        raise UnsupportedConfig(
            f"{path} has settings that are not implemented", details=faults, hint="merge the adapter with peft first"
        )


def _mapped(path: Path, info: TensorInfo) -> np.ndarray:
    return np.memmap(path, DTYPES[info.dtype], "r", info.offset, info.shape)
