"""Guesses which tensors of a release a family has under other names: by their shapes, and by words in both names."""

import re
from collections.abc import Collection, Iterable, Mapping

from tpuconv.notation.layout import Shape
from tpuconv.notation.spelling import module_of

WORDS_OF_MODULES: Mapping[str, Collection[str]] = {
    "embed": ("embed", "embedding", "embeddings", "emb", "wte", "tok", "token", "tokens", "word", "vocab"),
    "lm_head": ("head", "lm", "output", "unembed", "logits"),
    "norm": ("final", "last", "out", "f", "norm"),
    "attn_norm": ("input", "attention", "attn", "pre", "before"),
    "mlp_norm": ("ffn", "mlp", "ff", "post", "feedforward"),
    "q": ("q", "wq", "query", "queries"),
    "k": ("k", "wk", "key", "keys"),
    "v": ("v", "wv", "value", "values"),
    "o": ("o", "wo", "out", "output", "dense"),
    "q_norm": ("q", "query", "queries"),
    "k_norm": ("k", "key", "keys"),
    "gate": ("gate", "gating"),
    "up": ("up", "in"),
    "down": ("down", "out"),
    "router": ("router", "gate"),
}
"""Words that names of releases have for the modules of our parameters."""


def guessed(
    left: Mapping[str, set[Shape]], missing: Mapping[str, tuple[Shape, str]], *, without_words: bool
) -> dict[str, str]:
    """Returns for tensors of a release the tensors of a family that they may be, both as patterns of names.

    Args:
        left: the patterns that the family does not have, with their shapes.
        missing: the patterns that the release does not have, with the shape and our parameter.
        without_words: take tensors of the same shape in the order of the release too, where words tell nothing.
    """
    groups: dict[tuple[Shape, int], tuple[list[str], list[str]]] = {}
    for pattern, shapes in left.items():
        if len(shapes) == 1:
            groups.setdefault((min(shapes), pattern.count("{}")), ([], []))[0].append(pattern)
    for pattern, (shape, _) in missing.items():
        groups.setdefault((shape, pattern.count("{}")), ([], []))[1].append(pattern)
    found: dict[str, str] = {}
    for given, wanted in groups.values():
        alike = {(a, b): _alike(a, missing[b][1]) for a in given for b in wanted}
        for a, b in sorted(alike, key=lambda pair: -alike[pair]):
            if (alike[a, b] or without_words) and a not in found and b not in found.values():
                found[a] = b
    return found


def _alike(name: str, parameter: str) -> int:
    """Returns how many words a name shares with a parameter; words of the last module count double."""
    *_, module, _ = ("", *parameter.split("."))
    words = WORDS_OF_MODULES.get(module, ())
    *above, last = module_of(name).split(".")
    return sum(word in words for word in _words([*above, last])) + sum(word in words for word in _words([last]))


def _words(segments: Iterable[str]) -> list[str]:
    return [word for segment in segments for word in re.findall(r"[a-z]+", segment.lower())]


def modules_of(renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of modules and the family's names for them, of pairs of patterns: the `modules` of a family."""
    found = {}
    for name, home in renamed.items():
        same_end = name.rpartition(".")[2] == home.rpartition(".")[2]
        pair = (module_of(name), module_of(home)) if same_end else (name, home)
        found[indexed(pair[0])] = indexed(pair[1])
    return found


def indexed(pattern: str) -> str:
    """Returns a pattern with the letters of layers and of experts, in this order."""
    return pattern.replace("{}", "{L}", 1).replace("{}", "{E}", 1).replace("{}", "#")
