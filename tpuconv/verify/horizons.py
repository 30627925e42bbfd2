"""Prompts beyond the horizons of a model: the ends of sliding windows, of chunks, of what an indexer selects
(`DecoderConfig.horizons`). A shorter prompt cannot show whether these are right.

A prompt for a horizon is a little longer than it, and runs by itself. Only its last tokens are compared, which lie on
both sides of the horizon: all logits of a long prompt would be the largest array.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpuconv.models.common.config import context_of
from tpuconv.models.logits import Window
from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer, text_ids
from tpuconv.quantize.calibrate.data import default_text
from tpuconv.text import format_size

COMPARED = 128
"""The last tokens of a prompt that are compared."""
BEYOND = 64
"""Tokens of a prompt beyond its horizon."""
FARTHEST = 8192
"""The largest horizon that a prompt is made for: longer ones would take most of the time of a comparison."""
SCORE_COPIES = 4
"""Arrays of the size of all scores of a layer's attention that are in memory at once, of either model at most."""


class Horizon(NamedTuple):
    """A horizon of a model.

    Attributes:
        tokens: the length of the longest text that it has no effect on.
        why_not: why no prompt is longer; empty if one is.
    """

    tokens: int
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"tokens": self.tokens, "compared": not self.why_not, "reason": self.why_not or None}


def horizons_of(config: Any) -> list[int]:
    """Returns the horizons of a model within its context, ascending."""
    return sorted(tokens for tokens in config.horizons if tokens < context_of(config))


def seen_horizons(config: Any, prompts: Iterable[Sequence[int]]) -> list[Horizon]:
    """Returns the horizons of a model and whether one of these prompts is longer."""
    longest = max(map(len, prompts))
    return [
        Horizon(tokens, "" if longest > tokens else f"the longest prompt has {longest:,} tokens")
        for tokens in horizons_of(config)
    ]


def long_prompts(
    config: Any, prompts: Iterable[Sequence[int]], folder: Path, memory: int | None
) -> tuple[list[Window], list[Horizon]]:
    """Returns a prompt for each horizon of a model that no other prompt goes beyond, and all horizons.

    Args:
        config: of the model.
        prompts: token ids of the other prompts.
        folder: with the tokenizer; without one the ids are pseudo-random, the same in every run.
        memory: bytes for the scores of a layer's attention; None for any number.
    """
    longest, windows, found = max(map(len, prompts)), [], []
    for tokens in horizons_of(config):
        length = min(tokens + BEYOND, context_of(config))
        need = SCORE_COPIES * 4 * (config.sizes["N"] + config.sizes.get("index_heads", 0)) * length**2
        if tokens > FARTHEST:
            found.append(Horizon(tokens, f"only `prompts=` has texts of more than {FARTHEST + BEYOND:,} tokens"))
        elif length > longest and memory is not None and need > memory:
            found.append(Horizon(tokens, f"a prompt of {length:,} tokens needs {format_size(need)} of memory more"))
        else:
            found.append(Horizon(tokens))
            if length > longest:
                windows.append(Window(_ids(folder, length, config.sizes["V"]), max(0, length - COMPARED)))
    return windows, found


def _ids(folder: Path, length: int, vocabulary: int) -> list[int]:
    """Returns the first tokens of the package's text, repeated if it is too short."""
    if not has_tokenizer(folder):
        return [int(token) for token in np.random.default_rng(1).integers(0, vocabulary, length)]
    begin, ids = text_ids(load_tokenizer(folder), default_text())
    return [*begin, *np.resize(np.array(ids), length - len(begin)).tolist()]
