"""Statistics of a compiled TPU program, from its scheduled HLO text: HBM traffic, collectives, products, copies, and an
estimate of its time.

XLA's own cost analysis counts a loop's body once, and a prefetch several times. `Schedule` follows the instructions in
the order of execution, and counts a loop's body once per iteration.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from tpuconv.verify.topology.collectives import SENT_SHARES, Collective, find_collective
from tpuconv.verify.topology.instructions import TYPE_BITS, Computation, Instruction, Value, read_computations

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
VIEWS = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})
"""Instructions of a fused computation whose result has the elements of their operand."""
BOOKKEEPING = frozenset({"ConcatBitcast", "SliceBitcast", "AssumeGatherIndicesInBound", "AllocateBuffer"})
"""Custom calls that do nothing when they run."""

LARGE_COPY = 1 << 20
"""Smaller copies, in bytes, are not listed."""


@dataclass(frozen=True)
class ScheduledStep:
    """An instruction of the schedule: how often it runs, the HBM bytes that it reads and writes each time, and the
    collective that it is, starts or ends."""

    instruction: Instruction
    computation: str
    times: int
    read: int
    written: int
    collective: Collective | None = None

    @property
    def expected(self) -> int:
        """The expected bytes read and written. They are fewer for a kernel whose cost estimate says that it reads only
        the chosen experts."""
        nbytes, accessed = self.read + self.written, self.instruction.accessed
        return nbytes if accessed is None else min(nbytes, accessed)


class Estimate(NamedTuple):
    """The estimated seconds of a program, and of these the seconds in which the core waits for collectives."""

    seconds: float
    communication: float


class Schedule:
    """The scheduled program of one device. `text` is the compiled program's HLO."""

    def __init__(self, text: str):
        self.computations, self.entry = read_computations(text)
        devices = re.search(r"\bnum_partitions=(\d+)", text)
        self.devices = int(devices[1]) if devices else 1
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
                found = find_collective(i, self.computations[computation], self.computations, self.devices)
                read, written = (0, 0) if found else self._traffic(i, computation)
                yield ScheduledStep(i, computation, times, read, written, found)

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
        if i.op.endswith("-done"):
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
            if value.space == 0 and result.op != "parameter" and result.op not in SENT_SHARES:  # else carried along
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
            elif (i.op == "dynamic-update-slice" and at == 0) or i.op == "tuple" or i.op in SENT_SHARES:
                continue  # updated in place, or carried along for a collective that is under way
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
        """Returns, for each kind of collective, their count and their `Collective.nbytes`."""
        out: dict[str, list[int]] = {}
        for step in self.all_steps:
            if (found := step.collective) and found.end != "done":
                count = out.setdefault(found.op, [0, 0])
                count[0] += step.times
                count[1] += step.times * found.nbytes
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
        and the bytes read and written. Those that the compiler made have its name of them."""
        out: dict[str, list[int]] = {}
        for step in self.all_steps:
            i = step.instruction
            is_copy = i.op in ("copy", "transpose", "copy-start")
            is_copy = is_copy or (i.op == "fusion" and i.name.startswith(("copy", "transpose")))
            nbytes = step.read + step.written
            if is_copy and step.read and step.written and nbytes >= LARGE_COPY:
                count = out.setdefault(i.source or i.kernel, [0, 0])
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

    def estimate(self, bandwidth: float, ici: float, clock: float) -> Estimate:
        """Returns the estimated time of one run. Experimental.

        The schedule is simulated with three timelines: of the core, of the HBM, on which prefetches wait for each
        other, and of the links, on which collectives do. The core waits for the prefetches that it needs, and for a
        collective until it is done. So an asynchronous collective takes no time of its own if the work between its
        start and its done takes longer; it is assumed to slow that work by nothing. The core needs 0.8 of the
        compiler's cycles, which is fitted to published times (benchmarks/published.py).

        Args:
            bandwidth: of the HBM in bytes/s.
            ici: bandwidth of one link in one direction in bytes/s.
            clock: of the core in Hz.
        """
        cycles_share = 0.8
        core = memory = communication = 0.0
        arrives: dict[str, float] = {}
        links: dict[str, float] = defaultdict(float)
        for step in self._unrolled():
            i, collective = step.instruction, step.collective
            if collective:
                if collective.end != "done":
                    links[collective.lane] = max(links[collective.lane], core) + collective.seconds(ici)
                    arrives[collective.pair] = links[collective.lane]
                if collective.end != "start":
                    waits = max(0.0, arrives.get(collective.pair, core) - core)
                    core, communication = core + waits, communication + waits
            elif i.op in ("copy-start", "slice-start"):
                memory = max(memory, core) + max(step.read, step.written) / bandwidth
                arrives[i.name] = memory
            elif i.op.endswith("-done"):
                core = max(core, arrives.get(i.operands[0], core))
            else:
                nbytes = step.expected
                if nbytes:
                    memory = max(memory, core) + nbytes / bandwidth
                core += cycles_share * i.cycles / clock if i.cycles else nbytes / bandwidth
        return Estimate(max(core, memory), communication)

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
