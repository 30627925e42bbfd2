"""The protocol of buckets before: objects were sent to OUT under their final names, and a second process of a plan took
the claim at once. Reduced from the code as it was. The search must find its faults: else it would find none in ours.
"""

from collections.abc import Generator
from typing import Any

from helpers.publishing.store import (
    ABSENT,
    GONE,
    LOST,
    SHARDS,
    NoAnswer,
    Request,
    Stop,
    copy,
    delete,
    expected,
    get,
    names,
    put,
)

Process = Generator[Request, Any, Any]
State = dict[str, Any]


def old(s: State) -> Process:
    """A run of a command."""
    s |= {"known": frozenset(), "folder": "OUT"}
    has_entered = False
    try:
        yield from _take_claim(s)
        has_entered = True
        why = yield from _work(s)
    except (Stop, NoAnswer) as e:
        why = str(e)
    if not has_entered or s["known"] - {"plan.done"}:
        return why
    try:
        there = ()
        if s["known"]:
            there = yield names(f"{s['folder']}/")
        if not there:
            yield from _clear(s, False)
            yield delete("W/claim")
    except NoAnswer:
        pass
    return why


def has_copy(store: dict[str, Any]) -> bool:
    """Whether a rerun can make OUT complete from what lies in W/."""
    done = store.get("W/complete.done")
    return bool(done) and all(f"W/new/{n}" in store for n in ("mark", *SHARDS[done[0]]))


def _last(listing: Any) -> set[str]:
    return {n.rpartition("/")[2] for n, *_ in listing}


def _take_claim(s: State) -> Process:
    while True:
        answer = yield put("W/claim", (s["plan"], s["me"]), ABSENT)
        if answer != LOST:
            return
        found = yield get("W/claim")
        if found is None:
            continue
        if found[0][0] != s["plan"]:
            began = yield get("W/plan.done")
            if began and began[0][0] != s["plan"] and not s["overwrite"]:
                raise Stop("unfinished")
            is_dead = yield ("lapsed", found[0][1])
            if not is_dead:
                raise Stop("being written")
        answer = yield put("W/claim", (s["plan"], s["me"]), found[1])
        if answer == LOST:
            raise Stop("other writer")
        return


def _check_claim(s: State) -> Process:
    found = yield get("W/claim")
    if found is None or found[0][1] != s["me"]:
        raise Stop("other writer")


def _record(s: State, name: str, facts: Any) -> Process:
    yield from _check_claim(s)
    yield put(f"W/{name}", facts)
    s["known"] |= {name}


def _clear(s: State, is_replaced: bool) -> Process:
    listing = yield names("W/")
    there = {n for n, *_ in listing} - {"W/claim"}
    first = [n for n in ("W/complete.done", "W/plan.done") if n in there]
    rest = sorted(there - set(first))
    todo = [*rest, *reversed(first)] if is_replaced else [*first, *rest]
    for name in todo:
        yield delete(name)
    s["known"] = frozenset()


def _replace(s: State) -> Process:
    listing = yield names("W/new/")
    new = _last(listing)
    listing = yield names("OUT/")
    there = _last(listing)
    if "mark" not in new:
        raise Stop("manifest missing")
    if "mark" in there:
        yield delete("OUT/mark")
    for name in sorted(new - {"mark"}):
        answer = yield copy(f"W/new/{name}", f"OUT/{name}")
        if answer == GONE:
            raise Stop("there is no bucket")
    for name in sorted(there - new):
        yield delete(f"OUT/{name}")
    listing = yield names("OUT/")
    if new - {"mark"} - _last(listing):
        raise Stop("was changed")
    yield from _check_claim(s)
    answer = yield copy("W/new/mark", "OUT/mark")
    if answer == GONE:
        raise Stop("there is no bucket")


def _begin_anew(s: State) -> Process:
    listing = yield names("OUT/")
    there = {n: data for n, data, _ in listing}
    is_ours = "OUT/mark" in there and not set(there) - expected(there["OUT/mark"]).keys()
    if there and not (s["overwrite"] and is_ours):
        raise Stop("exists")
    yield from _clear(s, False)
    s["folder"] = "W/new" if there else "OUT"
    yield from _record(s, "plan.done", (s["plan"], s["folder"]))
    return "new"


def _begin(s: State) -> Process:
    listing = yield names("W/")
    s["known"] = frozenset(n[2:] for n, *_ in listing if n.endswith(".done"))
    complete = began = None
    if "complete.done" in s["known"]:
        complete = yield get("W/complete.done")
    if "plan.done" in s["known"]:
        began = yield get("W/plan.done")
    mark = yield get("OUT/mark")
    if complete:
        if mark is None:
            yield from _replace(s)
            mark = yield get("OUT/mark")
        if mark and mark[0] == ("mark", complete[0]):
            yield from _clear(s, True)
            if complete[0] == s["plan"]:
                return "published"
            return (yield from _begin_anew(s))
        if complete[0] == s["plan"]:
            s["folder"] = "W/new"
            return "complete"
    ours, direct = began and began[0][0] == s["plan"], began and began[0][1] == "OUT"
    if mark and mark[0] == ("mark", s["plan"]) and (not s["overwrite"] or (ours and direct)):
        yield from _clear(s, False)
        return "published"
    if began and not ours:
        if not s["overwrite"]:
            raise Stop("unfinished")
        there = ()
        if direct and not mark:
            there = yield names("OUT/")
        for name, *_ in there:
            yield delete(name)
    elif began and not (direct and mark):
        s["folder"] = began[0][1]
        return "begun"
    return (yield from _begin_anew(s))


def _work(s: State) -> Process:
    state = yield from _begin(s)
    if state == "published":
        return state
    folder, shards = s["folder"], SHARDS[s["plan"]]
    if state != "complete":
        for x in shards:
            if f"{x}.done" not in s["known"]:
                yield put(f"{folder}/{x}", (s["plan"], x))
                yield from _record(s, f"{x}.done", "entry")
        listing = yield names(f"{folder}/")
        there = _last(listing)
        if not there >= set(shards):
            raise Stop("was changed")
        for name in sorted(there - set(shards)):
            yield delete(f"{folder}/{name}")
        if folder == "W/new":
            yield put("W/new/mark", ("mark", s["plan"]))
    if folder == "W/new":
        if "complete.done" not in s["known"]:
            yield from _record(s, "complete.done", s["plan"])
        yield from _check_claim(s)
        yield from _replace(s)
    else:
        yield from _check_claim(s)
        yield put("OUT/mark", ("mark", s["plan"]))
    yield from _clear(s, folder == "W/new")
    return "published"
