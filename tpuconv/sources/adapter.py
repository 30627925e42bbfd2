"""Reads LoRA adapters as PEFT 0.21 writes them (arXiv:2106.09685): adapter_config.json and adapter_model.safetensors.

Each pair of matrices A [R, in] and B [out, R] changes a weight by B A times a factor: alpha / R, or alpha / sqrt(R)
(rsLoRA, arXiv:2312.03732). With a magnitude the rows are scaled to it (DoRA, arXiv:2402.09353). Tensors that were
trained as a whole (`modules_to_save`, biases) replace the tensors of the model, and the embeddings of single tokens
(`trainable_token_indices`) their rows. An adapter that changes weights in another way is refused by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tpuconv.errors import ConfigError, SourceError, UnsupportedConfig, UsageError, shorten
from tpuconv.jsonfile import check, parse, read_bytes
from tpuconv.location import BucketPath, near_folders, to_location
from tpuconv.notation.segments import TRAINERS, as_peft_names
from tpuconv.patterns import check_patterns
from tpuconv.sources.adapter_changes import AdapterFile, Change, LowRank, ReplacedRows, Replacement
from tpuconv.sources.adapter_config import check_adapter_config
from tpuconv.sources.adapter_experts import NESTED, ExpertChange, parameters_by_wrapper
from tpuconv.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tpuconv.sources.headers import TensorInfo, read_header
from tpuconv.storage.hashes import blocks, hash_bytes, hash_file
from tpuconv.storage.places import is_there

PEFT_PREFIX = "base_model.model."
MLX_WEIGHTS = "adapters.safetensors"
MAX_ADAPTER_CONFIG_BYTES = 1 << 20
RANKS, ALPHAS = "rank_pattern", "alpha_pattern"
_PART = re.compile(
    r"(.*)\.lora_(?:(embedding_)?([AB])|(magnitude_vector))(?:\.(?!(?:weight|bias)$)([^.]+))?(?:\.weight)?"
)
"""A part of a pair. The state of a model has the adapter's name in it: `lora_A.default.weight`."""
_OF_STATE = re.compile(
    r"\.modules_to_save(?:\.(?!(?:weight|bias)$)([^.]+))?(?=\.)|(?<=\.trainable_tokens_delta)\.([^.]+)$"
)
"""A part of the names of tensors that were trained as a whole, which the state of a model has and `save_pretrained`
leaves out: `norm.modules_to_save.default.weight`."""
_UNTRAINED = re.compile(r"(?<![^.])original_module\.")
"""The tensors beside these in such a state, which they replace."""
MAGNITUDE = "magnitude"
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
"""The end of the name of the rows of single tokens."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read.

    Attributes:
        name: as the user gave it.
        weight: by which its changes are multiplied.
        digest: hash of its two files.
        changes: by the name of the tensor.
        folder: with its two files, on this machine.
        alpha: `lora_alpha` of adapter_config.json.
        experts: changes of parameters that hold all experts of a layer.
        is_on_hub: whether the name is a Hub id.
    """

    name: str
    weight: float
    digest: str
    changes: Mapping[str, Change]
    folder: Path
    alpha: float
    experts: tuple[ExpertChange, ...] = ()
    is_on_hub: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's description of the adapter. It names a Hub id but no folder, which depends on the
        machine."""
        named = {"name": self.name} if self.is_on_hub else {}
        return {**named, "weight": self.weight, "xxh3_128": self.digest}

    def to_summary(self) -> dict[str, Any]:
        """Returns the description for the output of a conversion: `changes` is the number of changed tensors; the
        experts of a layer count once."""
        return {"name": self.name, "weight": self.weight, "changes": len(self.changes) + len(self.experts)}


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
    path, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    data = read_bytes(path, MAX_ADAPTER_CONFIG_BYTES, ConfigError)
    config = check(parse(data, str(path), ConfigError), dict, str(path), ConfigError)
    check_adapter_config(config, path)
    file = AdapterFile(weights)
    _, _, infos = read_header(weights)
    pairs, embeddings, whole, unknown = _parts(infos, weights)
    unknown += [pairs[name][MAGNITUDE].name for name in embeddings if MAGNITUDE in pairs[name]]
    _check_parts(pairs, unknown, config, weights)
    if weight != 1 and any(MAGNITUDE in pair for pair in pairs.values()):
        raise UnsupportedConfig(
            f"{place} scales rows to their magnitudes (DoRA), which have no weight", hint="leave out the weight"
        )
    targets = config.get("target_parameters") or ()
    experts = parameters_by_wrapper([name for name in pairs if name not in embeddings], targets) if targets else {}
    named = [(f"{path}, {key}", _ending(end)) for key in (RANKS, ALPHAS) for end in config.get(key) or {}]
    check_patterns(named, [*pairs, *map(".".join, experts.values())], ConfigError, method="match")
    changes = _whole_changes(whole, config, file)
    of_experts = []
    for module, pair in pairs.items():
        if module in experts:
            a, b, alpha = _pair(module, pair, config, file, ".".join(experts[module]))
            scaled = bool(config.get("use_rslora"))
            of_experts.append(ExpertChange(*experts[module], a, b, weight * alpha, scaled, file))
        else:
            is_embedding = module in embeddings
            changes[f"{module}.weight"] = _low_rank(module, pair, config, file, weight, is_embedding=is_embedding)
    contents = f"{hash_bytes(data)} {hash_file(weights)}"
    file.check_unchanged()
    digest = hash_bytes(contents.encode())["xxh3_128"]
    return Adapter(
        place, weight, digest, changes, folder, config["lora_alpha"], tuple(of_experts), is_on_hub=_is_hub_id(place)
    )


def _check_parts(
    pairs: Mapping[str, Mapping[str, TensorInfo]], unknown: Sequence[str], config: Mapping[str, Any], weights: Path
) -> None:
    """Raises SourceError or UnsupportedConfig if a tensor is no part of LoRA, or a part is missing."""
    if config.get("use_dora") and not any(MAGNITUDE in pair for pair in pairs.values()):
        raise SourceError(f"{weights} has none of the magnitudes that use_dora in {ADAPTER_CONFIG} promises")
    if unknown:
        raise UnsupportedConfig(
            f"{weights} has tensors that are no part of LoRA as it is implemented",
            details=shorten(unknown),
            hint="merge the adapter with peft first",
        )
    if halves := [part.name for pair in pairs.values() if not {"A", "B"} <= pair.keys() for part in pair.values()]:
        raise SourceError(
            f"{weights} lacks a matrix of each pair that these belong to",
            details=shorten(halves),
            hint="save the adapter again: peft takes a missing matrix for 0",
        )


def _whole_changes(whole: Mapping[str, TensorInfo], config: Mapping[str, Any], file: AdapterFile) -> dict[str, Change]:
    """Returns the changes that are matrices, or rows of them, instead of pairs, by tensor."""
    changes: dict[str, Change] = {}
    for name, info in whole.items():
        if name.endswith(f"{NESTED}.weight"):  # with an adapted embedding PEFT saves the unchanged matrix too
            continue
        if not name.endswith(TOKEN_ROWS):
            changes[name.replace(NESTED, "")] = Replacement(file.matrix(info), file)
            continue
        module = name.removesuffix(TOKEN_ROWS)
        rows = _token_rows(module, config.get("trainable_token_indices") or ())
        if len(info.shape) != 2 or info.shape[0] != len(rows):
            raise SourceError(f"{file.path}: {info.name} has not a row for each of {len(rows)} tokens")
        changes[f"{module}.weight"] = ReplacedRows(file.matrix(info), rows, file)
    return changes


def _pair(
    module: str, pair: Mapping[str, TensorInfo], config: Mapping[str, Any], file: AdapterFile, full: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the matrices A and B of a module, and its alpha. `full` is its name in patterns."""
    a, b = (file.matrix(pair[part]) for part in "AB")
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        raise SourceError(f"{file.path}: {module} has matrices of the shapes {a.shape} and {b.shape}")
    if any(not np.isfinite(file.values(matrix).astype(np.float32)).all() for matrix in (a, b)):
        raise SourceError(
            f"{file.path}: {module} has matrices with NaN or infinite values",
            hint="take an adapter of an earlier step of the training",
        )
    return a, b, _of_module(config, ALPHAS, full, config["lora_alpha"])


