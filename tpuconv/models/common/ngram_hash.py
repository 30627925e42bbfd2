"""How n-grams are numbered: the constants that follow from a config."""

from functools import cache
from itertools import count, islice
from math import isqrt
from typing import NamedTuple

from tpuconv.notation.letters import Word, declare

declare(
    ngram_layers=Word("layers with embeddings of n-grams"),
    ngram_tokens=Word("tokens of which the next n-grams and convolutions are made"),
    ngram_width=Word("width of the embeddings of n-grams"),
    ngram_taps=Word("taps of the convolution of n-grams"),
)

LARGEST_INT64 = (1 << 63) - 1
SEED_STEP = 10007
"""The distance of the seeds of layers."""
MOST_HASHES = 1 << 12
"""The largest number of hashes of n-grams in all layers together: each needs a prime number of its own."""


class NGramHash(NamedTuple):
    """How the n-grams of a layer are numbered.

    Attributes:
        multipliers: of each token of the longest n-gram, the newest first.
        sizes: number of vectors of each hash, a prime.
        starts: number of the first vector of each hash.
        rows: number of vectors of all hashes, with those that fill the last multiple.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    rows: int


@cache
def primes(least: int, many: int) -> tuple[int, ...]:
    """Returns the first `many` prime numbers that are not smaller than `least`."""
    numbers = (n for n in count(max(least, 2)) if n == 2 or (n % 2 and all(n % d for d in range(3, isqrt(n) + 1, 2))))
    return tuple(islice(numbers, many))
