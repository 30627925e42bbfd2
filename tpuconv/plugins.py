"""Families, targets and encoders that other packages add by entry points."""

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

from tpuconv.errors import UsageError
from tpuconv.names import REPAIR

Kind = TypeVar("Kind")


def by_name(points: Iterable[EntryPoint]) -> dict[str, list[EntryPoint]]:
    """Returns the entry points of each name."""
    found: dict[str, list[EntryPoint]] = {}
    for point in points:
        found.setdefault(point.name, []).append(point)
    return found


def check_alone(what: str, name: str, points: Sequence[EntryPoint], *, is_ours: bool) -> None:
    """Checks that one package alone has a name: which one is meant cannot be known, and a manifest has the name alone.

    Raises:
        UsageError: several have it.
    """
    places = list(dict.fromkeys([*(["tpuconv"] if is_ours else []), *(point.value for point in points)]))
    if len(places) > 1:
        raise UsageError(
            f"the name of the {what} '{name}' is taken several times: by {', '.join(places)}",
            hint="uninstall the packages of the others, or give each another name, which its entry point has too",
        )


def loaded(what: str, point: EntryPoint) -> Any:
    """Returns the object of an entry point.

    Raises:
        UsageError: its package cannot be imported.
    """
    try:
        return point.load()
    except Exception as error:
        raise UsageError(
            f"the {what} '{point.name}' cannot be imported from {point.value}: {error!r}", hint=REPAIR
        ) from error


def plugin(what: str, kind: type[Kind], point: EntryPoint) -> Kind:
    """Returns the family or the target of an entry point, which has the same name.

    Raises:
        UsageError: its package cannot be imported, or the object is of another type or has another name.
    """
    found = loaded(what, point)
    if not isinstance(found, kind):
        raise UsageError(
            f"the {what} '{point.name}', {point.value}, is not a {kind.__module__}.{kind.__name__}", hint=REPAIR
        )
    own: Any = found
    if own.name != point.name:  # a manifest has the name of the object
        raise UsageError(
            f"the {what} '{point.name}', {point.value}, has the name '{own.name}'",
            hint=f"name the entry point {own.name}",
        )
    return found