def _low_rank(
    module: str,
    pair: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    file: AdapterFile,
    weight: float,
    *,
    is_embedding: bool,
) -> LowRank:
    """Returns the change of the matrix of a module."""
    a, b, alpha = _pair(module, pair, config, file, module)
    rank = _of_module(config, RANKS, module, config["r"])
    if rank != a.shape[0]:
        raise SourceError(
            f"{file.path}: {module} has matrices of rank {a.shape[0]}, and r is {rank} in {ADAPTER_CONFIG}",
            hint="changes are divided by the rank: download both files again",
        )
    left, right = (a.T, b.T) if is_embedding else (b, a)
    scaling = weight * alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    magnitude = file.matrix(pair[MAGNITUDE]) if MAGNITUDE in pair else None
    if magnitude is not None and magnitude.shape != left.shape[:1]:
        raise SourceError(f"{file.path}: {module} has a magnitude of the shape {magnitude.shape}")
    return LowRank(left, right, scaling, file, is_embedding, magnitude)


def _parts(
    infos: Sequence[TensorInfo], weights: Path
) -> tuple[dict[str, dict[str, TensorInfo]], set[str], dict[str, TensorInfo], list[str]]:
    """Returns the pairs by module, which of these are of embeddings, the tensors that were trained as a whole, and the
    names that are none of these."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    embeddings: set[str] = set()
    whole: dict[str, TensorInfo] = {}
    adapters: set[str | None] = set()
    unknown, twice = [], []
    # A model of transformers saves its adapter without PEFT's prefix.
    is_bare = not any(TRAINERS.match(info.name) for info in infos)
    for info in infos:
        name, own = _as_saved(as_peft_names(info.name))
        found = _PART.fullmatch(name)
        adapters |= {found[5]} if found else {own} if own else set()
        if _UNTRAINED.search(name):
            continue
        if not (is_bare or TRAINERS.match(info.name)) or (found is None and ".lora_" in name):
            unknown.append(info.name)
        elif name in whole or (found and (found[3] or MAGNITUDE) in pairs.get(found[1], ())):
            twice.append(info.name)
        elif found is None:
            whole[name] = info
        elif len(info.shape) != (1 if found[4] else 2):
            unknown.append(info.name)
        else:
            pairs.setdefault(found[1], {})[found[3] or MAGNITUDE] = info
            embeddings |= {found[1]} if found[2] else set()
    if not infos:
        raise SourceError(
            f"{weights} has no tensors",
            hint="save the adapter again: sharded parameters (DeepSpeed ZeRO-3, FSDP) must be gathered first",
        )
    if len(adapters) > 1:
        raise UnsupportedConfig(
            f"{weights} has several adapters: {', '.join(sorted(map(str, adapters)))}",
            hint="save them by `save_pretrained` of peft, which writes a folder for each",
        )
    if twice:
        raise SourceError(f"{weights} has a part twice: {twice[0]}", hint="save the adapter again")
    return pairs, embeddings, whole, unknown


def names_for_peft(names: Iterable[str]) -> dict[str, str]:
    """Returns the names that peft saves for tensors of an adapter, which a trainer may have spelled another way, by
    theirs; without the tensors that others replace."""
    found = {}
    for given in names:
        name, _ = _as_saved(as_peft_names(given))
        if (part := _PART.fullmatch(name)) and part[5]:
            name = name[: part.start(5) - 1] + name[part.end(5) :]
        if not _UNTRAINED.search(name):
            found[given] = f"{PEFT_PREFIX}{name}"
    return found


def _as_saved(name: str) -> tuple[str, str | None]:
    """Returns the name by which `save_pretrained` of PEFT saves a tensor that was trained as a whole, and the adapter
    that a state names it by; others as they are."""
    if (found := _OF_STATE.search(name)) is None:
        return name, None
    return name[: found.start()] + name[found.end() :], found[1] or found[2]


def _ending(pattern: str) -> str:
    """A pattern of names whose end, after a dot, a key of PEFT's patterns matches."""
    return rf"(.*\.)?({pattern})$"


