"""The instructions of a compiled TPU program, read from its scheduled HLO text. A shape in the text says which memory a
value is in: `S(1)` is on the chip (VMEM), no `S` is HBM."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

TYPE_BITS: Mapping[str, int] = {
    **{"pred": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4},
    **{"f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e8m0fnu": 8, "f8e4m3": 8, "f8e3m4": 8},
    **{"bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f32": 32, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f64": 64},
}
_SHAPE = re.compile(rf"\b({'|'.join(sorted(TYPE_BITS, key=len, reverse=True))})\[([0-9,]*)\](?:\{{([^{{}}]*)\}})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(")


@dataclass(frozen=True)
class Value:
    """One array of a result. `space` is its memory space, 0 for HBM; `nbytes` includes the padding of its tiles."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    nbytes: int


def values(text: str) -> list[Value]:
    """Returns the arrays of a shape, such as `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}`, or of a tuple of shapes."""
    out = []
    for dtype, dims_text, layout in _SHAPE.findall(text):
        dims = tuple(int(size) for size in dims_text.split(",") if size)
        padded, space = list(dims), 0
        if layout:
            order = [int(axis) for axis in layout.partition(":")[0].split(",") if axis]
            in_space, tile = re.search(r"S\((\d+)\)", layout), re.search(r"T\(([0-9,]+)\)", layout)
            space = int(in_space[1]) if in_space else 0
            if tile and len(order) == len(dims):
                for size, axis in zip(reversed(tile[1].split(",")), order, strict=False):
                    padded[axis] = -(-padded[axis] // int(size)) * int(size)
        out.append(Value(dtype, dims, space, prod(padded) * TYPE_BITS[dtype] // 8))
    return out


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its computation.
        result: the text of its shape.
        op: such as "fusion".
        operands: names of the instructions that it takes.
        arguments: the text between its brackets.
        attributes: the text after its brackets.
        is_root: whether its value is the result of the computation.
    """

    name: str
    result: str
    op: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def values(self) -> list[Value]:
        """The arrays of the result."""
        return values(self.result)

    @property
    def nbytes(self) -> int:
        """The bytes of the result."""
        return sum(value.nbytes for value in self.values)

    @property
    def hbm(self) -> int:
        """The bytes of the result that are in HBM."""
        return sum(value.nbytes for value in self.values if value.space == 0)

    @property
    def cycles(self) -> int:
        """The compiler's estimate of its clock cycles; 0 if there is none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0

    @property
    def accessed(self) -> int | None:
        """The bytes that a custom call reads and writes by its own cost estimate; None if it has none."""
        found = re.search(r'"bytes_accessed":"(\d+)"', self.attributes) if self.op == "custom-call" else None
        return int(found[1]) if found else None

    def called(self, attribute: str) -> str:
        """Returns the name of the computation that `attribute` refers to, or ""."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """The operation of the model that this instruction was compiled from, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def kernel(self) -> str:
        """The name of a kernel or a copy without its number. Newer compilers may append the name of the parameter that
        takes the result: `few_rows.2.x`."""
        return re.sub(r"\.\d+(\..*)?$", "", self.name)

    @property
    def target(self) -> str:
        """The target of a custom call, or ""."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""


def _split_type(text: str) -> tuple[str, str]:
    """Splits `operands), attributes` into operands and attributes."""
    depth = 0
    for at, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            if depth == 0:
                return text[:at], text[at + 1 :]
            depth -= 1
    return text, ""


Computation = dict[str, Instruction]


def read_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a program's HLO text by their names, and the name of its entry."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _COMPUTATION.match(line)
            if head and line.rstrip().endswith("{"):
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            continue
        if found := _INSTRUCTION.match(line):
            arguments, attributes = _split_type(found[5])
            operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
            current[found[2]] = Instruction(
                found[2], found[3], found[4], operands, arguments, attributes, bool(found[1])
            )
    return computations, entry
