"""The claim of an output in a bucket: one object that says who may publish, changed by compare-and-swap only. See
docs/publishing.md.

Whoever holds a claim renews it. If that fails for FENCE_SECONDS, by a clock that runs while the machine is suspended,
the process stops by itself, before LAPSED_SECONDS have passed by the clock of the server and another process takes the
claim over. Correctness does not depend on these clocks: they keep two processes from working at the same time.
"""

import json
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from tpuconv import buckets
from tpuconv.bucket_errors import ConditionLost
from tpuconv.buckets import ABSENT_OBJECT, ObjectFacts, Version
from tpuconv.errors import BucketError, OutputError, TpuconvError
from tpuconv.jsonfile import MIB, OneOf, Size, check, parse, short
from tpuconv.location import BucketPath
from tpuconv.storage.places import CLAIM

HEARTBEAT_SECONDS = 60
RETRY_SECONDS = 5
"""The pause after a renewal that failed."""
FENCE_SECONDS = 200
LAPSED_SECONDS = 300
"""Age of a claim after which its process is taken for dead."""
CLOCK, CLOCK_ATTEMPTS = "clock", 3
"""An object that is written to ask for the time of the server. Who cleans the work may delete it before the answer."""

ANYBODY, NOBODY = "any", "nobody"
"""The holders of a claim whose work several processes do, any of which may take it; and of one whose process was
interrupted, or failed."""

CLAIM_FORMAT, BY = 2, "tpuconv"
RANDOM_ID = re.compile("[0-9a-f]{32}")
"""The names of works and of processes, of `secrets.token_hex`."""


class ClaimState(StrEnum):
    """The state of the work of a claim: it is written, published, cleaned after that, dropped, or free."""

    WRITING = "writing"
    PUBLISHING = "publishing"
    CLEANING = "cleaning"
    DROPPING = "dropping"
    FREE = "free"


CLAIM_SCHEMA = {
    "format": Size,
    "by": str,
    "plan": str,
    "work": str,
    "state": OneOf(*(state.value for state in ClaimState)),
    "holder": str,
    "number": Size,
    "machine": str,
    "host": str,
}


@dataclass(frozen=True)
class Held:
    """The contents of a claim.

    Attributes:
        plan: the fingerprint of the plan whose output is written.
        work: the name of the folder of its objects, never used again.
        state: the state of the work.
        holder: the process that holds it; ANYBODY; NOBODY.
        number: grows with every change, so that no two contents are equal.
        machine: where the holder runs; see `this_machine`.
        host: the name of that machine, for people.
    """

    plan: str
    work: str
    state: str
    holder: str
    number: int
    machine: str
    host: str

    def to_bytes(self) -> bytes:
        """Returns the object."""
        return json.dumps({"format": CLAIM_FORMAT, "by": BY, **asdict(self)}).encode()


class ClaimLost(OutputError):
    """Another process holds the claim."""


ACTIVE: set[str] = set()
"""The claims of this process that are in use, by the names of their holders."""


