"""Checks of scales, which name the first that no quantizer writes."""

from typing import Any

import numpy as np

from tpuconv.errors import SourceError
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import TensorInfo


def check_some_scales(info: TensorInfo, scales: np.ndarray, start: tuple[int, int], any_sign: bool) -> None:
    """Checks scales [rows, columns] of a tensor, from the row and column `start` on. The rows of stacked matrices
    follow each other.

    Raises:
        SourceError: one is infinite or NaN, or not positive unless they may have `any_sign`. The message has the index
            of the first.
    """
    bad = np.argwhere(~np.isfinite(scales) | (False if any_sign else scales <= 0))
    if len(bad):
        row, column = (int(i) + first for i, first in zip(bad[0], start, strict=True))
        place = [*place_of(row, info.shape[:-1]), column]
        raise _bad_scale(info.name, place, scales[tuple(bad[0])], len(bad), scales.size)


def _bad_scale(name: str, place: list[int], value: np.floating[Any], count: int, size: int) -> SourceError:
    return SourceError(
        f"{name}{place} is {value:g}, which is not a valid scale"
        + (f"; {count} of {size} are invalid" if count > 1 else ""),
        hint="the checkpoint is damaged, or was quantized badly: download it again, or tell its owner",
    )


def place_of(number: int, shape: Shape) -> list[int]:
    """Returns the index of element `number` in an array of this shape."""
    return list(map(int, np.unravel_index(number, shape)))


def check_scales(
    name: str, scales: np.ndarray, shape: Shape | None = None, start: int = 0, *, any_sign: bool = False
) -> None:
    """Checks all scales of a tensor, or some scales of a tensor of the shape `shape`, from number `start` on.

    Raises:
        SourceError: one is infinite or NaN, or not positive unless they may have `any_sign`. The message has the index
            of the first.
    """
    scales = scales.astype(np.float32)
    bad = ~np.isfinite(scales) if any_sign else ~((scales > 0) & (scales < np.inf))  # NaN is neither
    if bad.any():
        first, count = int(bad.argmax()), int(bad.sum())
        index = place_of(start + first, shape or scales.shape)
        raise _bad_scale(name, index, scales.flat[first], count, scales.size)
