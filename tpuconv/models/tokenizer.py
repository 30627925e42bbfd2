"""The tokenizer of a checkpoint, which transformers loads, and the tokens that end a text."""

import os
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, UsageError, root_cause
from tpuconv.jsonfile import Optional, Size, check
from tpuconv.sources.config import parts_of, read_json

TOKEN_IDS = (Size, [Size], None)
TEXT_MODEL = Optional(({"eos_token_id": Optional(TOKEN_IDS)}, None))
END_TOKEN_KEYS = {
    "eos_token_id": Optional(TOKEN_IDS),
    "text_config": TEXT_MODEL,
    "thinker_config": Optional(({"text_config": TEXT_MODEL}, None)),
}
"""The schema of generation_config.json and config.json: only these keys are read."""


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or (folder / "vocab.json").exists()


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in a folder, loaded by transformers without remote code.

    Raises:
        UsageError: the folder has no tokenizer, or transformers is not installed.
        ConfigError: transformers cannot load it.
    """
    if not has_tokenizer(folder):
        raise UsageError(
            f"{folder} has no tokenizer",
            hint="copy tokenizer.json and tokenizer_config.json into it; in a checkpoint, `tpuconv verify --update` "
            "then takes them into the manifest",
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(
            "text needs the tokenizers of transformers, which is not installed", hint="pip install 'tpuconv[hf]'"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # of any type
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read: {type(e).__name__}: {root_cause(e)}",
            hint="copy the tokenizer's files into the folder again",
        ) from e


def end_tokens(folder: Path) -> frozenset[int]:
    """Returns the ids of the tokens that end a text: `eos_token_id` of generation_config.json, or else of config.json.
    Empty if neither has any.

    Raises:
        ConfigError: a file cannot be read, or its ids are malformed.
    """
    for name in ("generation_config.json", "config.json"):
        if not os.path.lexists(folder / name):
            continue
        raw = check(read_json(folder / name, ConfigError), END_TOKEN_KEYS, str(folder / name), ConfigError)
        ids = raw.get("eos_token_id", parts_of(raw)[-1].get("eos_token_id"))
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
