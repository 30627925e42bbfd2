"""A scheme: how weights of one kind are stored, as a table of values, a block shape, and names and dtypes of tensors.

FP8 with blocks: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3. MXFP4: OCP Microscaling Formats (MX)
v1.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.words import Words
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import CODES, DTYPES, TensorInfo

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""[256]: the number that each byte of an 8-bit float with 4 exponent bits stands for (arXiv:2209.05433)."""
INT4 = np.arange(-8, 8, dtype=np.float32)
INT8 = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
OFFSET_INT8 = np.arange(-128, 128, dtype=np.float32)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
Blocks = tuple[int | None, int | None]
BY_SCALES: Blocks = (None, None)
"""One scale for the tensor, or one for each row: the shape of the scales decides."""


HEADS = ("lm_head", "embed_out", "unembed", "head", "output", "output_layer")
"""The names that releases have for the module of the head; the last ones are GPT-NeoX's, Inkling's, DeepSeek V4's,
Mistral Large 4's and ChatGLM's."""


def is_head(module: str) -> bool:
    """Returns whether a module is the head, which is encoded only if the description says so."""
    return module.rpartition(".")[2] in HEADS


FLAT_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The numbers of values that bitsandbytes gives a scale."""
NO_FACTOR = np.float32(1)
NESTED_SCALES = "U8"
"""The dtype of scales that are encoded themselves."""
NESTED_BLOCK, NESTED_VALUES = 256, 256
STATE_BYTES = 168
"""The length of the text that bitsandbytes writes for a matrix, about."""


@dataclass(frozen=True)
class Flat:
    """Values of a matrix one after the other, in blocks that know no rows, each with a scale. The scales may be encoded
    themselves: bytes are numbers of a table, times a scale of `NESTED_BLOCK` of them, plus an offset (QLoRA,
    arXiv:2305.14314, section 3).

    Attributes:
        state: suffix of a JSON text as bytes, which says the shape, the size of blocks, and the offset.
        nested_scales, nested_table: suffixes of the scales of scales, and of their table.
    """

    state: str
    nested_scales: str
    nested_table: str


QUARTERS = 4
"""The numbers in a byte of BitNet."""


@dataclass(frozen=True)
class Quarters:
    """Numbers of two bits, of which those in a byte are of the same place in each quarter of the rows, the first
    quarter in the lowest bits.

    Attributes:
        divides: whether the scale divides them.
    """

    divides: bool


FLOAT_SCALES = ("F16", "BF16", "F32")
"""Dtypes of scales that are numbers."""
POWERS_OF_TWO = ("U8", "F8_E8M0")
"""Dtypes of scales that are exponents of two."""
MX_GROUP = 32
"""The values that share a scale in the OCP Microscaling Formats (v1.0, section 5.2)."""
MX_TYPES: Mapping[str, str] = {"float4_e2m1fn": "mxfp4", "float8_e4m3fn": "mxfp8"}
"""Qwix's names of types in blocks of `MX_GROUP` with scales in powers of two (OCP Microscaling Formats v1.0)."""

STATED_SHAPE = ".weight_shape"
"""The suffix of the tensor in which compressed-tensors says the shape of packed values."""


