"""Integers in words, with zero points or offsets of their groups: the `affine` part of a scheme."""

from dataclasses import dataclass

import numpy as np

from tpuconv.encodings.words import Words


@dataclass(frozen=True)
class Affine:
    """Quantized values q in words, with zero points z: each stands for (q - z) * scale, in float32, rounded once.

    Attributes:
        words: how the values are packed.
        zero_points: suffix of the tensor of zero points, one for each scale. Empty: none, and values are in two's
            complement, unless `centered`.
        zero_words: how these are packed, as a matrix of the shape of the scales.
        zero_shift: what is added to a stored zero point, modulo the number of values.
        symmetric: whether the description says that all zero points are in the middle.
        group_index: suffix of a tensor that tells the group of each row. Without it groups are in order.
        writes_index: whether the writer stores it for groups in order too.
        any_order: whether they may be in any order, by the description.
        centered: whether values without zero points are stored from the middle: q + 2^(bits - 1).
        offsets: suffix of a tensor of numbers that are added to the products, one for each scale. Values then are
            unsigned, and matrices may be stacked: words lie along the last axis.
    """

    words: Words
    zero_points: str
    zero_words: Words
    zero_shift: int = 0
    symmetric: bool = False
    group_index: str = ""
    writes_index: bool = True
    any_order: bool = False
    centered: bool = False
    offsets: str = ""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The name suffixes of zero points, of the groups of rows, and of offsets."""
        return tuple(filter(None, (self.zero_points, self.group_index, self.offsets)))

    def numbers(self, qvalues: np.ndarray) -> np.ndarray:
        """Returns the quantized values of bytes, in float32."""
        if self.zero_points or self.offsets:
            return qvalues.astype(np.float32)
        if self.centered:
            return qvalues.astype(np.float32) - np.float32(self.middle)
        half = np.int8(1 << (self.words.bits - 1))  # two's complement
        return ((qvalues.view(np.int8) ^ half) - half).astype(np.float32)

    @property
    def middle(self) -> int:
        """The zero point of symmetric values, as it is stored: in two's complement it is 0."""
        return 1 << (self.words.bits - 1) if self.zero_points or self.centered else 0

    @property
    def misread_middle(self) -> int | None:
        """The zero point of symmetric values if they are read by the other of GPTQ's two formats, of which one stores
        zero points less 1. None if there is one format."""
        if not (self.symmetric and self.group_index):
            return None
        return self.middle + (1 if self.zero_shift else -1)

    def zeros_of(self, stored: np.ndarray) -> np.ndarray:
        """Zero points as the formula has them, from stored ones: bytes."""
        zeros: np.ndarray = (stored + np.uint8(self.zero_shift)) & np.uint8(self.words.mask)
        return zeros

    def stored_zeros(self, zeros: np.ndarray) -> np.ndarray:
        """Returns the inverse of `zeros_of`, in words."""
        return self.zero_words.pack((zeros - np.uint8(self.zero_shift)) & np.uint8(self.zero_words.mask))
