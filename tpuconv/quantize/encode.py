"""What Qwix makes of a parameter, box by box, in bounded memory.

Most weights are bfloat16 and scaled by their largest absolute value. Then both the scale and the code are functions of
16 bits: of the largest value's, and of the quotient's. Tables of these functions, filled by Qwix itself, give its
result with a fraction of the work. All else is given to Qwix, a box at a time, which is exact too: boxes hold whole
tiles.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tpuconv.convert.plan.types import EncodedComponent
from tpuconv.errors import GateError, UnsupportedConfig
from tpuconv.names import QVALUE, SCALE, ZERO_POINT
from tpuconv.private import numerics, qarray
from tpuconv.quantize import kernels
from tpuconv.quantize.config import INTEGERS, QTYPES, TILES
from tpuconv.quantize.rules import How

CHECK_ELEMENTS = 1 << 18
"""Of the box that is compared with Qwix at once."""

LARGEST_SCALE = 2.0**125
"""Beyond it XLA divides by way of a reciprocal that underflows, on some processors: then Qwix itself is asked."""

BF16 = np.dtype(ml_dtypes.bfloat16)

INFINITY = 0x7F80
"""Its bits in bfloat16; those of what is not a number are more."""

Parts = tuple[list[np.ndarray], dict[str, float]]
"""Codes as bytes, scales, zero points as bytes where there are any; and figures that add up."""


@dataclass(frozen=True)
class Kind:
    """What decides about codes and scales besides the values."""

    qtype: str
    method: str
    tiles: tuple[int, ...]

    @property
    def group(self) -> "Kind":
        """What is compared with Qwix once: sizes of tiles do not matter, only where tiles are."""
        return Kind(self.qtype, self.method, tuple(min(tile, 2) for tile in self.tiles))

    def transposed(self, order: Sequence[int]) -> "Kind":
        return Kind(self.qtype, self.method, tuple(self.tiles[axis] for axis in order))

    def in_qwix(self, shape: tuple[int, ...]) -> Any:
        """In Qwix's words: tiles of one element are channels, tiles of the whole axis are none."""
        return qarray.HowToQuantize(
            qtype=self.qtype,
            channelwise_axes=[i for i, tile in enumerate(self.tiles) if tile == 1],
            tiled_axes={
                i: tile for i, tile in enumerate(self.tiles) if 1 < tile < shape[i] or tile == TILES.get(self.qtype)
            },
            calibration_method=self.method,
        )


@dataclass(frozen=True)
class QwixEncoder:
    """Encodes one parameter; see `tpuconv.convert.plan.Encoder`. `dtype` is that of the values, `scale_dtype` that of
    the stored scales."""

    name: str
    how: How
    dtype: np.dtype[Any]
    scale_dtype: np.dtype[Any]

    @property
    def blocks(self) -> tuple[int, ...]:
        # A mean is rounded by the order in which it is added up: only the whole parameter has Qwix's.
        return self.how.shape if self.method.startswith("rms") else self.how.tiles

    @cached_property
    def parts(self) -> tuple[EncodedComponent, ...]:
        ones = (1,) * len(self.how.shape)
        codes = stored_dtype(self.how.qtype)
        parts = [
            EncodedComponent(QVALUE[1:], codes, ones, own=True),
            EncodedComponent(SCALE[1:], self.scale_dtype, self.how.tiles),
        ]
        if self.is_asymmetric:
            parts.append(EncodedComponent(ZERO_POINT[1:], codes, self.how.tiles))
        return tuple(parts)

    @property
    def method(self) -> str:
        return str(self.how.how.calibration_method)

    @property
    def kind(self) -> Kind:
        return Kind(self.how.qtype, self.method, self.how.tiles)

    @property
    def by_tables(self) -> bool:
        return self.dtype == BF16 and self.method.startswith("absmax")

    @property
    def is_asymmetric(self) -> bool:
        return self.method.startswith("minmax") or (self.method.startswith("fixed") and not _is_symmetric(self.method))

    def to_json(self) -> dict[str, Any]:
        return {
            "qtype": self.how.qtype,
            "rule": self.how.rule,
            "tiles": list(self.how.tiles),
            "method": self.method,
            "bits": self.bits,
        }

    @property
    def bits(self) -> float:
        """Bits of a weight, its share of the scales included."""
        scales = 8 * self.scale_dtype.itemsize + (QTYPES[self.how.qtype] if self.is_asymmetric else 0)
        return QTYPES[self.how.qtype] + scales / prod(self.how.tiles)

    def __call__(self, values: np.ndarray) -> tuple[list[np.ndarray], dict[str, float]]:
        """Codes, scales and, where the range is not symmetric, zero points of a box of whole tiles.

        Raises:
            FloatingPointError: a value is infinite or not a number.
            UnsupportedConfig: the scale of a tile is so small that it is stored as 0.
        """
        kind = self.kind
        if self.by_tables:
            order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
            with np.errstate(all="ignore"):  # scales that are 0 are found below, absurd values have absurd figures
                parts, figures = _by_tables(values.transpose(order), kind.transposed(order))
            if parts[1].astype(np.float32).max() > LARGEST_SCALE:
                parts, figures = _by_qwix(values.transpose(order), kind.transposed(order))
            parts = [part.transpose(np.argsort(order)) for part in parts]
            if not parts[1].all():
                raise UnsupportedConfig(
                    f"{self.name} is too small for {kind.qtype}: the scale of a tile underflows to 0",
                    hint="give it a rule with another type; float4_e2m1fn has scales of more range",
                )
            _compare_once(self.name, kind, values, *parts)
        else:
            parts, figures = _by_qwix(values, kind)
        codes, scales, *zero_points = parts
        codes, *zero_points = (part.view(self.parts[0].dtype) for part in (codes, *zero_points))
        return [codes, scales.astype(self.scale_dtype), *zero_points], figures

    def check(self) -> None:
        """Waits until what was encoded is compared with what Qwix makes of it.

        Raises:
            GateError: they differ.
        """
        if compared := _compared.get(self.kind.group):
            compared.result()

    def rounded(self, values: np.ndarray) -> jax.Array:
        """What codes and scales of the whole parameter stand for, exactly, so in float32. Of symmetric ranges only."""
        (codes, scales), _ = self(values)
        self.check()
        array = qarray.QArray(jnp.asarray(codes), jnp.asarray(scales, jnp.float32), None, self.how.qtype)
        decoded: jax.Array = qarray.dequantize(array)
        return decoded


