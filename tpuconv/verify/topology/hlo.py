"""Statistics of a compiled TPU program, from its scheduled HLO text: HBM traffic, collectives, products, copies, and an
estimate of its time.

XLA's own cost analysis counts a loop's body once, and a prefetch several times. `Schedule` follows the instructions in
the order of execution, and counts a loop's body once per iteration. A shape in the text says which memory a value is
in: `S(1)` is on the chip (VMEM), no `S` is HBM.

One file because parser, traffic and statistics share the `Instruction` and are read together.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

TYPE_BITS: Mapping[str, int] = {
    **{"pred": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4},
    **{"f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e8m0fnu": 8, "f8e4m3": 8, "f8e3m4": 8},
    **{"bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f32": 32, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f64": 64},
}
_SHAPE = re.compile(rf"\b({'|'.join(sorted(TYPE_BITS, key=len, reverse=True))})\[([0-9,]*)\](?:\{{([^{{}}]*)\}})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(")

FREE = frozenset(
    {
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "partition-id",
        "replica-id",
        "after-all",
        "iota",
    }
)
"""Instructions that move no data."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute")
VIEWS = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})
"""Instructions of a fused computation whose result has the elements of their operand."""
BOOKKEEPING = frozenset({"ConcatBitcast", "SliceBitcast", "AssumeGatherIndicesInBound", "AllocateBuffer"})
"""Custom calls that do nothing when they run."""

LARGE_COPY = 1 << 20
"""Smaller copies, in bytes, are not listed."""


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
    def kind(self) -> str:
        """The op, without `-start`."""
        return self.op.removesuffix("-start")

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
        """The name of a kernel without its number. Newer compilers may append the name of the parameter that takes the
        result: `few_rows.2.x`."""
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


@dataclass(frozen=True)
class ScheduledStep:
    """An instruction of the schedule: how often it runs, and the HBM bytes that it reads and writes each time."""

    instruction: Instruction
    computation: str
    times: int
    read: int
    written: int

    @property
    def expected(self) -> int:
        """The expected bytes read and written. They are fewer for a kernel whose cost estimate says that it reads only
        the chosen experts."""
        nbytes, accessed = self.read + self.written, self.instruction.accessed
        return nbytes if accessed is None else min(nbytes, accessed)