@dataclass(frozen=True)
class Scheme:
    """The encoding of the tensors of one kind.

    Attributes:
        title: the name that users see.
        values, scales: suffixes of the stored names.
        name: suffix of the tensor that the two make.
        dtype: safetensors' name of the stored dtype of the values.
        qtype: type of one quantized value.
        table: the number that each quantized value stands for: 256 of them, or 16 of values that lie two in a byte, the
            low half first.
        per_element: how many quantized values one stored element holds.
        blocks: rows and columns that share a scale. None along an axis that the shape of the scales decides: one scale,
            or one for each row.
        extra: suffixes of other tensors that belong to it.
        groups_apart: whether the groups are an axis of their own: [..., groups, bytes of a group].
        xor_mask: the bits in which a stored integer differs from its two's complement.
        tensor_scale: suffix of one more scale, of the whole tensor, which multiplies the scales of the blocks.
        divided: whether the tensor's scale divides them instead.
        factor: what each product of a value and a scale is multiplied by.
        any_sign: whether scales may be zero or negative: auto-round and our `mse` choose the sign of scales of
            integers, float16 rounds small ones to zero, and bitsandbytes gives zeros a scale of zero.
        constants: what some of the `extra` tensors hold.
        zeros: which of the `extra` tensors holds zero points that are all 0, one for each scale.
        unused: suffixes of tensors that say nothing of the weights.
        affine: packing and zero points, if it has them.
        flat: what belongs to values in blocks that know no rows.
        quarters: how values of two bits lie in bytes, if they do.
        high_first: whether of two values in a byte the first is in the high half.
        column_scales: suffix of one more scale for each column, which the inputs are multiplied by. It may be absent.
        input_first: whether matrices are stored with their axes swapped: [in, out].
        unwritten: why no export writes tensors of this scheme; empty if one does.
        rounds_inputs: whether servers round the inputs of these matrices to the type of the weights too.
        scales_in_bytes: whether the dtype of the scales is written as U8.
        scale_dtype, by_row: dtype of the scales, and whether there is one for each row, by the description. What is
            really stored is read in any case.
    """

    title: str
    values: str
    scales: str
    name: str
    dtype: str
    qtype: str
    table: np.ndarray
    per_element: int
    blocks: Blocks
    extra: tuple[str, ...] = ()
    groups_apart: bool = False
    xor_mask: int = 0
    tensor_scale: str = ""
    divided: bool = False
    factor: np.float32 = NO_FACTOR
    any_sign: bool = False
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    zeros: str = ""
    unused: tuple[str, ...] = ()
    affine: Affine | None = None
    flat: Flat | None = None
    quarters: Quarters | None = None
    high_first: bool = False
    column_scales: str = ""
    input_first: bool = False
    unwritten: str = ""
    rounds_inputs: bool = False
    scales_in_bytes: bool = False
    scale_dtype: str = "F32"
    by_row: bool = False

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all stored names."""
        own = (self.values, self.scales, self.tensor_scale, self.column_scales, *self.extra)
        return tuple(filter(None, own)) + (self.affine.suffixes if self.affine else ())

    @property
    def described(self) -> tuple[str, ...]:
        """The suffixes of tensors that only repeat facts of the scheme; the last ones may be absent."""
        if self.affine is None:
            return self.extra
        has_zeros = bool(self.affine.zero_points) and not self.affine.symmetric
        return (*self.extra, *self.affine.suffixes[1 if has_zeros else 0 :])

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """The dtypes that the scales may have. Bytes are exponents, numbers in FP8 or numbers of a table: the
        description alone tells which."""
        if self.flat:
            return ("F32", NESTED_SCALES)
        if self.affine:
            return FLOAT_SCALES
        if self.scale_dtype == "U8":
            return POWERS_OF_TWO
        if self.scale_dtype == "F8_E8M0":
            return (*POWERS_OF_TWO, *FLOAT_SCALES)
        if self.scale_dtype not in FLOAT_SCALES:
            return (self.scale_dtype,)
        # Times a factor, scales in bfloat16 would be rounded again.
        return (*FLOAT_SCALES, "F8_E8M0") if self.factor == NO_FACTOR else ("F32", "F16")

    def encodes(self, info: TensorInfo) -> bool:
        """Returns True if a stored tensor holds values of this scheme, by its name, dtype and rank. None are
        in an empty one."""
        if info.dtype != self.dtype or not info.name.endswith(self.values):
            return False
        has_blocks = len(info.shape) == 2 if self.affine else len(info.shape) > self.groups_apart
        if self.affine and self.affine.offsets:
            has_blocks = len(info.shape) > 1
        if self.flat:
            has_blocks = len(info.shape) == 2 and info.shape[1] == 1
        if self.quarters:
            has_blocks = len(info.shape) == 2
        return has_blocks and info.nbytes > 0

    def shape(self, stored: Shape) -> Shape:
        """Returns the shape of the values that a tensor of the shape `stored` holds; of flat ones, their number."""
        if self.affine:
            return self.affine.words.shape(stored)
        if self.flat:
            return (prod(stored) * self.per_element,)
        if self.quarters:
            return (stored[0] * self.per_element, *stored[1:])
        if self.groups_apart:  # [..., groups, bytes of a group]
            return (*stored[:-2], stored[-2] * stored[-1] * self.per_element)
        return (*stored[:-1], stored[-1] * self.per_element)

    def stored_shape(self, shape: Shape) -> Shape:
        """Returns the inverse of `shape`."""
        if self.affine:
            return self.affine.words.stored_shape(shape)
        if self.flat:
            return (-(-prod(shape) // self.per_element), 1)
        if self.quarters:
            return (-(-shape[0] // self.per_element), *shape[1:])
        if self.groups_apart:
            assert self.blocks[1] is not None
            return (*shape[:-1], shape[-1] // self.blocks[1], self.blocks[1] // self.per_element)
        return (*shape[:-1], -(-shape[-1] // self.per_element))

    def shapes(self, stored: Shape) -> Iterator[Shape]:
        """Yields the shapes that values stored in a tensor of the shape `stored` may have, the widest first: where a
        release says the shape, the last word of a row may be filled up."""
        widest = self.shape(stored)
        narrower = self.per_element if STATED_SHAPE in self.extra and len(widest) == 2 else 1
        return ((*widest[:-1], widest[-1] - n) for n in range(min(narrower, widest[-1])))

    def for_shape(self, shape: Shape) -> "Scheme":
        """Returns the scheme for values of this shape: of rows that fill no words one that unpacks row by row."""
        if STATED_SHAPE not in self.extra or self.affine or len(shape) != 2 or shape[1] % self.per_element == 0:
            return self
        bits = 8 * DTYPES[self.dtype].itemsize // self.per_element
        affine = Affine(Words(bits, 1), "", Words(bits, 0), symmetric=True, centered=True)
        return replace(self, affine=affine)

    def block(self, shape: Shape, scales: Shape) -> tuple[int, int]:
        """Rows and columns of the values that share a scale, for values and scales of these shapes. Flat blocks must
        follow the rows (`has_blocks_of_rows`)."""
        rows, columns = self.blocks
        if self.flat:
            size = prod(shape) // prod(scales)
            return max(1, size // shape[-1]), min(size, shape[-1])
        one_by_one = rows is None and scales in ((shape[0],), (shape[0], 1)) and shape[0] > 1
        if rows is None:
            rows = 1 if one_by_one else prod(shape[:-1])
        return rows, shape[-1] if columns is None else columns

    def has_blocks_of_rows(self, shape: Shape, scales: Shape) -> bool:
        """Returns True if each block is a part of a row, or some complete rows."""
        if self.flat is None:
            return True
        size, rest = divmod(prod(shape), prod(scales))
        return not rest and size in (self.blocks[1], *FLAT_BLOCKS) and (shape[-1] % size == 0 or size % shape[-1] == 0)

    def scale_shape(self, shape: Shape, scales: Shape) -> Shape:
        """Returns the shape that the scales must have for values of the shape `shape`. `scales` is the stored one."""
        if self.flat:
            assert self.blocks[1] is not None
            counts = [(-(-prod(shape) // size),) for size in (self.blocks[1], *FLAT_BLOCKS)]
            return scales if scales in counts else counts[0]
        rows, columns = self.block(shape, scales)
        if self.blocks == BY_SCALES:
            if scales in ((), (1,), (1, 1)) or len(shape) != 2:
                return scales if len(scales) < 3 and prod(scales) == 1 else (1,)
            return scales if scales == shape[:1] else (shape[0], 1)
        grid = *(-(-n // rows) for n in shape[-2:-1]), -(-shape[-1] // columns)
        if len(shape) == 2 and scales == (grid[0], 1, grid[1], 1):  # ModelOpt leaves the axes within a block in place
            return scales
        return (*shape[:-2], *grid)

    def stored(self, name: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
        """Returns the dtype and shape, by name, of the tensors in which a release stores the tensor `name` of this
        shape."""
        base = name.removesuffix(self.name)
        shape = shape[::-1] if self.input_first else shape
        scales = self.scale_shape(shape, (shape[0], 1) if self.by_row else () if self.flat else (1,))
        return {
            base + self.values: (self.dtype, self.stored_shape(shape)),
            base + self.scales: ("U8" if self.scales_in_bytes else self.scale_dtype, scales),
            **({base + self.tensor_scale: ("F32", (1,))} if self.tensor_scale else {}),
            **{base + suffix: kind for suffix, kind in self.extra_kinds(shape, scales).items()},
            **{
                base + suffix: (self.scale_dtype if suffix == self.affine.offsets else "I32", own)
                for suffix, own in self.affine_shapes(shape, scales).items()
                if self.affine is not None and (self.affine.writes_index or suffix != self.affine.group_index)
            },
        }

    def extra_kinds(self, shape: Shape, scales: Shape) -> dict[str, tuple[str, Shape]]:
        """Returns the dtype and shape, by suffix, of the other tensors that belong to values and scales of these
        shapes."""
        kinds = {suffix: (CODES[value.dtype.name], value.shape) for suffix, value in self.constants.items()}
        if self.zeros:
            words = self.affine.zero_words if self.affine else None
            kinds[self.zeros] = ("I32", words.stored_shape(scales)) if words else (self.dtype, scales)
        if self.flat is None:
            return {suffix: kinds.get(suffix, ("I32", (len(shape),))) for suffix in self.extra}
        kinds[self.flat.state] = "U8", (STATE_BYTES,)
        if self.scale_dtype == NESTED_SCALES:
            kinds[self.flat.nested_scales] = "F32", (-(-prod(scales) // NESTED_BLOCK),)
            kinds[self.flat.nested_table] = "F32", (NESTED_VALUES,)
        return kinds

    def affine_shapes(self, shape: Shape, scales: Shape) -> dict[str, Shape]:
        """Returns the stored shapes, by suffix, of zero points, of the groups of rows, and of offsets."""
        if self.affine is None:
            return {}
        shapes = {
            self.affine.zero_points: self.affine.zero_words.stored_shape(scales),
            self.affine.group_index: shape[:1],
            self.affine.offsets: scales,
        }
        return {suffix: shapes[suffix] for suffix in self.affine.suffixes}

    def expected(self, suffix: str, shape: Shape, scales: Shape, dtype: str) -> np.ndarray:
        """Returns the contents of the other tensor `suffix` that belongs to values and scales of these shapes."""
        if suffix in self.constants:
            return self.constants[suffix]
        if suffix == self.zeros:
            return np.zeros(self.extra_kinds(shape, scales)[suffix][1], DTYPES[dtype])
        if self.affine and suffix == self.affine.zero_points:
            return self.affine.stored_zeros(np.full(scales, self.affine.middle, np.uint8))
        if self.affine and suffix == self.affine.group_index:
            return (np.arange(shape[0]) // self.block(shape, scales)[0]).astype(DTYPES[dtype])
        return np.array(shape, DTYPES[dtype])


def decode_scales(scales: np.ndarray) -> np.ndarray:
    """Stored scales in float32, in the same shape. Bytes are exponents of two (E8M0)."""
    if scales.dtype == np.uint8:
        with np.errstate(over="ignore"):  # 255 is NaN; it becomes infinity here
            return np.exp2(scales.astype(np.float32) - 127)
    return scales.astype(np.float32)


FP4_FIELDS: Mapping[str, Any] = {"dtype": "U8", "qtype": "float4_e2m1fn", "table": E2M1, "per_element": 2}
FP8_FIELDS: Mapping[str, Any] = {
    "values": ".weight",
    "dtype": "F8_E4M3",
    "qtype": "float8_e4m3fn",
    "table": E4M3,
    "per_element": 1,
}
FP8_SCALES = ("weight_scale_inv", "weight_scale")
"""Suffixes that writers use for the scales of FP8 tensors."""
MXFP4 = Scheme(
    title="MXFP4",
    values="_blocks",
    scales="_scales",
    name="",
    blocks=(1, MX_GROUP),
    groups_apart=True,
    scale_dtype="U8",
    **FP4_FIELDS,
)
FP4_BY_32 = Scheme(
    title="FP4, groups of 32",
    values=".weight",
    scales=".scale",
    name=".weight",
    blocks=(1, 32),
    scale_dtype="F8_E8M0",
    **{**FP4_FIELDS, "dtype": "I8"},
)
"""The experts of DeepSeek V4."""


def fp8_scheme(title: str, scales: str, blocks: Blocks, *, by_row: bool = False) -> Scheme:
    """Returns a scheme of values in float8_e4m3fn. `scales` is the suffix of the stored scales. All writers of one
    scale for a tensor or a row mean inputs in FP8 too."""
    return Scheme(
        title=title,
        scales=scales,
        name=".weight",
        blocks=blocks,
        rounds_inputs=blocks == BY_SCALES,
        by_row=by_row,
        **FP8_FIELDS,
    )


def mxfp8_scheme(title: str, scales: str) -> Scheme:
    """As `fp8_scheme`, with scales in powers of two, a byte for each group of inputs (OCP Microscaling Formats v1.0,
    section 5.3)."""
    return replace(fp8_scheme(title, scales, (1, MX_GROUP)), scale_dtype="U8")


FP8_BY_32 = replace(fp8_scheme("FP8, groups of 32", ".scale", (1, MX_GROUP)), scale_dtype="F8_E8M0")
"""The tables of n-grams of DeepSeek V4.1, whose vectors are read one by one."""


def is_block(block: Any) -> bool:
    """Returns True if a value of a description is a block: [rows, columns], both positive."""
    return isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
