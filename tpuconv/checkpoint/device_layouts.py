"""The memory layouts that the TPU's compiler prefers for the arrays of a checkpoint: `layouts.json`, beside the
manifest.

They are a hint: without them arrays are laid out anew when a step starts. The manifest holds the file's hash; a file
that it does not list, as after a kill while it was written, counts as none.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.jsonfile import MAX_BYTES, Each, Size, check, parse, read_bytes
from tpuconv.location import Location
from tpuconv.names import LAYOUTS, collapse, expand
from tpuconv.storage.places import is_readable
from tpuconv.storage.sealed import write_listed

LAYOUTS_FORMAT = 1

MAX_ARRAYS = 100_000
"""The most entries in one file. A checkpoint has a few thousand."""


class DeviceLayout(NamedTuple):
    """The layout of one array: its axes, the slowest first, and the tiles into which a device cuts its part. It holds
    for one dtype, since tiles of narrower elements are larger."""

    dtype: str
    major_to_minor: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, dtype: str, major_to_minor: Iterable[int], tiling: Iterable[Iterable[int]]) -> "DeviceLayout":
        """Returns a layout from lists, as JSON has them."""
        return cls(dtype, tuple(major_to_minor), tuple(map(tuple, tiling)))


LAYOUT_SCHEMA = {
    "device": str,
    "mesh": Each(Size),
    "arrays": Each({"dtype": str, "major_to_minor": [Size], "tiling": [[int]]}),
}


def layouts_of(path: Location, data: bytes, device: str, mesh: Mapping[str, int]) -> dict[str, DeviceLayout]:
    """Returns the layouts for a kind of device ("TPU v5 lite") and a mesh, given by the sizes of its axes, by the name
    of the array; none if none were written.

    Args:
        path: of the file, for messages.
        data: its bytes.

    Raises:
        CorruptOutput: the file cannot be understood.
        UsageError: a newer tpuconv wrote it.
    """
    out: dict[str, DeviceLayout] = {}
    for entry in _entries_of(path, data):
        if _is_for(entry, device, mesh):
            for pattern, facts in entry["arrays"].items():
                out |= dict.fromkeys(expand(pattern), DeviceLayout.of(*(facts[key] for key in DeviceLayout._fields)))
    return out


def check_layouts(folder: Location) -> None:
    """Checks that the file of layouts in a folder, if there is one, is a file of ours.

    Raises:
        CorruptOutput: it cannot be understood.
        UsageError: a newer tpuconv wrote it.
    """
    path = folder / LAYOUTS
    if is_readable(path):
        _entries_of(path, read_bytes(path, MAX_BYTES, CorruptOutput))


def write_layouts(
    folder: Location, device: str, mesh: Mapping[str, int], layouts: Mapping[str, DeviceLayout]
) -> Location:
    """Writes the layouts for a kind of device and a mesh. They replace earlier ones for both; others stay.

    Returns:
        The path of the file.

    Raises:
        CorruptOutput: the existing file, or the manifest, cannot be understood.
        ResourceError: the file cannot be written.
    """
    path = folder / LAYOUTS
    data = read_bytes(path, MAX_BYTES, CorruptOutput) if is_readable(path) else None
    old_entries = [] if data is None else _entries_of(path, data)
    kept_entries = [entry for entry in old_entries if not _is_for(entry, device, mesh)]
    alike: dict[DeviceLayout, list[str]] = {}
    for name, layout in layouts.items():
        alike.setdefault(layout, []).append(name)
    arrays: dict[str, Any] = {}
    for layout, names in alike.items():
        for pattern, members in collapse(names).items():
            is_complete = set(expand(pattern)) == set(members)
            arrays |= dict.fromkeys([pattern] if is_complete else members, layout._asdict())
    entries = [*kept_entries, {"device": device, "mesh": dict(mesh), "arrays": arrays}]
    write_listed(folder, LAYOUTS, _to_text(entries).encode())
    return path


def _to_text(entries: list[dict[str, Any]]) -> str:
    """JSON with one array per line."""
    parts = []
    for entry in entries:
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(facts)}" for name, facts in entry["arrays"].items())
        head = f'"device": {json.dumps(entry["device"])}, "mesh": {json.dumps(entry["mesh"])}'
        parts.append(f'  {{{head}, "arrays": {{\n{lines}\n  }}}}')
    return f'{{"format": {LAYOUTS_FORMAT}, "layouts": [\n' + ",\n".join(parts) + "\n]}\n"


def _entries_of(path: Location, data: bytes) -> list[dict[str, Any]]:
    try:
        raw = parse(data, LAYOUTS, CorruptOutput)
        if check(raw, {"format": int}, LAYOUTS, CorruptOutput)["format"] > LAYOUTS_FORMAT:
            raise UsageError(f"{path} was written by a newer tpuconv", hint="update tpuconv, or delete the file")
        entries: list[dict[str, Any]] = check(raw, {"layouts": [LAYOUT_SCHEMA]}, LAYOUTS, CorruptOutput)["layouts"]
        left = MAX_ARRAYS
        for entry in entries:
            for pattern in entry["arrays"]:
                left -= sum(1 for _ in expand(pattern, left))
    except (CorruptOutput, ValueError) as e:
        raise CorruptOutput(
            f"{path} is not a valid file of layouts: {e}",
            hint="move it away, and let `tpuconv fit --write-layouts` write one",
        ) from None
    return entries


def _is_for(entry: Mapping[str, Any], device: str, mesh: Mapping[str, int]) -> bool:
    found, asked = ({name: size for name, size in sizes.items() if size > 1} for sizes in (entry["mesh"], mesh))
    return bool(entry["device"] == device and found == asked)