@cache
def stored_dtype(qtype: str) -> np.dtype[Any]:
    """In which codes of a type are stored. That of Qwix; NF4's, uint4, has no place in a checkpoint, so a byte."""
    one = jax.ShapeDtypeStruct((), BF16)  # type: ignore[no-untyped-call]
    return stored(jax.eval_shape(partial(numerics.convert_to, qtype=qtype), one).dtype)


def stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same for the dtype of codes."""
    return np.dtype(np.uint8) if dtype.name == "uint4" else dtype


def _is_symmetric(method: str) -> bool:
    numbers = [float(number) for number in method.split(",")[1:]]
    return len(numbers) == 1 or sum(numbers) == 0


# -- by tables --------------------------------------------------------------------------------------------------------


_beside = ThreadPoolExecutor(1, "qwix")
"""What Qwix is asked for, tables and comparisons, is compiled without the interpreter's lock, beside all other work."""

ALL = np.arange(1 << 16, dtype=np.uint16).view(BF16)
"""Every bfloat16, by its bits."""


def prepare(encoders: Iterable[QwixEncoder]) -> None:
    """Begins to fill the tables that they need first."""
    for encoder in encoders:
        if encoder.by_tables:
            _scales(encoder.how.qtype, encoder.method)


@cache
def _codes(qtype: str) -> np.ndarray:
    """[65536]: the code of every quotient of value and scale, by its bits."""
    return np.asarray(jax.jit(partial(numerics.convert_to, qtype=qtype))(ALL))


@cache
def _code_bytes(qtype: str) -> np.ndarray:
    return as_bytes(_codes(qtype))


