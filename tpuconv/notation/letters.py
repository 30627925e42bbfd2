"""Names of axes. A letter has the same meaning in every table, shape and sharding. Every further axis is a word, which
the family that has it declares; a module that several families share declares their words.

    declare(
        taps=Word("taps of the convolution"),
        full_heads=Word("query heads of layers that see all tokens", as_="N"),
    )

A word is lower case, of two letters or more. It means one thing in all families that are loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpuconv.errors import LayoutError

LETTERS = {
    "B": "batch",
    "T": "time: positions of this call's tokens",
    "S": "source positions: the keys that attention looks at",
    "D": "model width (hidden size)",
    "A": "model width, as the input axis of a square matrix",
    "N": "query heads",
    "K": "key-value heads",
    "G": "query heads per key-value head (N = K G)",
    "H": "head dimension",
    "F": "MLP width",
    "V": "vocabulary",
    "O": "labels: the scores of a text",
    "L": "layers",
    "I": "layers with a dense MLP, in a model where others have experts",
    "J": "layers with experts, in a model where others have a dense MLP",
    "U": "layers for multi-token prediction (MTP), after the model's own",
    "E": "experts",
    "M": "MLP width of one expert",
    "W": "MLP width of all shared experts together",
    "C": "latent width of keys and values (kv_lora_rank)",
    "Q": "latent width of queries (q_lora_rank)",
    "P": "head dimension without rotary position",
    "R": "head dimension with rotary position",
    "X": "experts of a token",
    "Y": "periods of layers: the first layer of each",
    "Z": "places of a period whose layers are in one array",
}

FORMER = {"v": "V", "q": "N", "m": "K", "n": "K", "y": "F"}
"""Lower-case letters in manifests of before there were words: the letter whose sharding each follows. Others are not
sharded."""

WORD_PATTERN = re.compile(r"[a-z][a-z0-9_]+")


@dataclass(frozen=True)
class Word:
    """The meaning of a word, and the letter whose sharding it follows: with N it is sharded as query heads are. Without
    a letter it is not sharded."""

    meaning: str
    as_: str = ""


_WORDS: dict[str, Word] = {}


def declare(**words: Word) -> None:
    """Declares the words of a family or of a shared module, when it is imported.

    Raises:
        LayoutError: a word is malformed, follows no letter, or has another meaning in a family that is loaded.
    """
    for name, word in words.items():
        if not WORD_PATTERN.fullmatch(name) or word.as_ not in ("", *LETTERS):
            raise LayoutError(f"'{name}' is no lower-case word of two letters or more, or the as_ of {word} no letter")
        if _WORDS.setdefault(name, word) != word:
            raise LayoutError(f"the word '{name}' is {_WORDS[name]} already, and not {word}: choose another word")


def is_name(text: str) -> bool:
    """Returns True if a text may name an axis: a letter, a lower-case letter of a former manifest, or a word."""
    return text in LETTERS or WORD_PATTERN.fullmatch(text) is not None or (len(text) == 1 and "a" <= text <= "z")


def meaning(name: str) -> str:
    """Returns the meaning of a letter or a declared word; "" of a name that has none."""
    return LETTERS.get(name) or (_WORDS[name].meaning if name in _WORDS else "")


def sharded_as(name: str) -> str:
    """Returns the letter whose sharding an axis follows; "" if it is not sharded.

    Raises:
        LayoutError: no family that is loaded declares the word.
    """
    if name in _WORDS:
        return _WORDS[name].as_
    if len(name) > 1:
        raise LayoutError(f"no family that is loaded declares the axis '{name}'")
    return name if name in LETTERS else FORMER.get(name, "")


def with_letters(sizes: Mapping[str, int], local: Mapping[str, str]) -> dict[str, int]:
    """Returns sizes in which the letters of `local` have the sizes of these words: the einsums of a module and the
    names of its arrays have single letters. A lower-case letter is the module's alone, by its legend; a letter such as
    N keeps its meaning, and has the size of one layer."""
    return {**sizes, **{letter: sizes[word] for letter, word in local.items()}}