class Claim:
    """The claim of an output, as one process sees it.

    Args:
        out: the output.
        work: the folder of the claim.
    """

    def __init__(self, out: BucketPath, work: BucketPath):
        self.out, self.path = out, work / CLAIM
        self.process = secrets.token_hex(16)
        self.held: Held | None = None
        self._version: Version = ABSENT_OBJECT
        self._lost, self._ended = threading.Event(), threading.Event()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._renewed = _clocks()

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self) -> tuple[Held, ObjectFacts] | None:
        """Returns the current claim; None if there is none.

        Raises:
            OutputError: it is not a claim of this version of tpuconv.
        """
        try:
            data, facts = buckets.read_object(self.path)
        except FileNotFoundError:
            return None
        try:
            raw = check(parse(data[:MIB], str(self.path), OutputError), CLAIM_SCHEMA, str(self.path), OutputError)
        except OutputError as e:
            raise self._not_ours(e.message) from None
        if raw["format"] != CLAIM_FORMAT or raw["by"] != BY:
            raise self._not_ours(f"its {CLAIM} has format {raw['format']}")
        if not RANDOM_ID.fullmatch(raw["work"]):  # which becomes a part of keys
            raise self._not_ours(
                f"the work of its {CLAIM} must have a name of 32 hexadecimal digits, not {short(raw['work'])}"
            )
        return Held(**{key: raw[key] for key in Held.__dataclass_fields__}), facts

    def _not_ours(self, why: str) -> OutputError:
        return OutputError(
            f"{self.path.parent} was not made by this version of tpuconv",
            details=[why],
            hint="finish that work with the tpuconv that began it, move it away, or choose another OUT",
        )

    def is_dead(self, held: Held, found: ObjectFacts) -> bool:
        """Returns True if the holder of a claim is dead: it has stopped, or ran on this machine and has ended, or the
        claim has lapsed."""
        return has_stopped(held) or self.age(held, found) >= LAPSED_SECONDS

    def age(self, held: Held, found: ObjectFacts) -> float:
        """Returns the age of a claim in seconds, by the clock of the server: clocks of hosts differ.

        Raises:
            BucketError: the server does not show what was just written.
        """
        clock = self.path.parent / held.work / self.process / CLOCK
        for _ in range(CLOCK_ATTEMPTS):
            buckets.put_object(clock, b"")
            now = buckets.facts(clock)
            buckets.remove_objects(clock.parent, [clock.name])
            if now is not None:
                return now.modified.timestamp() - found.modified.timestamp()
        raise BucketError(f"{clock} was written, and is not there", hint="run again")

    # --- changing ------------------------------------------------------------------------------------------------

    def take(self, plan: str, work: str, state: str, found: tuple[Held, ObjectFacts] | None) -> None:
        """Takes the claim from what was `found`. Raises ClaimLost if another process was faster."""
        with self._lock:
            ACTIVE.add(self.process)
            self._version = ABSENT_OBJECT if found is None else found[1].version
            number = 0 if found is None else found[0].number
            self._write(Held(plan, work, state, self.process, number, this_machine(), socket.gethostname()))
            self._keep()

    def join(self, found: tuple[Held, ObjectFacts]) -> None:
        """Takes part in work that several processes do."""
        with self._lock:
            self.held, self._version, self._renewed = found[0], found[1].version, _clocks()
            self._keep()

    def change(self, state: str, *, holder: str | None = None, work: str | None = None) -> None:
        """Changes the state, the holder or the work of a claim that this process holds. Raises ClaimLost if it is
        lost."""
        with self._lock:
            assert self.held is not None
            self.check()
            self._write(replace(self.held, state=state, holder=holder or self.process, work=work or self.held.work))

    def _write(self, held: Held) -> None:
        sent, new = _clocks(), replace(held, number=held.number + 1)
        try:
            self._version = buckets.put_object(self.path, new.to_bytes(), only_if=self._version)
        except ConditionLost:
            found = self.read()  # perhaps our own write, whose answer was lost
            if found is None or found[0] != new:
                if new.holder != ANYBODY:
                    self._lost.set()
                raise self.lost() from None
            self._version = found[1].version
        self.held, self._renewed = new, sent

    def free(self) -> None:
        """Lets the next process begin."""
        with self._lock:
            self.change(ClaimState.FREE)
            self.held = None
            self.remove(self._version)

    def leave(self) -> None:
        """Lets any process go on with the work at once. This one writes no more."""
        with self._lock:
            assert self.held is not None
            self.change(self.held.state, holder=NOBODY)
            self._lost.set()

    def remove(self, version: Version) -> None:
        """Deletes a free claim where the store deletes by version. Where it does not, the claim stays."""
        buckets.delete_object(self.path, version)

    # --- fencing -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ClaimLost if another process has taken the claim, or this one could not renew it for too long."""
        if self._lost.is_set():
            raise self.lost()
        if max(now - then for now, then in zip(_clocks(), self._renewed, strict=True)) > FENCE_SECONDS:
            raise ClaimLost(
                f"the claim on {self.out} could not be renewed for {FENCE_SECONDS} s: this process stops writing",
                hint="run the same command again: it resumes where it stopped, unless another one went on",
            )

    def check_held(self) -> None:
        """Raises ClaimLost if the claim in the bucket does not belong to this process, or to several with the same
        work: asks the store."""
        self.check()
        found, held = self.read(), self.held
        if (
            (found is None or held is None)
            or (found[0].work, found[0].state) != (held.work, held.state)
            or found[0].holder not in (self.process, held.holder)
        ):
            self._lost.set()
            raise self.lost()

    def lost(self) -> ClaimLost:
        """Returns the error of a process that has lost the claim."""
        return ClaimLost(
            f"another process writes to {self.out}", hint="wait for it; the same command then finds its output"
        )

    def _keep(self) -> None:
        """Renews the claim from now on, in a thread, until `end`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Renews the claim no more."""
        with self._lock:
            self._ended.set()
        ACTIVE.discard(self.process)

    def _beat(self) -> None:
        pause: float = HEARTBEAT_SECONDS
        while not self._ended.wait(pause):
            pause = HEARTBEAT_SECONDS
            try:
                with self._lock:
                    if self._ended.is_set() or self.held is None:
                        return
                    self._renew(self.held)
            except ClaimLost:
                return
            except (TpuconvError, OSError):  # the network: `check` stops this process if it does not come back
                pause = RETRY_SECONDS

    def _renew(self, held: Held) -> None:
        """Writes the claim again. One that several processes hold is left alone if another one has done so."""
        if held.holder == ANYBODY:
            found, sent = self.read(), _clocks()
            if found is None or found[0].work != held.work or found[0].state != ClaimState.WRITING:
                self._lost.set()
                raise self.lost()
            if found[0].number != held.number or found[0].holder != ANYBODY:
                self.held, self._version, self._renewed = found[0], found[1].version, sent
                return
        try:
            self._write(held)
        except ClaimLost:
            if held.holder != ANYBODY:  # else another process renewed it in between
                raise


# --- machines ------------------------------------------------------------------------------------------------------


def _clocks() -> tuple[float, float]:
    """Returns seconds by a clock that runs while the machine is suspended, and seconds by the clock of the day."""
    steady = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(steady), time.time()


def this_machine() -> str:
    """Returns the name of this process among all that ran on this machine: boot, space of process numbers, number, and
    when it began. Empty where the system has no /proc."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getpid()}/{_began(os.getpid())}"
    return ""


def _began(pid: int) -> str:
    """Returns the start time of a process, in ticks since the boot. Raises OSError if it does not run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":  # it has ended, and nobody has asked for its exit status
        raise ProcessLookupError
    return fields[19]


def has_stopped(held: Held) -> bool:
    """Returns True if the process of a claim has stopped, as far as it said so or this machine can tell."""
    return held.holder == NOBODY or (held.holder != ANYBODY and is_running(held.machine, held.holder) is False)


def is_running(machine: str, holder: str) -> bool | None:
    """Returns True if the process of a claim runs; None if this machine cannot tell."""
    here = this_machine()
    space, _, mine = here.rpartition("/")[0].rpartition("/")
    if not here or not machine.startswith(f"{space}/"):
        return None
    pid, _, began = machine[len(space) + 1 :].partition("/")
    if pid == mine:
        return machine == here and holder in ACTIVE
    with suppress(OSError, ValueError):
        return _began(int(pid)) == began
    return False
