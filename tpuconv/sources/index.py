"""The index of a checkpoint: which files are its shards, and which tensors each one holds."""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from tpuconv.errors import SourceError, TpuconvError, UsageError, shorten
from tpuconv.location import Location
from tpuconv.names import MANIFEST, collapse
from tpuconv.sources.config import read_json
from tpuconv.sources.files import ADAPTER_CONFIG, INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE
from tpuconv.sources.ranks import ranked_files
from tpuconv.storage.places import check_finished, is_there, names_in
from tpuconv.text import format_count, plain, some

MAX_NAMES_TO_COLLAPSE = 10_000
_SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")


def read_index(folder: Location) -> tuple[list[str], Mapping[str, str] | None, Mapping[str, Any]]:
    """Returns the names of the shards and, if there is an index, the shard of every tensor; and the metadata of the
    index.

    Raises:
        UsageError: the folder holds no safetensors.
        SourceError: the folder cannot be listed, the index is missing or broken, or shards that it names are missing;
            or files of ranks are (`tpuconv.sources.ranks`).
    """
    try:
        names = set(names_in(folder))  # once: an index may name very many files
    except OSError as e:
        raise SourceError(f"{folder} cannot be read: {e.strerror}") from None
    weight_map, metadata = _read_index_file(folder / INDEX_FILE) if INDEX_FILE in names else (None, {})
    shards, by_index = choose_shards(names, weight_map)
    if shards and by_index is None:
        return shards, None, {}
    if by_index is None:
        shards = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_"))
        if not shards and MANIFEST in names and ADAPTER_CONFIG not in names:
            raise UsageError(
                f"{folder} is converted already",
                hint="`tpuconv quantize` makes a smaller one of it, `tpuconv export` safetensors",
            )
        if not shards and (other := other_kind(names)):
            what, todo = other
            raise UsageError(f"{folder} holds {what}", hint=_with_base(folder, todo) if "adapter" in what else todo)
        if not shards:
            check_finished(folder)
            raise UsageError(
                f"{folder} holds no {SINGLE_FILE}, no {INDEX_FILE} and no {MANIFEST}",
                hint=_models_within(folder)
                or "give a folder with a Hugging Face checkpoint in safetensors, or its Hub id",
            )
        raise SourceError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            details=[f"it has {format_count(len(shards), 'safetensors file')}:", *shorten(shards)],
            hint=next(
                (todo for pattern, todo in NOT_BY_THEMSELVES if all(fnmatchcase(name, pattern) for name in shards)),
                "without the index, missing files cannot be detected: download the checkpoint again",
            ),
        )
    missing = [s for s in shards if s not in names]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(shards)} shards {'are' if missing[1:] else 'is'} missing in {folder}",
            details=describe_missing(by_index, missing),
            hint="download them; if this is a Hub checkpoint, give its id instead of the folder",
        )
    return shards, by_index, metadata


NOT_BY_THEMSELVES = (
    ("consolidated*.safetensors", "these are in the names of Mistral's or Meta's own code: look for a release in the "
     "form of transformers"),
    ("*-00001-of-00001.safetensors", "this is a complete checkpoint: rename the file to model.safetensors to convert "
     "it"),
    ("model.*.safetensors", "these are a variant: rename the file to model.safetensors to convert it"),
)  # fmt: skip
"""Patterns of the names of safetensors that transformers does not load by themselves, and what to do."""

OTHER_KINDS = (
    (ADAPTER_CONFIG, "an adapter (LoRA), not a model",
     "convert its base model with it: `tpuconv convert BASE --adapter FOLDER`"),
    ("zero_to_fp32.py|global_step*", "shards of DeepSpeed ZeRO",
     "join them: `python zero_to_fp32.py FOLDER OUT --safe_serialization`, and convert OUT with the config.json and "
     "the tokenizer"),
    ("*.distcp|pytorch_model_fsdp*|.metadata", "shards of FSDP (.distcp)",
     "join them: `accelerate merge-weights FOLDER OUT`, and convert OUT with the config.json and the tokenizer"),
    ("iter_[0-9]*|mp_rank_*|latest_checkpointed_iteration.txt|*.nemo", "a checkpoint of Megatron",
     "export it to the form of transformers with Megatron Bridge or NeMo"),
    ("checkpoint-[0-9]*", "checkpoints of a trainer", "give one of these folders"),
    ("_METADATA|_CHECKPOINT_METADATA|manifest.ocdbt", "a checkpoint of Orbax",
     "`tpuconv reshard FOLDER OUT --config SRC` makes a checkpoint of tpuconv from a trainer's, `tpuconv export FOLDER "
     "OUT --config SRC` safetensors"),
    ("*.gguf", "GGUF files, which have weights in formats of llama.cpp",
     "convert the repository that they were made from"),
    ("*.incomplete|*.crdownload|*.part|*.aria2", "an unfinished download",
     "start the download again, which most programs continue; or give the Hub id"),
    ("*.bin", "pickled weights (.bin), which can run code and are not read",
     "save them with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"),
    ("*.pth|*.pt|*.ckpt|*.pkl", "pickled weights, which can run code and are not read",
     "look for a safetensors version of this model, or save it as such by the program that wrote it"),
    ("*.h5|*.msgpack|*.onnx|*.tflite|*.npz", "weights of TensorFlow, Flax or ONNX",
     "look for a safetensors version of this model"),
    ("model_index.json", "a pipeline of diffusers", "give the folder of a language model in it, such as text_encoder"),
    ("modules.json", "a list of modules of sentence-transformers, and the model in one of their folders",
     "give the folder of the first module"),
    (".cache", "a download of huggingface_hub without weights", "run `hf download` again, which continues it; or give "
     "the Hub id"),
)  # fmt: skip
"""The possible contents of a folder without safetensors: patterns of names, a description, and a hint. The first match
counts."""


