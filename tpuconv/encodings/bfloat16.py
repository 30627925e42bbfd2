"""The bits of bfloat16, in compiled loops: numpy has no such type, and ml_dtypes converts number after number."""

import numpy as np

from tpuconv.encodings.compiled import compiled


@compiled  # type: ignore[untyped-decorator]
def to_float32(bits: np.uint16) -> np.float32:
    """Returns the number that the bits of a bfloat16 stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled  # type: ignore[untyped-decorator]
def to_bfloat16(value: np.float32) -> np.uint16:
    """Returns the bits of the nearest bfloat16; the even one if two are equally near."""
    wide = np.float32(value).view(np.uint32)
    return np.uint16((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
