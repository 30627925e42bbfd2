"""Quantized values as numbers, in numpy and on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.encodings.passthrough import BF16
from tpuconv.private import numerics


@cache
def stored_dtype(qtype: str) -> np.dtype[Any]:
    """Returns the dtype of stored quantized values: Qwix's, or uint8 for NF4, since no checkpoint stores its uint4."""
    value = jax.ShapeDtypeStruct((), BF16)  # type: ignore[no-untyped-call]
    return stored(jax.eval_shape(partial(numerics.convert_to, qtype=qtype), value).dtype)


def stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which quantized values of the dtype `dtype` are stored."""
    return np.dtype(np.uint8) if dtype.name == "uint4" else dtype


@cache
def value_table(qtype: str) -> np.ndarray:
    """Returns [256]: the number that every quantized value stands for, by its byte, without its scale."""
    qvalues = np.arange(256, dtype=np.uint8)
    if qtype == "nf4":
        values: np.ndarray = np.asarray(numerics.get_nf4_buckets())[qvalues & 15]
    else:
        values = np.nan_to_num(qvalues.view(stored_dtype(qtype)).astype(np.float32))
    return values.astype(np.float32)


def decoded_values(qtype: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the weights in float32 that the parts of a parameter of this type stand for: quantized values as bytes,
    scales, and zero points as bytes, if there are any. Each axis of the scales divides the same axis of the values."""
    table = value_table(qtype)
    qvalues, scales, *zero_points = parts
    groups = tuple(n // scale for n, scale in zip(qvalues.shape, scales.shape, strict=True))

    def spread(part: np.ndarray) -> np.ndarray:
        for axis, group in enumerate(groups):
            part = np.repeat(part, group, axis) if group > 1 else part
        return part

    weights: np.ndarray = table[qvalues]
    for zero_point in zero_points:
        weights -= spread(table[zero_point])
    weights *= spread(np.asarray(scales, np.float32))
    return weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """The parts of a quantized parameter on a device, as `decoded_values` takes them. Gradients of its scale pass
    through `decoded`."""

    qvalues: jax.Array
    scale: jax.Array
    zero_points: Sequence[jax.Array]
    qtype: str = field(metadata={"static": True})

    @property
    def decoded(self) -> jax.Array:
        """The weights in float32."""
        table = jnp.asarray(value_table(self.qtype))
        groups = [
            n for scale, size in zip(self.scale.shape, self.qvalues.shape, strict=True) for n in (scale, size // scale)
        ]
        by_group = table[self.qvalues].reshape(groups)
        ones = [n for scale in self.scale.shape for n in (scale, 1)]
        for zero_point in self.zero_points:
            by_group -= table[zero_point].reshape(ones)
        return (by_group * self.scale.reshape(ones)).reshape(self.qvalues.shape)