def _with_base(folder: Location, hint: str) -> str:
    """Returns a hint with the folder of an adapter, and with the base model that its config names, if that is a Hub id
    or an existing folder."""
    try:
        base = read_json(folder / ADAPTER_CONFIG, SourceError).get("base_model_name_or_path")
    except TpuconvError:
        return hint
    hint = hint.replace("FOLDER", quote(plain(str(folder))))
    if isinstance(base, str) and (re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) or Path(base).is_dir()):
        return hint.replace("BASE", quote(plain(base)))
    return hint


def _models_within(folder: Location) -> str | None:
    """Returns the hint for a folder on this machine in whose folders a model lies: merged or final weights of a
    trainer, or a snapshot in the Hub's cache."""
    if not isinstance(folder, Path):
        return None
    places = [
        f"{within}/{name}" for within in ("*", "snapshots/*", "*/snapshots/*") for name in (SINGLE_FILE, INDEX_FILE)
    ]
    found = sorted({str(path.parent) for place in places for path in folder.glob(place)})
    return f"give a model within it: {some([quote(plain(each)) for each in found], 3)}" if found else None


def other_kind(names: Collection[str]) -> tuple[str, str] | None:
    """Describes the contents of a folder without safetensors, with the names that show it, and a hint; None if
    unknown."""
    for patterns, what, todo in OTHER_KINDS:
        found = sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns.split("|")))
        if found:
            return f"{what}: {some(found, 3)}", todo
    return None


def describe_missing(weight_map: Mapping[str, str], missing: Sequence[str]) -> list[str]:
    """Lines that name missing shards, and the patterns of the tensors that the index has in them."""
    shards = set(missing)
    names = list(islice((name for name, shard in weight_map.items() if shard in shards), MAX_NAMES_TO_COLLAPSE))
    patterns = [f"{pattern}  ({format_count(len(tensors), 'tensor')})" for pattern, tensors in collapse(names).items()]
    more = ["... and more"] if len(names) == MAX_NAMES_TO_COLLAPSE else []
    return [*shorten(missing), "the index has these tensors in them:", *shorten(patterns), *more]


def read_weight_map(index: Location) -> dict[str, str]:
    """Returns the shard of every tensor, from an index file: names of safetensors files in its folder.

    Raises:
        SourceError: it has no such map, or names other files.
    """
    return _read_index_file(index)[0]


def _read_index_file(index: Location) -> tuple[dict[str, str], Mapping[str, Any]]:
    """The shard of every tensor, and the metadata. Raises as `read_weight_map` does."""
    content = read_json(index, SourceError, MAX_INDEX_BYTES)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(
            f"{index} names no shards: it has no weight_map from names to files",
            hint="download it again; if its owner has it so, do not trust this checkpoint",
        )
    unsafe = {repr(s)[:80] for s in weight_map.values() if not isinstance(s, str) or not _SHARD_NAME.fullmatch(s)}
    if unsafe:
        raise SourceError(
            f"{index} names files that are not safetensors files in its folder",
            details=shorten(sorted(unsafe)),
            hint="do not trust this checkpoint",
        )
    return weight_map, metadata if isinstance(metadata, Mapping) else {}


def choose_shards(
    names: Collection[str], weight_map: Mapping[str, str] | None
) -> tuple[list[str], Mapping[str, str] | None]:
    """Returns the shards of a model, and the index if it names them.

    Files of ranks take precedence over a single file that the index does not name, and that over the index, as in
    transformers. No shards are returned where there is none of the three.

    Args:
        names: names of the files beside each other.
        weight_map: the shard of every tensor, if there is an index.

    Raises:
        SourceError: a file of a rank is missing.
    """
    if ranked := ranked_files(names):
        return ranked, None
    named = set((weight_map or {}).values())
    if SINGLE_FILE in names and SINGLE_FILE not in named:
        return [SINGLE_FILE], None
    return sorted(named), weight_map


def shard_names(folder: Location) -> list[str]:
    """Returns the names of the shards in a folder."""
    index = folder / INDEX_FILE
    return choose_shards(names_in(folder), read_weight_map(index) if is_there(index) else None)[0]
