"""An explicit-state search through all that processes which publish into one bucket can do.

A process is a generator that yields requests, written as the code is. Every order of all requests is tried and, as
often as a scenario allows: a kill; a suspension, in which the lease of a process lapses between any two of its
requests, and it goes on later; a request without an answer, done or not done. When all processes have stopped, every
command runs again, alone: one must complete.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.publishing.new import has_copy as new_has_copy
from helpers.publishing.old import has_copy as old_has_copy
from helpers.publishing.old import old
from helpers.publishing.store import GONE, LOST, NoAnswer, Store, faults_of, perform, put

MOST_STEPS = 300
"""Of a run that is alone."""
PEOPLE = "user"
"""The plan of somebody else, who puts a file into OUT at any time."""


def user(s: dict[str, Any]) -> Any:
    """Somebody else."""
    yield put(s["overwrite"], PEOPLE)
    return "done"


@dataclass(frozen=True)
class Scenario:
    """Commands, each a plan and a mode, what lies in the bucket before, and how often what may happen."""

    title: str
    commands: Sequence[tuple[str, Any]]
    initial: dict[str, Any] = field(default_factory=dict)
    kills: int = 0
    suspensions: int = 0
    lost_answers: int = 0
    without: tuple[str, ...] = ()


@dataclass
class Result:
    """The number of states, and for each kind of fault the shortest run that leads to it."""

    states: int
    faults: dict[str, list[str]]


class Program:
    """The states of a generator, by where it stands and its variables; moves are remembered. What the code needs later
    must be in a variable: at most one `yield` in a statement, and none in the head of a `for`."""

    def __init__(self, protocol: Callable[..., Any], facts: dict[str, Any]):
        self._start = lambda: protocol(dict(facts))
        self.nodes: list[tuple[Any, Any, list[Any]]] = []
        self._moves: dict[Any, int] = {}
        self._ids: dict[Any, int] = {}
        self.first = self._node([])

    def _node(self, history: list[Any]) -> int:
        generator, request, outcome = self._start(), None, None
        try:
            request = next(generator)
            for is_answer, value in history:
                request = generator.send(value) if is_answer else generator.throw(NoAnswer("network"))
        except StopIteration as e:
            outcome = e.value
        key, inner = [outcome], generator
        while inner is not None and outcome is None:
            values = {k: _ordered(k, v) for k, v in inner.gi_frame.f_locals.items()}
            key.append((inner.__name__, inner.gi_frame.f_lasti, repr(values)))
            inner = inner.gi_yieldfrom
        place = tuple(key)
        if place not in self._ids:
            self._ids[place] = len(self.nodes)
            self.nodes.append((request, outcome, history))
        return self._ids[place]

    def move(self, node: int, is_answer: bool, value: Any) -> int:
        """The state after an answer."""
        step = (node, is_answer, value)
        if step not in self._moves:
            self._moves[step] = self._node([*self.nodes[node][2], (is_answer, value)])
        return self._moves[step]


def _ordered(name: str, value: Any) -> Any:
    if name == "s":
        return sorted(value.items())
    return sorted(value) if isinstance(value, set) else value


class Search:
    """One search. A state is: the store, its clock, where each process stands, which have stopped, whose leases have
    lapsed, and what may still happen."""

    def __init__(self, protocol: Callable[..., Any], kind: str, scenario: Scenario):
        self.kind, self.scenario, self.found = kind, scenario, {}  # type: ignore[var-annotated]
        self._has_copy = old_has_copy if protocol is old else new_has_copy
        commands = scenario.commands
        self._people = {i: mode for i, (plan, mode) in enumerate(commands) if plan == PEOPLE}
        self._is_fair = not self._people and PEOPLE not in scenario.initial.values()

        def program(me: str, plan: str, mode: Any) -> Program:
            facts = {"me": me, "plan": plan, "overwrite": mode, "kind": kind, "without": scenario.without}
            return Program(user if plan == PEOPLE else protocol, facts)

        self._programs = [program(me, *command) for me, command in zip("pqr", commands, strict=False)]
        self._again = [program("s", *command) for command in dict.fromkeys(commands) if command[0] != PEOPLE]
        self._ends: dict[Store, list[Any]] = {}
        self._seen: dict[Any, Any] = {}

    def run(self) -> Result:
        """Looks at all states."""
        scenario, numbered = self.scenario, self.kind == "gcs"
        initial = scenario.initial.items()
        store = tuple(sorted((n, (data, 0 if numbered and n[:4] == "OUT/" else data)) for n, data in initial))
        budget = (scenario.lost_answers, scenario.kills, scenario.suspensions)
        first = (store, 1, tuple(p.first for p in self._programs), frozenset(), frozenset(), budget)
        self._seen[first] = None
        queue = deque([first])
        while queue:
            state = queue.popleft()
            for label, after in self._following(state):
                if after not in self._seen:
                    self._seen[after] = (state, label)
                    queue.append(after)
                    self._check(state, after)
            if len(state[3]) == len(self._programs) and self._is_fair:
                self._check_end(state, budget)
        return Result(len(self._seen), self.found)

    def _following(self, state: Any) -> list[tuple[str, Any]]:
        store, clock, nodes, stopped, lapsed, budget = state
        following: list[tuple[str, Any]] = []

        def add(i: int, label: str, is_answer: bool, answer: Any, after: Any = (store, clock), cost: int = 0) -> None:
            node = self._programs[i].move(nodes[i], is_answer, answer)
            end = self._programs[i].nodes[node][1]
            over = frozenset() if end is None else frozenset({i})
            text = f"{'pqr'[i]}: {label}" + ("" if end is None else f" -> ends: {end}")
            left = (budget[0] - cost, *budget[1:])
            following.append((text, (*after, (*nodes[:i], node, *nodes[i + 1 :]), stopped | over, lapsed | over, left)))

        for i, program in enumerate(self._programs):
            if i in stopped:
                continue
            request = program.nodes[nodes[i]][0]
            if request[0] == "alive":
                add(i, "looks at its clock", True, i not in lapsed)
            elif request[0] == "lapsed":
                holders = {*range(len(nodes))} - {i} if request[1] == "any" else {"pqr".index(request[1])}
                add(i, f"is {request[1]} dead?", True, holders <= lapsed)
            else:
                *after, answer = perform(store, clock, request, self.kind)
                text = " ".join(map(str, request[: 3 if request[0] == "copy" else 2]))
                add(i, text + (f" = {answer}" if answer in (LOST, GONE) else ""), True, answer, after)
                if request[0] in ("put", "copy", "delete") and budget[0]:
                    add(i, f"{text}, no answer", False, None, after, 1)
                    add(i, f"{text}, not done, no answer", False, None, cost=1)
                    if request[0] == "put" and request[3] is not None and answer != LOST:
                        add(i, f"{text}, done; its repetition gets a 412", True, LOST, after, 1)
            if budget[1]:
                left = (budget[0], budget[1] - 1, budget[2])
                following.append((f"{'pqr'[i]}: KILLED", (*state[:3], stopped | {i}, lapsed | {i}, left)))
            if budget[2] and i not in lapsed:
                left = (*budget[:2], budget[2] - 1)
                following.append((f"{'pqr'[i]}: SUSPENDED, its lease lapses", (*state[:4], lapsed | {i}, left)))
        return following

    def _check(self, state: Any, after: Any) -> None:
        if after[0] != state[0]:
            for fault in faults_of(after[0], self.scenario.initial, self._has_copy):
                self._report(fault, after)
        there = dict(after[0])
        for i, name in self._people.items():
            if self._programs[i].nodes[after[2][i]][1] and there.get(name, "?")[0] != PEOPLE:
                self._report(f"a user's {name} is gone", after)

    def _check_end(self, state: Any, budget: Any) -> None:
        store, _, nodes, *_, left = state
        outcomes = [p.nodes[n][1] for p, n in zip(self._programs, nodes, strict=True)]
        if left == budget and "published" not in outcomes:
            self._report(f"nothing failed, nobody finished {outcomes}", state)
        if store not in self._ends:
            self._ends[store] = self._run_again(state)
            if "published" not in self._ends[store]:
                self._report(f"blocked: all commands again end with {self._ends[store]}", state)

    def _run_again(self, state: Any) -> list[Any]:
        outcomes = []
        for program in self._again:
            store, clock, node, steps = state[0], state[1], program.first, []
            while program.nodes[node][1] is None and len(steps) < MOST_STEPS:
                request, answer = program.nodes[node][0], True
                if request[0] not in ("alive", "lapsed"):
                    store, clock, answer = perform(store, clock, request, self.kind)
                    steps.append(f"rerun: {request[0]} {request[1]}")
                for fault in faults_of(store, self.scenario.initial, self._has_copy):
                    self._report(f"in a rerun: {fault}", state, steps)
                node = program.move(node, True, answer)
            outcomes.append(program.nodes[node][1])
        return outcomes

    def _report(self, fault: str, state: Any, more: Sequence[str] = ()) -> None:
        if fault in self.found:
            return
        self.found[fault] = trace = [*reversed(more)]
        while self._seen[state] is not None:
            state, label = self._seen[state]
            trace.append(label)
        trace.reverse()
