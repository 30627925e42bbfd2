"""The tokenizer beside a checkpoint, which transformers reads, and the tokens that end a text."""

import os
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, UsageError, root_cause
from tpuconv.jsonfile import Optional, Size, check
from tpuconv.sources.config import read_json

TOKEN_IDS = (Size, [Size], None)
END_TOKEN_KEYS = {
    "eos_token_id": Optional(TOKEN_IDS),
    "text_config": Optional(({"eos_token_id": Optional(TOKEN_IDS)}, None)),
}
"""What is read of generation_config.json and config.json."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or (folder / "vocab.json").exists()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of transformers, without remote code.

    Raises:
        UsageError: there is none in the folder, or transformers is not installed.
        ConfigError: transformers cannot read it.
    """
    if not has_tokenizer(folder):
        raise UsageError(f"{folder} has no tokenizer", hint="copy tokenizer.json and tokenizer_config.json into it")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError("text needs transformers' tokenizers", hint="pip install 'tpuconv[hf]'") from None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # of any kind, by the file that is broken
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read: {type(e).__name__}: {root_cause(e)}",
            hint="copy the tokenizer's files into it again",
        ) from e


def end_tokens(folder: Path) -> frozenset[int]:
    """The ids after which a text ends, as generation_config.json has them, or config.json where that has none.

    Raises:
        ConfigError: one of them cannot be read, or has no such ids.
    """
    for name in ("generation_config.json", "config.json"):
        if not os.path.lexists(folder / name):
            continue
        raw = check(read_json(folder / name, ConfigError), END_TOKEN_KEYS, str(folder / name), ConfigError)
        ids = raw.get("eos_token_id", (raw.get("text_config") or {}).get("eos_token_id"))
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