def as_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes of Qwix as they are stored: a byte each, 4-bit integers with their sign."""
    own: np.ndarray = codes.astype(np.int8) if codes.dtype.name == "int4" else codes.astype(stored(codes.dtype))
    return own.view(np.uint8)


@cache
def _decoded(qtype: str) -> np.ndarray:
    """[256]: the value of every code, by its byte, without its scale."""
    codes = np.arange(256, dtype=np.uint8)
    if qtype == "nf4":
        values: np.ndarray = np.asarray(numerics.get_nf4_buckets())[codes & 15]
    else:
        values = np.nan_to_num(codes.view(stored_dtype(qtype)).astype(np.float32))
    return values.astype(np.float32)


@cache
def _scales(qtype: str, method: str) -> "Future[np.ndarray]":
    """[32768]: the scale of every largest absolute value, by its bits; float32 that bfloat16 can hold."""
    factor = [float(number) for number in method.split(",")[1:]]

    def scale(absmax: jax.Array) -> jax.Array:
        absmax = absmax * factor[0] if factor else absmax
        out: jax.Array = qarray.compute_scale_zero_point({"absmax": absmax}, qtype)[0]
        return out.astype(jnp.bfloat16)

    return _beside.submit(lambda: np.asarray(jax.jit(scale)(ALL[: 1 << 15])).astype(np.float32))


NO_TABLES = np.empty(0, np.uint8), np.empty(0, np.float32)
"""Of integers, which are computed."""


def _by_tables(values: np.ndarray, kind: Kind) -> Parts:
    """`values` lie in memory in the order of their axes, nearly."""
    shape, tiles = values.shape, kind.tiles
    counts = [n // tile for n, tile in zip(shape, tiles, strict=True)]
    bits = np.ascontiguousarray(values).view(np.uint16).reshape(-1, shape[-1])
    tile_row = np.zeros(1, np.int64)
    for n, tile, count in zip(shape[:-1], tiles, counts, strict=False):
        tile_row = (tile_row[:, None] * count + np.arange(n) // tile).reshape(-1)
    largest = np.zeros((prod(counts[:-1]), counts[-1]), np.uint16)
    kernels.absmax(bits, tile_row, tiles[-1], largest)
    if largest.max() >= INFINITY:
        raise FloatingPointError
    scales = _scales(kind.qtype, kind.method).result()[largest]
    codes = np.empty(bits.shape, np.uint8)
    integers = 1 << (int(kind.qtype.removeprefix("int")) - 1) if kind.qtype in INTEGERS else 0
    bound = _largest(kind.qtype) if "," in kind.method else np.inf
    tables = NO_TABLES if integers else (_code_bytes(kind.qtype), _decoded(kind.qtype))
    signal, noise, clipped = kernels.encode(bits, tile_row, tiles[-1], scales, integers, *tables, bound, codes)
    figures = {"signal": signal, "noise": noise, "clipped": float(clipped), "count": float(values.size)}
    return [codes.reshape(shape), scales.astype(BF16).reshape(counts)], figures


def _largest(qtype: str) -> float:
    return float(numerics.get_symmetric_bound(qtype))


_compared: "dict[Kind, Future[None]]" = {}


def _compare_once(name: str, kind: Kind, values: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    """Begins to compare some random tiles of the first box of each kind with what Qwix itself makes of them."""
    if kind.group in _compared:
        return
    rng = np.random.default_rng(len(_compared))
    box, scale_box, left = [], [], CHECK_ELEMENTS // prod(kind.tiles)
    for n, tile in zip(values.shape, kind.tiles, strict=True):
        count = max(1, min(n // tile, left))
        left //= count
        first = int(rng.integers(0, n // tile - count + 1))
        box.append(slice(first * tile, (first + count) * tile))
        scale_box.append(slice(first, first + count))
    part, own, own_scales = values[tuple(box)], codes[tuple(box)], scales[tuple(scale_box)]
    compared = partial(_compare, name, kind, part.copy(), own.copy(), own_scales.copy())  # their memory is used again
    _compared[kind.group] = _beside.submit(compared)


def _compare(name: str, kind: Kind, part: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    array = jax.jit(lambda x: qarray.quantize(x, kind.in_qwix(part.shape)))(part)
    same = as_bytes(np.asarray(array.qvalue)) == codes
    same_scale = np.asarray(array.scale).view(np.uint16) == scales.view(np.uint16)
    if not same.all() or not same_scale.all():
        raise GateError(
            f"{name} in {kind.qtype} is not what Qwix makes of it",
            details=[f"{np.sum(~same)} codes and {np.sum(~same_scale)} scales differ in {list(part.shape)}"],
            hint="this is a bug of tpuconv or a new version of Qwix: please report it",
        )


# -- by Qwix ----------------------------------------------------------------------------------------------------------


def _by_qwix(values: np.ndarray, kind: Kind) -> Parts:
    wide = jnp.asarray(values).astype(jnp.float32)
    if not jnp.isfinite(wide).all():
        raise FloatingPointError
    array = qarray.quantize(jnp.asarray(values), kind.in_qwix(values.shape))
    decoded = qarray.dequantize(array).astype(jnp.float32)
    quotient = jnp.abs(qarray.call_with_generic_broadcast(jnp.divide, wide, array.scale.astype(jnp.float32)))
    clipped = 0 if array.zero_point is not None else jnp.sum(quotient > _largest(kind.qtype) * (1 + 1e-6))
    figures = {
        "signal": float(jnp.sum(jnp.square(wide))),
        "noise": float(jnp.sum(jnp.square(decoded - wide))),
        "clipped": float(clipped),
        "count": float(values.size),
    }
    shape = tuple(n // tile for n, tile in zip(values.shape, kind.tiles, strict=True))
    codes = [array.qvalue] if array.zero_point is None else [array.qvalue, array.zero_point]
    own, *zero_points = (as_bytes(np.asarray(part)) for part in codes)
    return [own, *(np.broadcast_to(part, shape) for part in (np.asarray(array.scale), *zero_points))], figures