class Schedule:
    """The scheduled program of one device. `text` is the compiled program's HLO."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if not line.startswith(" "):
                head = _COMPUTATION.match(line)
                if head and line.rstrip().endswith("{"):
                    current = self.computations.setdefault(head[2], {})
                    self.entry = head[2] if head[1] else self.entry
                continue
            if found := _INSTRUCTION.match(line):
                arguments, attributes = _split_type(found[5])
                operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
                current[found[2]] = Instruction(
                    found[2], found[3], found[4], operands, arguments, attributes, bool(found[1])
                )
        self._users: dict[str, Mapping[str, list[tuple[Instruction, int]]]] = {}

    # -- order of execution -------------------------------------------------------------------------------------------

    def steps(self, computation: str = "", times: int = 1) -> Iterator[ScheduledStep]:
        """Yields the steps of a computation (the entry by default) in the order of execution. The body of a loop is
        yielded once, with the number of its iterations in `times`. Of a conditional the first branch is taken."""
        computation = computation or self.entry
        for i in self.computations[computation].values():
            if i.op in FREE or (i.op == "custom-call" and i.target in BOOKKEEPING):
                continue
            if i.op == "while":
                yield from self.steps(i.called("body"), times * self._iterations(i.called("condition")))
            elif i.op == "call":
                yield from self.steps(i.called("to_apply"), times)
            elif i.op == "conditional":
                branches = re.search(r"branch_computations=\{%?([\w.\-]+)", i.attributes)
                branch = branches[1] if branches else i.called("true_computation")
                yield from self.steps(branch, times)
            else:
                yield ScheduledStep(i, computation, times, *self._traffic(i, computation))

    def _iterations(self, condition: str) -> int:
        """Returns the iterations of a loop: the constant in its condition; 1 if there is none."""
        instructions = self.computations[condition]
        root = next(i for i in instructions.values() if i.is_root)
        compared = [i for name in root.operands if (i := instructions.get(name)) and i.op == "constant"]
        for i in compared or instructions.values():
            if i.op == "constant" and (found := re.match(r"(\d+)$", i.arguments)):
                return int(found[1])
        return 1

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _traffic(self, i: Instruction, computation: str) -> tuple[int, int]:
        """Returns the bytes that an instruction reads from HBM and writes to HBM, each time it runs."""
        instructions = self.computations[computation]
        operands = [instructions[name] for name in i.operands if name in instructions]
        if i.op.endswith("-done") or i.kind in COLLECTIVES:
            return 0, 0
        if i.op == "fusion":
            return self._fusion_traffic(i, instructions)
        if i.op in ("copy-start", "slice-start"):
            first, second = i.values[:2]
            target, source = (first, second) if i.op == "copy-start" else (second, first)
            return (0 if source.space else target.nbytes), (0 if target.space else target.nbytes)
        if i.op == "dynamic-update-slice":
            update = instructions.get(i.operands[1])
            return 0, (update.nbytes if update and i.hbm else 0)
        if i.op in ("dynamic-slice", "slice", "gather"):
            return (i.nbytes if operands and operands[0].hbm else 0), i.hbm
        return sum(operand.hbm for operand in {o.name: o for o in operands}.values()), i.hbm

    def _fusion_traffic(self, i: Instruction, instructions: Computation) -> tuple[int, int]:
        """As `_traffic`, for a fusion among these instructions."""
        inner_name = i.called("calls")
        inner = self.computations[inner_name]
        parameters = {int(p.arguments): p.name for p in inner.values() if p.op == "parameter"}
        read = 0
        for at, name in enumerate(i.operands):
            full = instructions[name].hbm if name in instructions else 0
            if full:
                read += min(self._bytes_read(inner_name, parameters[at], full), full) if at in parameters else full
        root = next(r for r in inner.values() if r.is_root)
        roots = [inner[name] for name in root.operands] if root.op == "tuple" else [root]
        written = 0
        for value, result in zip(i.values, roots, strict=False):
            if value.space == 0:
                written += self._written(inner, result, value.nbytes)
        return read, written

    def _bytes_read(self, computation: str, name: str, full: int, depth: int = 0) -> int:
        """Returns the bytes that a fused computation reads of the value `name`, which has `full` bytes. If it only
        reads slices, the slices count."""
        if computation not in self._users:
            users = defaultdict(list)
            for i in self.computations[computation].values():
                for at, operand in enumerate(i.operands):
                    users[operand].append((i, at))
            self._users[computation] = users
        total = 0
        found = self._users[computation].get(name, [])
        for i, at in found:
            if i.op in ("dynamic-slice", "slice", "gather") and at == 0:
                total += i.nbytes
            elif i.op == "dynamic-update-slice" and at == 0:
                continue
            elif depth < 12 and i.op in VIEWS:
                total += self._bytes_read(computation, i.name, full, depth + 1)
            elif depth < 12 and i.op == "fusion":
                inner = self.computations[i.called("calls")]
                parameter = next((p.name for p in inner.values() if p.op == "parameter" and p.arguments == str(at)), "")
                in_place = f"output_to_operand_aliasing={{{{}}: ({at}," in i.attributes
                total += (
                    self._bytes_read(computation, i.name, full, depth + 1)
                    if in_place
                    else self._bytes_read(i.called("calls"), parameter, full, depth + 1)
                )
            else:
                return full
        return total if found else full

    def _written(self, inner: Computation, result: Instruction, full: int) -> int:
        """Returns the bytes that a fusion writes of a result that has `full` bytes. Of an update in place, the update
        counts."""
        while result.op == "bitcast" and result.operands and result.operands[0] in inner:
            result = inner[result.operands[0]]
        if result.op == "dynamic-update-slice":
            return inner[result.operands[1]].nbytes
        if result.op == "fusion":
            nested = self.computations[result.called("calls")]
            root = next(r for r in nested.values() if r.is_root)
            return nested[root.operands[1]].nbytes if root.op == "dynamic-update-slice" else full
        return full

    # -- statistics ---------------------------------------------------------------------------------------------------

    @cached_property
    def all_steps(self) -> Sequence[ScheduledStep]:
        """The steps of the entry computation."""
        return tuple(self.steps())

    @property
    def hbm(self) -> tuple[int, int]:
        """The bytes read from HBM, and written to HBM."""
        steps = self.all_steps
        return sum(s.times * s.read for s in steps), sum(s.times * s.written for s in steps)

    @property
    def hbm_expected(self) -> int:
        """The expected bytes read from and written to HBM, if tokens choose experts uniformly."""
        return sum(s.times * s.expected for s in self.all_steps)

    def collectives(self) -> list[dict[str, Any]]:
        """Returns, for each kind of collective, their count and the bytes of their results on one device."""
        out: dict[str, list[int]] = {}
        for step in self.all_steps:
            if (op := _collective(step.instruction)) and not step.instruction.op.endswith("-done"):
                count = out.setdefault(op, [0, 0])
                count[0] += step.times
                count[1] += step.times * _moved(step.instruction)
        return [{"op": op, "count": count, "bytes": nbytes} for op, (count, nbytes) in sorted(out.items())]

    def products(self) -> list[dict[str, Any]]:
        """Returns the counts of products by the types of their operands: as multiplied, and as stored. The stored type
        is narrower if an operand is converted first: an int8 weight is stored as s8, and may be multiplied as bf16."""
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for step in self.all_steps:
            for name in self._fused(step.instruction):
                instructions = self.computations[name]
                for i in instructions.values():
                    if i.op in ("convolution", "dot") and len(i.operands) > 1:
                        sides = [_operand_types(instructions, operand) for operand in i.operands[:2]]
                        multiplied = " x ".join(sorted(side[0] for side in sides))
                        stored = " x ".join(sorted(side[1] for side in sides))
                        counts[multiplied, stored] += step.times
        return [
            {"multiplied": multiplied, "stored": stored, "count": count}
            for (multiplied, stored), count in sorted(counts.items(), key=lambda item: -item[1])
        ]

    def _fused(self, i: Instruction) -> Iterator[str]:
        """Yields the names of the computations inside a fusion."""
        if i.op == "fusion" and (name := i.called("calls")):
            yield name
            for inner in self.computations[name].values():
                yield from self._fused(inner)

    def copies(self) -> list[dict[str, Any]]:
        """Returns the copies and layout changes within HBM, largest first: for each operation of the model, their count
        and the bytes read and written."""
        out: dict[str, list[int]] = {}
        for step in self.all_steps:
            i = step.instruction
            is_copy = i.op in ("copy", "transpose", "copy-start")
            is_copy = is_copy or (i.op == "fusion" and i.name.startswith(("copy", "transpose")))
            nbytes = step.read + step.written
            if is_copy and step.read and step.written and nbytes >= LARGE_COPY:
                count = out.setdefault(i.source or i.name, [0, 0])
                count[0] += step.times
                count[1] += step.times * nbytes
        largest = sorted(out.items(), key=lambda item: -item[1][1])
        return [{"source": source, "count": count, "bytes": nbytes} for source, (count, nbytes) in largest]

    def custom_calls(self) -> list[dict[str, Any]]:
        """Returns, for each kernel, its count, the bytes of its operands and results in HBM, and the bytes of them that
        it is expected to read and write."""
        out: dict[str, list[int]] = {}
        for step in self.all_steps:
            if step.instruction.op == "custom-call":
                sums = out.setdefault(step.instruction.kernel, [0, 0, 0])
                for at, number in enumerate((1, step.read + step.written, step.expected)):
                    sums[at] += step.times * number
        return [
            {"kernel": kernel, "count": count, "bytes": nbytes, "expected_bytes": expected}
            for kernel, (count, nbytes, expected) in sorted(out.items())
        ]

    def estimate(self, bandwidth: float, ici: float, clock: float) -> float:
        """Returns the estimated seconds of one run. Experimental.

        The schedule is simulated with two timelines: the core's, and the HBM's, on which prefetches wait for each
        other. The core waits for the prefetches that it needs. Two constants are fitted to published times
        (benchmarks/published.py): the core needs 0.8 of the compiler's cycles, and a collective has 6 hops of 0.25 us.

        Args:
            bandwidth: of the HBM in bytes/s.
            ici: bandwidth of one link in one direction in bytes/s.
            clock: of the core in Hz.
        """
        cycles_share = 0.8
        core = memory = 0.0
        arrives: dict[str, float] = {}
        for step in self._unrolled():
            i = step.instruction
            if i.op in ("copy-start", "slice-start"):
                memory = max(memory, core) + max(step.read, step.written) / bandwidth
                arrives[i.name] = memory
            elif i.op.endswith("-done"):
                core = max(core, arrives.get(i.operands[0], core))
            elif _collective(i):
                core += _collective_seconds(i, ici)
            else:
                nbytes = step.expected
                if nbytes:
                    memory = max(memory, core) + nbytes / bandwidth
                core += cycles_share * i.cycles / clock if i.cycles else nbytes / bandwidth
        return max(core, memory)

    def communication(self, ici: float) -> float:
        """Returns the seconds of `estimate` that are spent in collectives."""
        return sum(
            _collective_seconds(step.instruction, ici) for step in self._unrolled() if _collective(step.instruction)
        )

    def _unrolled(self) -> Iterator[ScheduledStep]:
        """Yields each step as often as it runs. Consecutive steps of one loop are repeated together."""
        steps = self.all_steps
        at = 0
        while at < len(steps):
            end = at
            while end < len(steps) and (steps[end].computation, steps[end].times) == (
                steps[at].computation,
                steps[at].times,
            ):
                end += 1
            for _ in range(steps[at].times):
                yield from steps[at:end]
            at = end


def _collective(i: Instruction) -> str:
    """Returns the kind of collective that an instruction is or starts, or ""."""
    if i.kind in COLLECTIVES:
        return i.kind
    if i.op == "async-start":
        return next((name for name in COLLECTIVES if name in i.called("calls") or name in i.name), "")
    return ""


def _collective_seconds(i: Instruction, ici: float) -> float:
    """Returns the estimated seconds of a collective over links of `ici` bytes/s. An all-reduce is a reduce-scatter and
    an all-gather."""
    hop_seconds, hops, links = 0.25e-6, 6, 2
    phases = 2 if _collective(i) == "all-reduce" else 1
    return phases * (hop_seconds * hops + _moved(i) / (links * ici))


def _moved(i: Instruction) -> int:
    """Returns the bytes of a collective's result. The result of a start includes the operands."""
    return i.nbytes // 2 if i.op.endswith("-start") else i.nbytes


def _operand_types(instructions: Computation, name: str) -> tuple[str, str]:
    """Returns the type of an operand, and the narrowest type that it had between a parameter of the fusion and here."""
    operand = instructions.get(name)
    first = operand.values[0] if operand and operand.values else Value("f64", (), 0, 0)
    narrowest, todo, seen = first, [name], set()
    while todo:
        i = instructions.get(todo.pop())
        if i is None or i.name in seen or not i.values:
            continue
        seen.add(i.name)
        value = i.values[0]
        if prod(value.dims) < prod(first.dims):
            continue  # scales
        if TYPE_BITS[value.dtype] < TYPE_BITS[narrowest.dtype] and value.dtype != "pred":
            narrowest = value
        if i.op in VIEWS | {"multiply", "dynamic-slice", "slice", "fusion"}:
            todo += i.operands
    return first.dtype, narrowest.dtype
