"""The files that go with the weights: configs, tokenizers, templates, licenses. They are copied, never run as code."""

import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tpuconv.errors import SourceError
from tpuconv.jsonfile import opened, placeholder
from tpuconv.location import BucketPath, Location
from tpuconv.storage.hashes import blocks, hash_file
from tpuconv.storage.places import is_there, names_in

PATTERNS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "license*",
    "licence*",
    "notice*",
    "use_policy*",
)
"""Of names in lower case."""

NEVER = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.py",
    "*.pyc",
    "*.so",
    "*.onnx",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.ckpt",
    "*.pkl",
    "*.pickle",
)
"""Weights in other formats, and files that run code when they are loaded."""

COMPANION_SUFFIXES = (".json", ".model", ".tiktoken", ".txt", ".jinja")
"""Of files that configs and tokenizers consist of. A folder of such a name is an error."""

CARD, SOURCE_CARD = "README.md", "README.source.md"
"""The model card, and the name of the source's card in our output."""


def is_companion(name: str) -> bool:
    """Whether a file of this name goes with the weights. The model card does not count."""
    lower = name.lower()
    return any(fnmatchcase(lower, pattern) for pattern in PATTERNS) and not any(
        fnmatchcase(lower, pattern) for pattern in NEVER
    )


def find_companions(folder: Location, card: str = CARD, *, trusted: bool = False) -> dict[str, dict[str, Any]]:
    """The companions in a folder and its model card.

    Args:
        folder: the checkpoint.
        card: the name of the model card.
        trusted: whether files may be links, as in the cache of the Hub's client.

    Returns:
        Size and hash of each file, as a manifest has them.

    Raises:
        SourceError: a file cannot be read, is a Git LFS pointer, or a link that leads out of the folder.
    """
    try:
        names = sorted(name for name in names_in(folder) if is_companion(name) or name == card)
    except OSError as e:
        raise SourceError(f"{folder} cannot be read: {e.strerror}") from None
    if isinstance(folder, BucketPath):
        names = [name for name in names if is_there(folder / name)]
        return {name: _facts(folder / name) for name in names}
    if not trusted:
        check_inside(folder, names)
    return {
        name: _facts(folder / name)
        for name in names
        if name.endswith(COMPANION_SUFFIXES) or not (folder / name).is_dir()
    }


def _facts(path: Location) -> dict[str, Any]:
    if isinstance(path, BucketPath):
        start, facts = bytes(next(blocks(path), b"")[:1024]), hash_file(path)
    else:
        with opened(path, SourceError) as (fd, _):
            start = os.pread(fd, 1024, 0)
            facts = hash_file(path)
    # A template or a vocabulary may begin with a tag, and a licence or a card be a page.
    is_page = path.suffix == ".json" or (path.suffix in COMPANION_SUFFIXES and _PAGE.match(start))
    if (what := placeholder(start)) and (is_page or start.startswith(b"version https://git-lfs")):
        raise SourceError(f"{path} is {what}")
    return facts


_PAGE = re.compile(rb"\s*<(!doctype html|html)", re.I)


def check_inside(folder: Location, names: "list[str] | Mapping[str, object]") -> None:
    """Checks that no file is a link that leads out of the folder: a checkpoint from elsewhere could name any file of
    this machine. A snapshot in the Hub's cache, `models--*/snapshots/*`, may link to blobs of that cache. What is no
    regular file raises its error when it is read.

    Raises:
        SourceError: a file is such a link.
    """
    if isinstance(folder, BucketPath):
        return  # buckets have no links
    inside = Path(os.path.realpath(folder))
    roots = [inside]
    if inside.parent.name == "snapshots" and inside.parents[1].name.startswith("models--"):
        roots += [inside.parents[1] / "blobs", inside.parents[2] / "blobs"]  # the repository's, and those of all
    for name in names:
        target = Path(os.path.realpath(folder / name))
        if target.is_file() and not any(root in target.parents for root in roots):
            raise SourceError(
                f"{folder / name} is a link out of its folder, to {target}",
                hint="copy the file into the folder, if you trust it",
            )