def _of_module(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """A setting of a module, as PEFT chooses it: by the first pattern that matches its name."""
    patterns = config.get(key) or {}
    return next((value for end, value in patterns.items() if re.match(_ending(end), module)), default)


def _token_rows(module: str, indices: Sequence[int] | Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The tokens whose rows of a module an adapter has: a list, or a list by the end of the module's name."""
    if isinstance(indices, Mapping):
        indices = next((rows for end, rows in indices.items() if module.endswith(end)), ())
    return tuple(indices)


def _parsed(given: str) -> tuple[str, float]:
    place, colon, number = given.rpartition(":")
    if not colon or number.startswith("//") or Path(given).is_dir():
        return given, 1.0
    try:
        if isfinite(weight := float(number)):
            return place, weight
        raise ValueError
    except ValueError:
        raise UsageError(
            f"`adapter={[given]}`: {number!r} is not a number", hint="give a folder or a Hub id, and perhaps :WEIGHT"
        ) from None


def _folder(place: str) -> Path:
    location = to_location(place)
    folder = _fetched(location) if isinstance(location, BucketPath) else location
    if _is_hub_id(place):
        from tpuconv.sources.hub_errors import client_errors
        from tpuconv.sources.repository import Repository

        with client_errors(place, "main"):
            folder = Repository(place, "main").fetch([ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    if not folder.exists():
        raise UsageError(
            f"there is no folder '{place}'", hint=near_folders(folder) or "give a folder that peft wrote, or a Hub id"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file() and (folder / "adapter_model.bin").exists():
        raise UsageError(
            f"{place} has its weights as a pickle (adapter_model.bin), which can run code and is not read",
            hint="load it with peft, and save it again: `PeftModel.from_pretrained(...).save_pretrained(OUT)` writes "
            f"{ADAPTER_WEIGHTS}",
        )
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"{place} is no LoRA adapter: it has no {name}", hint=_what_to_give(place, folder))
    return folder


def _what_to_give(place: str, folder: Path) -> str:
    """Returns what to give in place of a folder that is no adapter."""
    if (folder / MLX_WEIGHTS).is_file():
        return "mlx-lm wrote it: add it to the model by `mlx_lm.fuse`, and convert that"
    within = sorted(
        (path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}")), key=lambda name: (len(name), name)
    )
    if within:
        return f"give an adapter within it, such as {place.rstrip('/')}/{within[-1]}"
    return "give a folder that peft wrote"


def _is_hub_id(place: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", place) is not None and not Path(place).is_dir()


_FETCHED: "list[TemporaryDirectory[str]]" = []
"""Copies of adapters in buckets, which are small; they are removed when the process ends."""


def _fetched(place: BucketPath) -> Path:
    """Returns a local copy of an adapter in a bucket."""
    _FETCHED.append(TemporaryDirectory())
    folder = Path(_FETCHED[-1].name)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if is_there(place / name):
            with (folder / name).open("wb") as file:
                file.writelines(blocks(place / name))
    return folder
