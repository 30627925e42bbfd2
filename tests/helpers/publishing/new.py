"""The protocol of buckets as docs/publishing.md describes it, and as `tpuconv.storage.claim`, `bucket_journal` and
`bucket_publishing` do it. Code and model change together.

A claim is (plan, work, state, holder, number). `work` is a random id, here made of the name of the process. A process
writes its objects to W/<work>/<process>/, where no other one writes. The mode of a run is False, True (--overwrite), or
"part": one of several processes of the plan.
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


def new(s: State) -> Process:
    """A run of a command. Whoever stops deletes nothing."""
    s |= {"number": 0, "claim": None, "version": ABSENT}
    try:
        why = yield from _run(s)
    except (Stop, NoAnswer) as e:
        why = str(e)
    return why


def has_copy(store: dict[str, Any]) -> bool:
    """Whether a rerun can make OUT complete from what lies in W/."""
    claim = store.get("W/claim")
    complete = claim and claim[0][2] == "publishing" and store.get(f"W/{claim[0][1]}/complete")
    return bool(complete) and all(name in store for _, name in complete[0])


def _do(s: State, request: Request) -> Process:
    """A request that changes the bucket, not later than the lease by one's own clock: a courtesy, on which nothing
    depends."""
    if "self-fencing" not in s["without"]:
        is_alive = yield ("alive", None)
        if not is_alive:
            raise Stop("lease is over")
    return (yield request)


def _swap(s: State, plan: str, work: str, state: str, holder: str | None = None) -> Process:
    s["number"] += 1
    claim = (plan, work, state, holder or s["me"], (s["me"], s["number"]))  # differs from all earlier ones
    version = yield from _do(s, put("W/claim", claim, s["version"]))
    if version == LOST:
        found = yield get("W/claim")  # perhaps it is our own write, whose answer was lost
        if found is None or found[0] != claim:
            raise Stop("other writer")
        version = found[1]
    s["claim"], s["version"] = claim, version


def _run(s: State) -> Process:
    while True:
        found = yield get("W/claim")
        if found is None or found[0][2] == "free":
            end = yield from _take_free(s, found)
            if end:
                return end
        else:
            (plan, work, state, holder, _), s["version"] = found
            if s["overwrite"] == "part" and (plan, state, holder) == (s["plan"], "writing", "any"):
                s["claim"] = found[0]
                end = yield from _take_part(s, work)
                if end:
                    return end
                continue
            is_dead = True
            if holder != s["me"]:
                is_dead = yield ("lapsed", holder)
            if not is_dead:
                raise Stop("being written")
            if plan != s["plan"] and state == "writing":
                if not s["overwrite"]:
                    raise Stop("unfinished")
                state = "dropping"
            if state == "publishing":
                yield from _do(s, put(f"W/{work}/{s['me']}/note", ("note", work)))
            yield from _swap(s, plan, work, state)
        plan, work, state = s["claim"][:3]
        if state == "writing":
            yield from _prepare(s, work)
            if s["overwrite"] == "part":
                yield from _swap(s, plan, work, "writing", "any")
                end = yield from _take_part(s, work)
                if end:
                    return end
                continue
            yield from _units(s, work)
            yield from _complete(s, work)
        end = yield from _finish(s)
        if end:
            return end


def _take_free(s: State, found: Any) -> Process:
    listing = yield names("W/")
    if [n for n, *_ in listing if n != "W/claim" and not n.startswith("W/id-")]:
        raise Stop("foreign")
    s["version"] = found[1] if found else ABSENT
    looked = yield from _look(s)
    if looked != "published":
        yield from _swap(s, s["plan"], f"id-{s['me']}{s['number']}", "writing")
        return None
    if found and s["kind"] != "s3-old":
        yield from _do(s, delete("W/claim", found[1]))
    return looked


def _take_part(s: State, work: str) -> Process:
    """Does units, and publishes if all are done and no other process does so."""
    yield from _units(s, work)
    while True:
        listing = yield names(f"W/{work}/")
        there = {n for n, *_ in listing}
        if not there >= {f"W/{work}/{x}.done" for x in SHARDS[s["plan"]]}:
            return "part is done"
        found = yield get("W/claim")
        if found is None or found[0][1:3] != (work, "writing"):
            return "part is done"
        if found[0][3] != "any":
            is_dead = yield ("lapsed", found[0][3])
            if not is_dead:
                return "part is done"
        s["version"] = found[1]
        try:
            yield from _swap(s, s["plan"], work, "writing")
        except Stop as e:
            if str(e) != "other writer":
                raise
            continue
        break
    yield from _complete(s, work)
    return (yield from _finish(s))


def _finish(s: State) -> Process:
    """Publishes, cleans, and frees the claim. Returns an outcome if the plan of this run is published."""
    plan, work = s["claim"][:2]
    if s["claim"][2] == "publishing":
        yield from _publish(s, plan, work)
        yield from _swap(s, plan, work, "cleaning")
    while True:
        there = yield names(f"W/{work}/")
        if not there:
            break
        for name, *_ in there:
            if "clean-sources" not in s["without"] or name.endswith(".done"):
                yield from _do(s, delete(name))
        if "clean-sources" in s["without"]:
            break
    is_ours = plan == s["plan"] and s["claim"][2] == "cleaning"
    yield from _swap(s, plan, work, "free")
    if is_ours and s["kind"] != "s3-old":
        yield from _do(s, delete("W/claim", s["version"]))
    return "published" if is_ours else None


def _look(s: State) -> Process:
    """What lies in OUT: the output of this plan, or what may be replaced, with its versions."""
    listing = yield names("OUT/")
    there = {n: (data, version) for n, data, version in listing}
    if not there:
        return ()
    want = expected(there.get("OUT/mark", (None,))[0])
    if any(want.get(n) != data and data[0] != "note" for n, (data, _) in there.items()):
        raise Stop("foreign")  # a name that is not ours, or a file of ours that its owner rewrote
    plan = want["OUT/mark"][1]
    if plan == s["plan"] and all(n in there and there[n][0] == data for n, data in want.items()):
        return "published"
    if plan != s["plan"] and not s["overwrite"]:
        raise Stop("exists")
    return tuple((n, *v) for n, v in sorted(there.items()))


def _prepare(s: State, work: str) -> Process:
    found = yield get(f"W/{work}/plan")
    if found is None:
        there = yield from _look(s)  # again, now that the claim is ours
        yield from _do(s, put(f"W/{work}/plan", () if there == "published" else there, ABSENT))


def _units(s: State, work: str) -> Process:
    for x in SHARDS[s["plan"]]:
        found = yield get(f"W/{work}/{x}.done")
        if found is None:
            yield from _do(s, put(f"W/{work}/{s['me']}/{x}", (s["plan"], x)))
            yield from _do(s, put(f"W/{work}/{x}.done", s["me"], ABSENT))  # names the object; the first entry counts


def _complete(s: State, work: str) -> Process:
    sources = [("OUT/mark", f"W/{work}/{s['me']}/mark")]
    for x in SHARDS[s["plan"]]:
        entry = yield get(f"W/{work}/{x}.done")
        if entry is None:
            raise Stop("other writer")
        sources.append((f"OUT/{x}", f"W/{work}/{entry[0]}/{x}"))
    yield from _do(s, put(sources[0][1], ("mark", s["plan"])))
    yield from _do(s, put(f"W/{work}/complete", tuple(sources), ABSENT))
    yield from _do(s, put(f"W/{work}/{s['me']}/note", ("note", work)))  # before it publishes, never while it does
    yield from _swap(s, s["plan"], work, "publishing")


def _publish(s: State, plan: str, work: str) -> Process:
    complete = yield get(f"W/{work}/complete")
    began = yield get(f"W/{work}/plan")
    if complete is None or began is None:
        raise Stop("other writer")  # who has cleaned by now
    source, was, want = dict(complete[0]), {n: data for n, data, _ in began[0]}, expected(("mark", plan))
    note, text = f"W/{work}/{s['me']}/note", ("note", work)
    yield from _revoke(s, work, {note})
    listing = yield names("OUT/")
    there = {n: (data, version) for n, data, version in listing}
    if any(data not in (want.get(n), was.get(n), text) for n, (data, _) in there.items()):
        raise Stop("foreign")
    if "OUT/mark" in there and there["OUT/mark"][0] not in (text, want["OUT/mark"]):
        yield from _copy(s, note, "OUT/mark")
    for n in sorted(want.keys() - {"OUT/mark"}):
        if n not in there or there[n][0] != want[n]:
            yield from _copy(s, source[n], n)
    for n in sorted(set(there) - want.keys()):  # of the old output alone
        yield from _remove_old(s, n, there[n], note, text)
    yield from _revoke(s, work, set())
    listing = yield names("OUT/")
    there = {n: data for n, data, _ in listing}
    others = {n for n in there.keys() - want.keys() if there[n] != text}
    if others or any(there.get(n) != data for n, data in want.items() if n != "OUT/mark"):
        raise Stop("was changed")  # the state stays: the next run publishes again
    found = yield get("W/claim")
    if found is None or found[0][1:4] != (work, "publishing", s["me"]):
        raise Stop("other writer")
    yield from _copy(s, source["OUT/mark"], "OUT/mark")


def _remove_old(s: State, name: str, found: Any, note: str, text: Any) -> Process:
    version, needs_note = found[1], s["kind"] != "gcs" and "stamp" not in s["without"]
    if needs_note:
        if found[0] != text:
            yield from _copy(s, note, name)
        version = text  # an ETag that no output ever has
    if s["kind"] != "s3-old" or "stamp" in s["without"]:  # without conditional deletes the note stays
        yield from _do(s, delete(name, version))


def _revoke(s: State, work: str, own: set[str]) -> Process:
    """Deletes the notes of other publishers, in the end one's own: none can be copied any more."""
    listing = yield names(f"W/{work}/")
    notes = [n for n, *_ in listing if n.endswith("/note") and n not in own and "revoke" not in s["without"]]
    for n in notes:
        yield from _do(s, delete(n))


def _copy(s: State, name: str, target: str) -> Process:
    """A copy by the store, which fails if the source was deleted: a process whose work is finished writes nothing."""
    if "copy" in s["without"]:  # as if the process sent the bytes itself
        found = yield get(name)
        if found is not None:
            yield from _do(s, put(target, found[0]))
            return
    else:
        answer = yield from _do(s, copy(name, target))
        if answer != GONE:
            return
    raise Stop("other writer")
