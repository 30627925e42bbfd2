"""The places of the sources of outputs on this machine, and the stamps of their files.

An output says nothing of the machine that made it: equal sources give equal outputs, wherever they lie. So the path of
the source, and the stamps by which a file need not be read again, are kept in the user's cache
(`$XDG_CACHE_HOME/tpuconv/sources`, else `~/.cache`). Without it, or on another machine, files are read and their hashes
compared with the hashes of the manifest.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from tpuconv.errors import SourceError, TpuconvError
from tpuconv.jsonfile import Each, check, parse, read_bytes
from tpuconv.location import Location
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import is_companion
from tpuconv.storage.hashes import hash_file, known_hash
from tpuconv.storage.sealed import Sealed

ORIGIN_SCHEMA = {"folders": Each({"stamps": Each(str), "beside": str})}
"""By folder the stamps of its files, and a hash of the files beside the weights that an output took over."""
MAX_ORIGIN_BYTES = 64 << 20
MOST_FOLDERS = 8
"""Copies of one source that are remembered, the latest first."""


def known_stamps(made: Sealed, folder: Location) -> Mapping[str, str]:
    """Returns the stamps by name that the files in a folder had when the output with this manifest was made of them;
    none if it was made elsewhere, or nobody knows."""
    known = _folders(made).get(str(_absolute(folder)))
    return {} if known is None else known["stamps"]


def find_folder(made: Sealed, output: Location) -> Path | None:
    """Returns the folder on this machine that the output with this manifest was made of, or one beside it or in the
    current folder with files of the same names and sizes; None if there is none. Of folders with the same weights it is
    the one that had the same files beside them, or else that has most of them."""
    known, beside = _folders(made), _beside(made)
    remembered = [Path(folder) for folder in known if os.path.isdir(folder)]
    near = [*([output.absolute().parent] if isinstance(output, Path) else []), Path()]
    found = remembered or [x for place in near for x in _inside(place) if _is_like(x, made)]

    def rank(folder: Path) -> tuple[bool, int]:
        had_same = str(folder) in known and known[str(folder)]["beside"] == beside
        return not had_same, len(changed_companions(made, folder))

    return min(found, key=rank) if len(found) > 1 else next(iter(found), None)


def _beside(made: Sealed) -> str:
    taken = {name: facts for name, facts in made.files.items() if is_companion(name)}
    return xxhash.xxh3_128_hexdigest(json.dumps(taken, sort_keys=True).encode())


def changed_companions(made: Sealed, folder: Path) -> list[str]:
    """Returns the names of the files beside the weights, such as config.json, that an output took over from its source,
    and that are missing or others in a folder."""
    return [name for name, facts in made.files.items() if is_companion(name) and _facts(folder / name) != facts]


def _facts(path: Path) -> Mapping[str, Any]:
    with suppress(OSError):
        return hash_file(path)
    return {}


def _inside(place: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in place.iterdir() if path.is_dir())
    return []


def _is_like(folder: Path, made: Sealed) -> bool:
    """Returns True if a folder has files with the names and sizes of the source, and is not an output of tpuconv."""
    shards = made.raw["source"]["shards"]
    with suppress(OSError):
        sizes = all((folder / name).stat().st_size == facts["bytes"] for name, facts in shards.items())
        return bool(shards) and sizes and not (folder / MANIFEST).exists()
    return False


def remember(made: Sealed, folder: Location, stamps: Mapping[str, str]) -> None:
    """Remembers that the output with this manifest holds what the files in a folder hold, by their stamps. Where the
    cache cannot be written, nothing is remembered."""
    key, path = str(_absolute(folder)), _entry(made)
    if path is None or not stamps:
        return
    others = [(other, found) for other, found in _folders(made).items() if other != key]
    folders = dict([(key, {"stamps": dict(stamps), "beside": _beside(made)}), *others][:MOST_FOLDERS])
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.write_text(json.dumps({"folders": folders}))
        part.replace(path)


def _folders(made: Sealed) -> dict[str, dict[str, Any]]:
    """The entries of `ORIGIN_SCHEMA`, the latest first."""
    path = _entry(made)
    if path is not None and path.is_file():
        with suppress(TpuconvError):  # it is a cache: what cannot be read is not known
            data = read_bytes(path, MAX_ORIGIN_BYTES, SourceError)
            return dict(check(parse(data, "", SourceError), ORIGIN_SCHEMA, "", SourceError)["folders"])
    return {}


def _entry(made: Sealed) -> Path | None:
    """Returns the file of the cache for the source of an output. Two outputs of the same weights share one: it is named
    by the hashes of their files, or, where not all of them were hashed, by the identity of the output."""
    shards = made.raw.get("source", {}).get("shards", {})
    hashes = [[name, known_hash(facts)] for name, facts in sorted(shards.items())]
    is_known = hashes and all(found is not None for _, found in hashes)
    key = xxhash.xxh3_128_hexdigest(json.dumps(hashes).encode()) if is_known else made.identity
    with suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "tpuconv" / "sources" / f"{key}.json"
    return None


def _absolute(folder: Location) -> Location:
    return Path(os.path.realpath(folder)) if isinstance(folder, Path) else folder
