"""A bucket as a value, and the requests of processes to it.

An object is (bytes, version). Names: `W/...` is the work folder OUT.tpuconv/, `OUT/mark` the manifest, other names in
OUT are shards. The bytes of the shard x of the plan P are (P, x).
"""

from collections.abc import Mapping
from typing import Any

SHARDS = {"A": ("x", "y"), "B": ("x", "z"), "O": ("x", "w"), "C": ("x",), "D": ("x",)}
"""The shards of each plan: two plans share a name, and have one of their own."""
ABSENT, LOST, GONE = "absent", "LOST", "GONE"
"""The condition that there is no object; the answers that a condition does not hold, and that a source is gone."""

KINDS = ("s3-old", "s3", "gcs")
"""Stores: with versions that are hashes of the bytes, where deletes know no condition, or do; with versions that are
never used twice."""

Store = tuple[tuple[str, tuple[Any, Any]], ...]
Request = tuple[Any, ...]


class Stop(Exception):
    """The process ends, with this outcome."""


class NoAnswer(Exception):
    """The request was done or not."""


def get(name: str) -> Request:
    """Reads an object."""
    return ("get", name)


def names(prefix: str) -> Request:
    """Lists objects with their contents."""
    return ("list", prefix)


def put(name: str, data: Any, only_if: Any = None) -> Request:
    """Writes an object."""
    return ("put", name, data, only_if)


def copy(name: str, target: str) -> Request:
    """Lets the store copy an object."""
    return ("copy", name, target)


def delete(name: str, only_if: Any = None) -> Request:
    """Deletes an object."""
    return ("delete", name, only_if)


def perform(store: Store, clock: int, request: Request, kind: str) -> tuple[Store, int, Any]:
    """Does a request. Returns the store and its clock afterwards, and the answer."""
    verb, name, *rest = request
    objects, condition = dict(store), None
    if verb == "get":
        return store, clock, objects.get(name)
    if verb == "list":
        return store, clock, tuple((n, *v) for n, v in store if n.startswith(name))
    if verb == "delete":
        if name in objects and (kind == "s3-old" or rest[0] in (None, objects[name][1])):
            del objects[name]
        return tuple(sorted(objects.items())), clock, None
    if verb == "copy":
        if name not in objects:
            return store, clock, GONE
        name, data = rest[0], objects[name][0]
    else:
        data, condition = rest
    if condition is not None and condition != (objects[name][1] if name in objects else ABSENT):
        return store, clock, LOST
    is_numbered = kind == "gcs" and name.startswith("OUT/")  # in W/ the bytes of a claim never repeat anyway
    version = clock if is_numbered else data
    objects[name] = (data, version)
    return tuple(sorted(objects.items())), clock + is_numbered, version


def expected(mark: Any) -> dict[str, Any]:
    """The objects of the output with this mark."""
    if not mark or mark[0] != "mark":
        return {}
    return {f"OUT/{x}": (mark[1], x) for x in SHARDS[mark[1]]} | {"OUT/mark": mark}


def faults_of(store: Store, initial: Mapping[str, Any], has_copy: Any) -> list[str]:
    """What is wrong with a bucket at one moment. `has_copy` says whether a later run can complete an output."""
    there = {n: v if n[:2] == "W/" else v[0] for n, v in store}
    faults = [
        f"a user's {name} is gone"
        for name, data in initial.items()
        if data == "user" and there.get(name, " ")[0] not in ("user", "u")
    ]
    want = expected(there.get("OUT/mark"))
    if any(n in there and there[n] != data for n, data in want.items()):
        faults.append("marked complete, with bytes of another plan")
    elif want.keys() - there.keys():
        faults.append("marked complete, an object is missing")
    elif want and any(n not in want and n[:4] == "OUT/" and data[0] in SHARDS for n, data in there.items()):
        faults.append("marked complete, with an object of another plan")
    is_complete = want and want.items() <= there.items()
    if "OUT/mark" in initial and not is_complete and not has_copy(dict(store)):
        faults.append("neither the old output nor a new one is complete")
    return faults
