"""The tokenizer of a checkpoint, which transformers loads, or without it the package `tokenizers`, and the tokens that
end a text."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, SourceError, UsageError, root_cause
from tpuconv.extras import install_command
from tpuconv.jsonfile import MAX_BYTES, Each, Optional, Size, check, parse, read_bytes, short
from tpuconv.sources.config import parts_of, read_json

TOKEN_IDS = (Size, [Size], None)
TEXT_MODEL = Optional(({"eos_token_id": Optional(TOKEN_IDS)}, None))
END_TOKEN_KEYS = {
    "eos_token_id": Optional(TOKEN_IDS),
    "text_config": TEXT_MODEL,
    "thinker_config": Optional(({"text_config": TEXT_MODEL}, None)),
}
"""The schema of generation_config.json and config.json: only these keys are read."""


TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TOKEN = Optional((str, {"content": str}, None))
SETTINGS_KEYS = {"bos_token": TOKEN, "eos_token": TOKEN}
"""The schema of tokenizer_config.json: only these keys are read."""

TOKENS_BY_ID, TOKEN_LIST, IDS = Each({"content": str}), [{"content": str, "id": Size}], Each(Size)
ADDED: Mapping[str, tuple[Any, Callable[[Any], Mapping[str, Any]]]] = {
    SETTINGS_FILE: (
        {"added_tokens_decoder": Optional((TOKENS_BY_ID, None))},
        lambda data: {each["content"]: number for number, each in (data.get("added_tokens_decoder") or {}).items()},
    ),
    "added_tokens.json": (IDS, dict),
    TOKENIZER_FILE: (
        {"added_tokens": Optional((TOKEN_LIST, None))},
        lambda data: {each["content"]: each["id"] for each in data.get("added_tokens") or ()},
    ),
}
"""The files that say the ids of added tokens, with the schema of each (only these keys are read), and what returns the
ids by the texts."""
LONGEST_ID = 10
"""Digits of an id that a file has as a text."""

SHORT = 100
"""Characters of a text that are encoded to see what a tokenizer puts before it."""


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or (folder / "vocab.json").exists()


def added_token(text: str, read: Callable[[str], bytes | None]) -> int | None:
    """Returns the id of a token that the files of a tokenizer add to its vocabulary; None if none of them says it.

    Args:
        text: the token.
        read: returns the contents of a file, or None if there is none.

    Raises:
        ConfigError: a file is malformed.
    """
    for name, (schema, ids_of) in ADDED.items():
        if (contents := read(name)) is None:
            continue
        data = parse(contents, name, ConfigError)
        check(data, schema, name, ConfigError)
        found = ids_of(data).get(text)
        if isinstance(found, str):
            found = int(found) if found.isdecimal() and len(found) <= LONGEST_ID else None
        if found is not None:
            return int(found)
    return None


def tokenizer_file(folder: Path, name: str) -> bytes | None:
    """Returns the contents of a file of a tokenizer; None if the folder has none.

    Raises:
        SourceError: it cannot be read.
    """
    return read_bytes(folder / name, MAX_BYTES, SourceError) if os.path.lexists(folder / name) else None


def types_of_others() -> AbstractContextManager[None]:
    """Silences transformers' warning that it does not have the type of a config.json, beside which it loads a tokenizer
    or a processor."""
    return errors_alone("transformers.configuration_utils")


@contextmanager
def errors_alone(name: str) -> Iterator[None]:
    """Silences the warnings of a logger."""
    logger = logging.getLogger(name)
    known = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(known)


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in a folder, loaded by transformers without remote code; a `PlainTokenizer` if transformers
    is not installed.

    Raises:
        UsageError: the folder has no tokenizer, or only transformers can read it, which is not installed.
        ConfigError: it cannot be read.
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
        if not (folder / TOKENIZER_FILE).exists():
            raise UsageError(
                f"the tokenizer in {folder} has no {TOKENIZER_FILE}, and transformers, which reads others, is not "
                "installed",
                hint=install_command("hf"),
            ) from None
        load: Callable[[Path], Any] = PlainTokenizer
    else:
        load = partial(AutoTokenizer.from_pretrained, trust_remote_code=False)
    try:
        with types_of_others():
            return load(folder)
    except Exception as e:  # of any type
        raise ConfigError(
            f"the tokenizer in {folder} cannot be read: {type(e).__name__}: {root_cause(e)}",
            hint="copy the tokenizer's files into the folder again"
            + ("" if (folder / TOKENIZER_FILE).exists() else f"; it has no {TOKENIZER_FILE}"),
        ) from e


class PlainTokenizer:
    """The tokenizer of a tokenizer.json, by the package `tokenizers` alone. It is called like a tokenizer of
    transformers, and cannot apply chat templates.

    Args:
        folder: with tokenizer.json, and with tokenizer_config.json, which names the tokens that begin and end a text.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        path = folder / SETTINGS_FILE
        config = check(read_json(path, ConfigError), SETTINGS_KEYS, str(path), ConfigError) if path.exists() else {}
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self.name_or_path = str(folder)
        self.bos_token_id, self.eos_token_id = (self._id_of(config.get(name)) for name in ("bos_token", "eos_token"))
        self.chat_template = config.get("chat_template") or (folder / "chat_template.jinja").exists()

    def _id_of(self, token: Any) -> int | None:
        text = token["content"] if isinstance(token, Mapping) else token
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return found

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        """Raises ImportError: templates are programs, which transformers runs."""
        raise ImportError(f"chat templates need transformers: {install_command('hf')}")


def end_tokens(folder: Path, tokenizer: Any = None) -> frozenset[int]:
    """Returns the ids of the tokens that end a text: `eos_token_id` of generation_config.json, or else of config.json,
    and the end token of the tokenizer. Empty if none has any.

    Raises:
        ConfigError: a file cannot be read, or its ids are malformed.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    found = frozenset() if own is None else frozenset([int(own)])
    for name in ("generation_config.json", "config.json"):
        if not os.path.lexists(folder / name):
            continue
        raw = check(read_json(folder / name, ConfigError), END_TOKEN_KEYS, str(folder / name), ConfigError)
        ids = raw.get("eos_token_id", parts_of(raw)[-1].get("eos_token_id"))
        if ids is not None:
            return found | frozenset(ids if isinstance(ids, list) else [ids])
    return found


def check_ids(tokenizer: Any, ids: Iterable[Sequence[int]], rows: int) -> None:
    """Checks the token ids of prompts.

    Args:
        tokenizer: made them.
        ids: of each prompt.
        rows: of the embedding.

    Raises:
        UsageError: the model has no embedding for a token. JAX would take NaN for it, and write some text.
    """
    if unknown := sorted({i for each in ids for i in each if i >= rows}):
        named = ", ".join(f"{i} ({short(tokenizer.decode([i]))})" for i in unknown[:3])
        raise UsageError(
            f"the tokenizer gives tokens for which the model has no embedding: {named}; the model has {rows}",
            hint="take the tokenizer of this model; if tokens were added to it, save the model after "
            "`model.resize_token_embeddings(len(tokenizer))`, and convert that",
        )


def text_ids(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Returns the token ids that a tokenizer puts before a text, such as BOS, and the ids of the text itself."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    short = text[:SHORT]  # what is put before a text does not depend on it
    plain, whole = (list(tokenizer(short, add_special_tokens=special)["input_ids"]) for special in (False, True))
    count = next((n for n in range(len(whole) - len(plain) + 1) if whole[n : n + len(plain)] == plain), 0)
    return whole[:count], ids
