"""The schemes that checkpoints use, each from its own description in config.json.

FP8 with blocks: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3. MXFP4: OCP Microscaling Formats (MX)
v1.0. compressed-tensors: the formats `float-quantized` and `pack-quantized` of that library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.convert.source import TensorInfo
from tpuconv.errors import UnsupportedConfig
from tpuconv.layout import Shape

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Value of each code of an 8-bit float with 4 bits of exponent (arXiv:2209.05433)."""


INT4 = np.arange(-8, 8, dtype=np.float32)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@dataclass(frozen=True)
class Scheme:
    """`values` and `scales` are the suffixes of stored names, `name` that of the tensor they make; `dtype` is the
    stored one of values, `per_element` how many values an element holds, `qtype` the type of one, `table` the value of
    each code: 256 of them, or 16 of codes that lie two in a byte, low half first. `blocks` is the block by rows and
    columns, None along an axis that the shape of the scales decides: one scale, or one for each."""

    title: str
    values: str
    scales: str
    name: str
    dtype: str
    qtype: str
    table: np.ndarray
    per_element: int
    blocks: tuple[int | None, int | None]
    extra: tuple[str, ...] = ()
    groups_apart: bool = False
    decode_scales: Callable[[np.ndarray], np.ndarray] = lambda scales: scales.astype(np.float32)

    def encodes(self, info: TensorInfo) -> bool:
        return info.dtype == self.dtype

    def shape(self, stored: Shape) -> Shape:
        """The shape of the values."""
        if self.groups_apart:  # [..., groups, bytes of a group]
            return (*stored[:-2], stored[-2] * stored[-1] * self.per_element)
        return (*stored[:-1], stored[-1] * self.per_element)

    def stored_shape(self, shape: Shape) -> Shape:
        """The inverse of `shape`."""
        if self.groups_apart:
            assert self.blocks[1] is not None
            return (*shape[:-1], shape[-1] // self.blocks[1], self.blocks[1] // self.per_element)
        return (*shape[:-1], shape[-1] // self.per_element)

    def block(self, shape: Shape, scales: Shape) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, columns = self.blocks
        one_by_one = rows is None and len(scales) == 2 and scales[0] == shape[0] and scales[0] > 1
        if rows is None:
            rows = 1 if one_by_one else prod(shape[:-1])
        return rows, shape[-1] if columns is None else columns

    def scale_shape(self, shape: Shape, scales: Shape) -> Shape:
        """What the shape of the scales must be."""
        rows, columns = self.block(shape, scales)
        if self.blocks == (None, None):
            return scales if scales in ((), (1,), (1, 1)) else (shape[0], 1)
        return (*shape[:-2], *(-(-n // rows) for n in shape[-2:-1]), -(-shape[-1] // columns))


def schemes(quantization: Mapping[str, Any] | None) -> tuple[Scheme, ...]:
    """The schemes that a `quantization_config` describes; none where there is none.

    Raises:
        UnsupportedConfig: a method, format or number of bits that is not implemented.
    """
    if quantization is None:
        return ()
    method = quantization.get("quant_method")
    if method == "fp8":
        return (_fp8_blocks(quantization),)
    if method == "mxfp4":
        return (MXFP4,)
    if method == "compressed-tensors":
        return tuple(map(_compressed, _groups(quantization)))
    raise UnsupportedConfig(
        f"the encoding quant_method={method!r} is not implemented",
        hint="known are fp8 with weight_block_size, mxfp4 and compressed-tensors; or convert an unquantized release",
    )


MXFP4 = Scheme(
    title="MXFP4",
    values="_blocks",
    scales="_scales",
    name="",
    dtype="U8",
    qtype="float4_e2m1fn",
    table=E2M1,
    per_element=2,
    blocks=(1, 32),
    groups_apart=True,
    decode_scales=lambda codes: np.exp2(codes.astype(np.float32) - 127),
)


def _fp8_blocks(quantization: Mapping[str, Any]) -> Scheme:
    block = quantization.get("weight_block_size")
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedConfig(f"FP8 with fmt={quantization['fmt']!r} is not implemented, only 'e4m3'")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise UnsupportedConfig(f"FP8 with weight_block_size={block!r} is not implemented, only [rows, columns]")
    return Scheme(
        title=f"FP8, blocks of {block[0]}x{block[1]}",
        values=".weight",
        scales=".weight_scale_inv",
        name=".weight",
        dtype="F8_E4M3",
        qtype="float8_e4m3fn",
        table=E4M3,
        per_element=1,
        blocks=(block[0], block[1]),
    )


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedConfig("compressed-tensors without config_groups is not implemented")
    return [group.get("weights") or {} for group in groups.values()]


def _compressed(weights: Mapping[str, Any]) -> Scheme:
    """The weights of one group of compressed-tensors: FP8 with a scale for the tensor or for each row, or 4-bit
    integers in groups."""
    kind = tuple(weights.get(key) for key in ("type", "num_bits", "strategy"))
    if kind in (("float", 8, "tensor"), ("float", 8, "channel")):
        return Scheme(
            title=f"compressed-tensors FP8 by {kind[2]}",
            values=".weight",
            scales=".weight_scale",
            name=".weight",
            dtype="F8_E4M3",
            qtype="float8_e4m3fn",
            table=E4M3,
            per_element=1,
            blocks=(None, None),
        )
    size = weights.get("group_size")
    if kind == ("int", 4, "group") and weights.get("symmetric") is True and type(size) is int and size > 0:
        return Scheme(
            title=f"compressed-tensors INT4 in groups of {size}",
            values=".weight_packed",
            scales=".weight_scale",
            name=".weight",
            dtype="I32",
            qtype="int4",
            table=INT4,
            per_element=8,
            blocks=(1, size),
            extra=(".weight_shape",),
        )
    raise UnsupportedConfig(
        f"compressed-tensors weights with {dict(weights)} are not implemented",
        hint="known are float 8 by tensor or channel, and symmetric int 4 by group",
    )
