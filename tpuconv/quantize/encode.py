"""Quantizes a parameter to exactly what Qwix makes of it, box by box, in bounded memory.

Most weights are bfloat16 and scaled by their largest absolute value. Then the scale and the quantized value are
functions of 16 bits each: of the largest value, and of the quotient. Tables of these functions, filled by Qwix itself,
give its result with a fraction of the work. All other boxes are passed to Qwix, which is exact too, since they hold
complete groups.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.convert.plan.quantization import EncodedComponent
from tpuconv.encodings.passthrough import BF16
from tpuconv.errors import GateError, UnsupportedConfig
from tpuconv.names import QVALUE, SCALE, ZERO_POINT
from tpuconv.private import numerics, qarray
from tpuconv.quantize import clipping, kernels
from tpuconv.quantize.config import INTEGER_QTYPES, MSE, QTYPES, REQUIRED_TILE_SIZES
from tpuconv.quantize.rules import ParamQuant
from tpuconv.quantize.values import decoded_values, stored, stored_dtype, value_table

CHECK_ELEMENTS = 1 << 18
"""Number of elements that are compared with Qwix at once."""

LARGEST_SCALE = 2.0**125
"""For larger scales XLA divides by a reciprocal that underflows, on some processors: they are passed to Qwix."""

INFINITY = 0x7F80
"""Its bits in bfloat16. Those of NaN are larger."""

Parts = tuple[list[np.ndarray], dict[str, float]]
"""Quantized values as bytes, scales, zero points as bytes if there are any; and statistics that can be added up."""


@dataclass(frozen=True)
class QuantKind:
    """The settings that determine quantized values and scales besides the weights. `group_shape` is the number of
    elements along each axis that share a scale."""

    qtype: str
    method: str
    group_shape: tuple[int, ...]

    @property
    def comparison_key(self) -> "QuantKind":
        """The key of the comparison with Qwix, which is made once per key. It contains the axes with groups, not the
        sizes of groups."""
        return QuantKind(self.qtype, self.method, tuple(min(group, 2) for group in self.group_shape))

    def transposed(self, order: Sequence[int]) -> "QuantKind":
        """Returns the kind of a transposed parameter; `order` is as for `np.transpose`."""
        return QuantKind(self.qtype, self.method, tuple(self.group_shape[axis] for axis in order))

    def in_qwix(self, shape: tuple[int, ...]) -> Any:
        """Returns the kind in Qwix's terms: groups of one element are channelwise axes, groups of the complete axis are
        none."""
        return qarray.HowToQuantize(
            qtype=self.qtype,
            channelwise_axes=[i for i, group in enumerate(self.group_shape) if group == 1],
            tiled_axes={
                i: group
                for i, group in enumerate(self.group_shape)
                if 1 < group < shape[i] or group == REQUIRED_TILE_SIZES.get(self.qtype)
            },
            calibration_method=self.method,
        )


@dataclass(frozen=True)
class QwixEncoder:
    """Encodes one parameter; see `tpuconv.convert.plan.types.Encoder`. `dtype` is the dtype of the weights,
    `scale_dtype` the dtype of stored scales."""

    name: str
    quant: ParamQuant
    dtype: np.dtype[Any]
    scale_dtype: np.dtype[Any]

    @property
    def blocks(self) -> tuple[int, ...]:
        # The rounding of a mean depends on the order of its sum: it is Qwix's only for the complete parameter.
        """The shape of what must be encoded together: a group, or the complete parameter."""
        return self.quant.shape if self.method.startswith("rms") else self.quant.group_shape

    @cached_property
    def parts(self) -> tuple[EncodedComponent, ...]:
        """Quantized values, scales and, if the range is not symmetric, zero points."""
        ones = (1,) * len(self.quant.shape)
        qvalues, bits = stored_dtype(self.quant.qtype), QTYPES[self.quant.qtype]
        parts = [
            EncodedComponent(QVALUE[1:], qvalues, ones, own=True, bits=bits),
            EncodedComponent(SCALE[1:], self.scale_dtype, self.quant.group_shape),
        ]
        if self.is_asymmetric:
            parts.append(EncodedComponent(ZERO_POINT[1:], qvalues, self.quant.group_shape))
        return tuple(parts)

    @property
    def method(self) -> str:
        """The calibration method."""
        return str(self.quant.qwix_how.calibration_method)

    @property
    def kind(self) -> QuantKind:
        """The settings that determine the result besides the weights."""
        return QuantKind(self.quant.qtype, self.method, self.quant.group_shape)

    @property
    def by_tables(self) -> bool:
        """True if tables are used instead of Qwix."""
        return self.dtype == BF16 and self.method.startswith("absmax")

    @property
    def is_asymmetric(self) -> bool:
        """True if there are zero points."""
        return self.method.startswith("minmax") or (self.method.startswith("fixed") and not _is_symmetric(self.method))

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's description of the encoding."""
        return {
            "qtype": self.quant.qtype,
            "rule": self.quant.rule,
            "tiles": list(self.quant.group_shape),
            "method": self.method,
            "bits": self.bits,
        }

    @property
    def bits(self) -> float:
        """Bits per weight, with its share of the scales."""
        scales = 8 * self.scale_dtype.itemsize + (QTYPES[self.quant.qtype] if self.is_asymmetric else 0)
        return QTYPES[self.quant.qtype] + scales / prod(self.quant.group_shape)

    def __call__(
        self, values: np.ndarray, calibrated: Sequence[np.ndarray] = ()
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Encodes a box of complete groups.

        Args:
            values: the box.
            calibrated: the bytes of its quantized values, if they are not the nearest, in the shape of `values`; and
                their scales, if they are others too.

        Returns:
            Quantized values, scales and, if the range is not symmetric, zero points; and statistics to add up.

        Raises:
            FloatingPointError: a value is infinite or NaN.
            UnsupportedConfig: the scale of a group is so small that it would be stored as 0.
        """
        kind = self.kind
        if self.method == MSE:
            parts, statistics = _by_search(values, kind, self.scale_dtype)
        elif self.by_tables:
            order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
            with np.errstate(all="ignore"):  # scales of 0 are found below, absurd values have absurd statistics
                parts, statistics = _by_tables(values.transpose(order), kind.transposed(order))
            if parts[1].astype(np.float32).max() > LARGEST_SCALE:
                parts, statistics = _by_qwix(values.transpose(order), kind.transposed(order))
            parts = [part.transpose(np.argsort(order)) for part in parts]
            _compare_once(self.name, kind, values, *parts)
        else:
            parts, statistics = _by_qwix(values, kind)
        self._check_scales(parts[1].astype(self.scale_dtype))
        if calibrated:
            parts[: len(calibrated)] = calibrated
            lost = self.decoded(parts) - values.astype(np.float32)
            statistics["noise"] = float(np.sum(np.square(lost), dtype=np.float64))
        qvalues, scales, *zero_points = parts
        qvalues, *zero_points = (part.view(self.parts[0].dtype) for part in (qvalues, *zero_points))
        return [qvalues, scales.astype(self.scale_dtype), *zero_points], statistics

    def _check_scales(self, scales: np.ndarray) -> None:
        if not scales.all():
            raise UnsupportedConfig(
                f"{self.name} is too small for {self.quant.qtype}: the scale of a group underflows to 0",
                hint="give it a rule with another type; float4_e2m1fn has scales of more range",
            )

    def decoded(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the weights in float32 that quantized values as bytes, scales and zero points, if any, stand for."""
        return decoded_values(self.quant.qtype, parts)

    def check(self) -> None:
        """Waits until what was encoded is compared with what Qwix makes of it.

        Raises:
            GateError: they differ.
        """
        if compared := _compared.get(self.kind.comparison_key):
            compared.result()


def _is_symmetric(method: str) -> bool:
    numbers = [float(number) for number in method.split(",")[1:]]
    return len(numbers) == 1 or sum(numbers) == 0


# -- by tables --------------------------------------------------------------------------------------------------------


@contextmanager
def on_processor() -> Iterator[None]:
    """Within it jax computes on the processor. Other devices round quotients otherwise, so that a config would give
    other values on each kind of machine."""
    try:
        devices = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS names others alone
        devices = jax.local_devices()
    with jax.default_device(devices[0]):
        yield


_compile_pool = ThreadPoolExecutor(1, "qwix")
"""Compiles what Qwix is asked for, tables and comparisons. It releases the interpreter's lock, so other
work goes on."""

ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(BF16)
"""Every bfloat16, by its bits."""


def prepare(encoders: Iterable[QwixEncoder]) -> None:
    """Begins to fill the tables that the encoders need first."""
    for encoder in encoders:
        if encoder.by_tables:
            _scale_table(encoder.quant.qtype, encoder.method)


@cache
def _qvalue_table(qtype: str) -> np.ndarray:
    """[65536]: the quantized value of every quotient of value and scale, by its bits."""
    with on_processor():
        return np.asarray(jax.jit(partial(numerics.convert_to, qtype=qtype))(ALL_BFLOAT16))


@cache
def _qvalue_byte_table(qtype: str) -> np.ndarray:
    return as_bytes(_qvalue_table(qtype))


def as_bytes(qvalues: np.ndarray) -> np.ndarray:
    """Qwix's quantized values as they are stored, in the same shape: one byte each, 4-bit integers with their sign."""
    widened: np.ndarray = (
        qvalues.astype(np.int8) if qvalues.dtype.name == "int4" else qvalues.astype(stored(qvalues.dtype))
    )
    return widened.view(np.uint8)


@cache
def values_of_bytes(qtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers that quantized values of a type stand for without scales, ascending, in float32; and the byte
    of each."""
    known = np.unique(_qvalue_byte_table(qtype))
    values, first = np.unique(value_table(qtype)[known], return_index=True)
    return values, known[first]


@cache
def _scale_table(qtype: str, method: str) -> "Future[np.ndarray]":
    """[32768]: the scale for every largest absolute value, by its bits; float32 that bfloat16 can hold."""
    factor = [float(number) for number in method.split(",")[1:]]

    def scale(absmax: jax.Array) -> jax.Array:
        absmax = absmax * factor[0] if factor else absmax
        out: jax.Array = qarray.compute_scale_zero_point({"absmax": absmax}, qtype)[0]
        return out.astype(jnp.bfloat16)

    @on_processor()
    def table() -> np.ndarray:
        return np.asarray(jax.jit(scale)(ALL_BFLOAT16[: 1 << 15])).astype(np.float32)

    return _compile_pool.submit(table)


NO_TABLES = np.empty(0, np.uint8), np.empty(0, np.float32)
"""The tables of integers, which are computed without tables."""


def _by_tables(values: np.ndarray, kind: QuantKind) -> Parts:
    """Encodes by tables. The axes of `values` are about in the order of memory."""
    shape, group_shape = values.shape, kind.group_shape
    counts = [n // group for n, group in zip(shape, group_shape, strict=True)]
    bits = np.ascontiguousarray(values).view(np.uint16).reshape(-1, shape[-1])
    group_row = _group_rows(shape, group_shape)
    largest = np.zeros((prod(counts[:-1]), counts[-1]), np.uint16)
    kernels.absmax(bits, group_row, group_shape[-1], largest)
    if largest.max() >= INFINITY:
        raise FloatingPointError
    scales = _scale_table(kind.qtype, kind.method).result()[largest]
    qvalues = np.empty(bits.shape, np.uint8)
    integers = _integers(kind.qtype)
    bound = symmetric_bound(kind.qtype) if "," in kind.method else np.inf
    tables = NO_TABLES if integers else (_qvalue_byte_table(kind.qtype), value_table(kind.qtype))
    signal, noise, clipped = kernels.encode(bits, group_row, group_shape[-1], scales, integers, *tables, bound, qvalues)
    statistics = {"signal": signal, "noise": noise, "clipped": float(clipped), "count": float(values.size)}
    return [qvalues.reshape(shape), scales.astype(BF16).reshape(counts)], statistics


def _group_rows(shape: Sequence[int], group_shape: Sequence[int]) -> np.ndarray:
    """Returns the row of the scales of each row of values, which are [R, C] and [S, C / group] then."""
    group_row = np.zeros(1, np.int64)
    for n, group in zip(shape[:-1], group_shape, strict=False):
        group_row = (group_row[:, None] * (n // group) + np.arange(n) // group).reshape(-1)
    return group_row


def _integers(qtype: str) -> int:
    """Returns n of an integer type, whose values are -n to n - 1; 0 of other types."""
    return 1 << (int(qtype.removeprefix("int")) - 1) if qtype in INTEGER_QTYPES else 0


def symmetric_bound(qtype: str) -> float:
    """Returns the quotient of the largest absolute value and its scale, of a type."""
    return float(numerics.get_symmetric_bound(qtype))


_compared: "dict[QuantKind, Future[None]]" = {}


def _compare_once(name: str, kind: QuantKind, values: np.ndarray, qvalues: np.ndarray, scales: np.ndarray) -> None:
    """Begins to compare some random groups of the first box of each kind with what Qwix makes of them."""
    if kind.comparison_key in _compared:
        return
    rng = np.random.default_rng(len(_compared))
    box, scale_box, left = [], [], CHECK_ELEMENTS // prod(kind.group_shape)
    for n, group in zip(values.shape, kind.group_shape, strict=True):
        count = max(1, min(n // group, left))
        left //= count
        first = int(rng.integers(0, n // group - count + 1))
        box.append(slice(first * group, (first + count) * group))
        scale_box.append(slice(first, first + count))
    part, part_qvalues, part_scales = values[tuple(box)], qvalues[tuple(box)], scales[tuple(scale_box)]
    compared = partial(
        _compare, name, kind, part.copy(), part_qvalues.copy(), part_scales.copy()
    )  # their memory is used again
    _compared[kind.comparison_key] = _compile_pool.submit(compared)


@on_processor()
def _compare(name: str, kind: QuantKind, part: np.ndarray, qvalues: np.ndarray, scales: np.ndarray) -> None:
    array = jax.jit(lambda x: qarray.quantize(x, kind.in_qwix(part.shape)))(part)
    same = as_bytes(np.asarray(array.qvalue)) == qvalues
    same_scale = np.asarray(array.scale).view(np.uint16) == scales.view(np.uint16)
    if not same.all() or not same_scale.all():
        raise GateError(
            f"{name} in {kind.qtype} differs from what Qwix makes of it",
            details=[f"{np.sum(~same)} quantized values and {np.sum(~same_scale)} scales differ in {list(part.shape)}"],
            hint="this is a bug of tpuconv or a new version of Qwix: please report it",
        )


def _by_search(values: np.ndarray, kind: QuantKind, scale_dtype: np.dtype[Any]) -> Parts:
    """Encodes with the scales of the least squared error."""
    integers = _integers(kind.qtype)
    tables = NO_TABLES if integers else (_qvalue_byte_table(kind.qtype), value_table(kind.qtype))
    (qbytes, scales), statistics = clipping.encode_with_least_error(
        values,
        kind.group_shape,
        bound=symmetric_bound(kind.qtype),
        integers=integers,
        tables=tables,
        dtype=scale_dtype,
    )
    return [qbytes, scales.astype(scale_dtype)], statistics


# -- by Qwix ----------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=2)
def _statistics(weights: jax.Array, array: Any, bound: float) -> dict[str, jax.Array]:
    """Returns the sums of squares of weights and of their errors, and the number of clipped weights."""
    wide, scale = weights.astype(jnp.float32), array.scale.astype(jnp.float32)
    lost = qarray.dequantize(array).astype(jnp.float32) - wide
    far = jnp.abs(qarray.call_with_generic_broadcast(jnp.divide, wide, scale)) > bound * (1 + 1e-6)
    clipped = jnp.sum(far) if array.zero_point is None else jnp.zeros(())
    return {"signal": jnp.sum(jnp.square(wide)), "noise": jnp.sum(jnp.square(lost)), "clipped": clipped}


@on_processor()
def _by_qwix(values: np.ndarray, kind: QuantKind) -> Parts:
    """Encodes by Qwix itself; float16 as float32, since Qwix takes 1 for each scale below 0.0078 there."""
    if not np.isfinite(values).all():
        raise FloatingPointError
    weights = jnp.asarray(values, np.float32 if values.dtype == np.float16 else None)
    array = qarray.quantize(weights, kind.in_qwix(values.shape))  # compiled as one program it rounds scales otherwise
    sums = {name: float(x) for name, x in _statistics(weights, array, symmetric_bound(kind.qtype)).items()}
    shape = tuple(n // group for n, group in zip(values.shape, kind.group_shape, strict=True))
    qvalues = [array.qvalue] if array.zero_point is None else [array.qvalue, array.zero_point]
    qvalue_bytes, *zero_points = (as_bytes(np.asarray(part)) for part in qvalues)
    shared = [np.broadcast_to(part, shape) for part in (np.asarray(array.scale), *zero_points)]
    return [qvalue_bytes, *shared], {**sums, "count": float(values.size)}
