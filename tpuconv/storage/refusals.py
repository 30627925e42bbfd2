"""The errors for an output that must not be replaced, and for unfinished work of another plan. They say how what is
there differs from what the command would write."""

import re
from collections.abc import Mapping
from typing import Any

from tpuconv.errors import BucketError, OutputError, TpuconvError
from tpuconv.location import Location
from tpuconv.storage import sealed


def unfinished(out: Location, work: Location, began: Mapping[str, Any], facts: Mapping[str, Any]) -> OutputError:
    """The error for unfinished work of another plan, whose entry is `began`."""
    return OutputError(
        f"there is an unfinished conversion to {out.name} in {work}, of another source or with other options",
        details=_differences(began["facts"], facts),
        hint="run it with what it began with to finish it, or give --overwrite to begin anew",
    )


def exists_already(out: Location, facts: Mapping[str, Any], *, overwrite: bool) -> OutputError | None:
    """The error for an output that exists and is not that of a plan with these facts; None if it may be replaced."""
    if why_foreign := sealed.why_not_ours(out):
        stays = ", so --overwrite does not replace it" if overwrite else ""
        return OutputError(
            f"{out} exists already and holds files that tpuconv did not write{stays}",
            details=why_foreign,
            hint="choose another OUT, or move away what is not tpuconv's",
        )
    if overwrite:
        return None
    return OutputError(
        f"{out} exists already, and is not what this command writes",
        details=_differences(_made_with(out, facts), facts, was="made"),
        hint="choose another OUT, or give --overwrite to replace it",
    )


def _made_with(out: Location, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a plan as the manifest of an output has them. What that does not say is as in the plan."""
    try:
        raw = sealed.read_sealed(out).raw
    except BucketError:
        raise
    except TpuconvError:
        return dict(facts)
    made = {key: raw.get(key, value) for key, value in facts.items()}
    if "source" in facts:
        made["source"] = {key: raw["source"].get(key, value) for key, value in facts["source"].items()}
    if "quantization" in facts:
        by_rules = "rules" in (raw.get("quantization") or {})  # and not released so
        own = {**(facts["quantization"] or {}), "config": raw["quantization"]["name"]} if by_rules else None
        made["quantization"] = own
    return made


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "", *, was: str = "began") -> list[str]:
    """The differences between two mappings, one line per key: `options.dtype: began with 'auto', now 'float32'`. For
    two hashes it only says that they differ."""
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


def _is_hash(value: Any) -> bool:
    """Whether a value is a hash, which tells a reader nothing. A commit id, of 40 digits, does."""
    return isinstance(value, str) and re.fullmatch("([0-9a-f]{32}){1,2}", value) is not None


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(item)}" for key, item in value.items() if not _is_hash(item))
    return "nothing" if value is None else repr(value)
