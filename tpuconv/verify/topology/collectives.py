"""The collectives of a compiled TPU program: where the text names them, the bytes that they move, their time.

The compiler writes a collective as an instruction of its own, as a pair of a start and a done, or as fusions: a
reduce-scatter as one that calls `all-reduce-scatter`, an asynchronous collective as two around the custom calls
`AsyncCollectiveStart` and `AsyncCollectiveDone`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from tpuconv.verify.topology.instructions import Computation, Instruction

SCATTERED = "all-reduce-scatter"
"""How the computation of a reduce-scatter that is written as a fusion begins its name."""

End = Literal["", "start", "done"]
"""Which end of an asynchronous collective an instruction is; "" if it is a complete one."""

ASYNC_ENDS: Mapping[str, End] = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}
"""Custom calls of the fusions in which an asynchronous collective begins and ends."""

HOP_SECONDS, HOPS, LINKS = 0.25e-6, 6, 2
"""Fitted to published times (benchmarks/published.py): a ring has 6 hops of 0.25 us and uses two links of a chip."""


def _to_all(n: int) -> float:
    """Returns the mean distance of two of `n` devices on a ring: an array crosses that many links, part by part."""
    return n * n // 4 / n


SENT_SHARES: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "ragged-all-to-all": _to_all,
    "all-to-all": _to_all,
    "collective-permute": lambda n: 1.0,
}
"""The bytes that a device of a ring of n sends, those that it passes on included, for each byte of `Collective.nbytes`:
the formulas of jax-ml.github.io/scaling-book/sharding, which leaves out the factor (n - 1) / n."""


@dataclass(frozen=True)
class Collective:
    """A collective, or one end of an asynchronous one.

    Attributes:
        op: a key of `SENT_SHARES`.
        end: "start" or "done" of an asynchronous collective; otherwise "".
        pair: the same text at its start and its done.
        lane: the same text for collectives that wait for each other: permutes with other pairs use other links.
        nbytes: bytes of the undivided array on one device: the operand of a reduce-scatter, the result of others.
        group: devices that take part together.
    """

    op: str
    end: End
    pair: str
    lane: str
    nbytes: int
    group: int

    @property
    def moved(self) -> float:
        """The bytes that a device sends."""
        return self.nbytes * SENT_SHARES[self.op](self.group)

    def seconds(self, ici: float) -> float:
        """Returns the estimated seconds over links of `ici` bytes/s in each direction. Two devices have one link
        between them, and a permute uses one direction."""
        links = 1 if self.op == "collective-permute" else max(1, min(LINKS, self.group - 1))
        phases = 2 if self.op == "all-reduce" else 1
        return phases * HOP_SECONDS * HOPS + self.moved / (links * ici)


def find_collective(
    i: Instruction, computation: Computation, computations: Mapping[str, Computation], devices: int
) -> Collective | None:
    """Returns the collective that an instruction is, starts or ends; None if it has none.

    Args:
        i: the instruction.
        computation: the instructions around it.
        computations: all computations of the program by their names.
        devices: of the program, for collectives that name no groups.
    """
    if i.op.endswith("-done"):
        start = computation.get(i.operands[0])
        found = find_collective(start, computation, computations, devices) if start else None
        return replace(found, end="done") if found else None
    if (op := i.op.removesuffix("-start")) in SENT_SHARES:
        return _collective(op, i, computation, "start" if op != i.op else "", i.name, devices)
    if i.op not in ("fusion", "async-start"):
        return None
    called = i.called("calls")
    ends = [ASYNC_ENDS[each.target] for each in computations[called].values() if each.target in ASYNC_ENDS]
    end: End = "start" if i.op == "async-start" else ends[0] if ends else ""
    if not end and not called.startswith(SCATTERED):
        return None  # what runs while a collective is under way may carry it along
    wrapped = _inner(called, computations)
    if wrapped is None:
        return None
    op, inner, around = wrapped
    channel = re.search(r"\bchannel_id=(\d+)", inner.attributes)
    return _collective(op, inner, around, end, channel[1] if channel and ends else i.name, devices)


def _inner(name: str, computations: Mapping[str, Computation]) -> tuple[str, Instruction, Computation] | None:
    """Returns the op and the instruction of the collective in a computation that wraps one, and the instructions around
    it."""
    for inner in computations[name].values():
        if inner.op in SENT_SHARES:
            return "reduce-scatter" if name.startswith(SCATTERED) else inner.op, inner, computations[name]
        if inner.op == "fusion" and inner.called("calls").startswith(SCATTERED):
            return _inner(inner.called("calls"), computations)
    return None


def _collective(op: str, i: Instruction, computation: Computation, end: End, pair: str, devices: int) -> Collective:
    operands = [computation[name] for name in i.operands if name in computation]
    group = _group(i.attributes) or devices
    nbytes = sum(operand.nbytes for operand in operands) * (group if op == "all-gather" else 1)
    pairs = re.search(r"source_target_pairs=(\S+)", i.attributes)
    return Collective(op, end, pair, pairs[1] if pairs else "", nbytes, group)


def _group(attributes: str) -> int:
    """Returns the devices of a group: of a list {{0,1},{2,3}}, of [groups,devices]<=[...], or of the axes that follow a
    mesh: mesh['a'=8,'b'=2] {'b'}. 0 if there is none of these."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2]))
    return 0
