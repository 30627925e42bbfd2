"""The errors for an output that must not be replaced, and for unfinished work of another plan. They say how what is
there differs from what the command would write."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpuconv.errors import BucketError, OutputError, TpuconvError, UsageError, shorten
from tpuconv.location import BucketPath, Location
from tpuconv.names import MANIFEST
from tpuconv.storage import sealed
from tpuconv.storage.ownership import REWRITTEN, ContentsOf, strangers
from tpuconv.storage.places import CLAIM, WORK_SUFFIX, is_readable, is_work_name, work_folder

WORK = "tpuconv.work"
"""The mark of a work folder on a disk."""


def unfinished(out: Location, work: Location, began: Mapping[str, Any], facts: Mapping[str, Any]) -> OutputError:
    """Returns the error for unfinished work of another plan, whose entry is `began`."""
    return OutputError(
        f"there is an unfinished conversion to {out.name} in {work}, of another source or with other options",
        details=_differences(began["facts"], facts),
        hint="run the command with its source and options to finish it, or give `overwrite=True` to begin anew",
    )


def exists_already(
    out: Location, facts: Mapping[str, Any], contents_of: ContentsOf, *, overwrite: bool
) -> OutputError | None:
    """Returns the error for an output that exists and was not made by a plan with these facts; None if it may be
    replaced."""
    if why_foreign := strangers(out, contents_of):
        return not_replaced(out, why_foreign, overwrite=overwrite)
    if overwrite:
        return None
    what = "source, its quantization config or the text" if facts.get("quantization") else "source"
    return OutputError(
        f"{out} exists already, and this command would write another output",
        # of a plan the manifest has no hashes
        details=_differences(_made_with(out, facts), facts, was="made") or [f"{what}: not the same contents as before"],
        hint="choose another OUT, or give `overwrite=True` to replace it",
    )


def not_replaced(out: Location, why: Sequence[str], *, overwrite: bool) -> OutputError:
    """Returns the error for a place with files that do not belong to tpuconv, by these reasons."""
    stays = ", so `overwrite=True` does not replace it" if overwrite else ""
    is_changed = all(reason.endswith(REWRITTEN) for reason in why)
    return OutputError(
        f"{out} exists already and holds files that "
        f"{'were changed since tpuconv wrote them' if is_changed else 'tpuconv did not write'}{stays}",
        details=shorten(why),
        hint="choose another OUT, or move them away; `tpuconv verify --update` accepts a change"
        if is_changed
        else "choose another OUT, or move these files away",
    )


def check_not_nested(out: Location) -> None:
    """Checks that an output may lie here.

    Raises:
        UsageError: it has the name of a work folder.
        OutputError: it lies in another output, or in one that is being written.
    """
    if is_work_name(out):
        raise UsageError(
            f"{out} has the name of a folder in which tpuconv keeps unfinished work",
            hint=f"choose a name that does not end with {WORK_SUFFIX}",
        )
    for parent in out.parents:
        if is_readable(parent / MANIFEST) and sealed.identity(parent) is not None:
            raise OutputError(f"{out} lies in another output of tpuconv, {parent}", hint="choose an OUT outside of it")
        is_top = not (parent.key if isinstance(parent, BucketPath) else parent.name)
        if not is_top and is_readable(work_folder(parent) / (CLAIM if isinstance(parent, BucketPath) else WORK)):
            raise OutputError(
                f"{out} lies in {parent}, which another process writes, or was to write",
                details=[f"its unfinished work is in {work_folder(parent)}"],
                hint="choose an OUT outside of it, or finish that conversion first",
            )


def _made_with(out: Location, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a plan as the manifest of an output has them. What that does not say is as in the plan."""
    try:
        raw = sealed.read_sealed(out).raw
    except BucketError:
        raise
    except TpuconvError:
        return dict(facts)
    if _form(raw) != _form(facts):
        return dict(raw)
    made = {key: raw.get(key, value) for key, value in facts.items()}
    if "source" in facts:
        made["source"] = {key: raw["source"].get(key, value) for key, value in facts["source"].items()}
    if "quantization" in facts:
        by_rules = "rules" in (raw.get("quantization") or {})  # and not released so
        own = {**(facts["quantization"] or {}), "config": raw["quantization"]["name"]} if by_rules else None
        made["quantization"] = own
    return made


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "", *, was: str = "began") -> list[str]:
    """Returns the differences between two mappings, one line per key: `options.dtype: began with 'auto', now
    'float32'`. For two hashes it only says that they differ."""
    if not prefix and _form(old) != _form(new):
        return [f"output: {was} as {_form(old)}, now {_form(new)}"]
    lines = []
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            lines += _differences(before, now, f"{prefix}{key}.", was=was)
        elif _is_hash(before) and _is_hash(now) and before != now:
            lines.append(f"{prefix}{key}: not the same as before")
        elif before != now:
            with_what = "without" if before is None else f"with {_value_text(before)}"
            lines.append(f"{prefix}{key}: {was} {with_what}, now {_value_text(now)}")
    return lines


def _form(facts: Mapping[str, Any]) -> str:
    """Returns in words what an output is, by its manifest or the facts of its plan. Of two forms all else differs."""
    if facts.get("kind") == sealed.SAFETENSORS:
        return "safetensors"
    return "a checkpoint that is sharded for a mesh" if "mesh" in facts else "a checkpoint"


def _is_hash(value: Any) -> bool:
    """Returns True if a value is a hash, which tells a reader nothing. A commit id, of 40 digits, is not one."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}|([0-9a-f]{32}){1,2}", value) is not None


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items() if not _is_hash(item))
    return "nothing" if value is None else repr(value)
