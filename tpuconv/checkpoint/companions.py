"""The files beside the arrays of a checkpoint that came with the weights of its source."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.errors import SourceError
from tpuconv.location import plain_path
from tpuconv.sources.companions import SOURCE_CARD, find_companions, is_companion
from tpuconv.storage.sealed import copy_file
from tpuconv.storage.sinks import FolderSink, Sink


def companions_of(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Returns the files that came with the weights, with size and hash."""
    if not manifest.sealed.is_sealed:
        return find_companions(manifest.folder, SOURCE_CARD).copied
    files = manifest.sealed.files.items()
    return {name: dict(facts) for name, facts in files if name == SOURCE_CARD or is_copied(manifest, name)}


def is_copied(manifest: Manifest, name: str) -> bool:
    """Returns True if a file of a checkpoint came with the weights: a companion, or a file in the folder of a
    module."""
    return is_companion(name) or ("/" in name and not manifest.is_of_arrays(name))


def copy_companion(manifest: Manifest, name: str, sink: Sink, target: str, facts: Mapping[str, Any]) -> None:
    """Copies a file that came with the weights, whose size and hash are `facts`, into an output, as `target`.

    Raises:
        SourceError: it cannot be read, or was changed; or the checkpoint was replaced.
    """
    try:
        copy_file(manifest.folder / name, sink, target, facts)
    except SourceError:
        manifest.check_current()
        raise


@contextmanager
def tokenizer_folder(manifest: Manifest, *, copied: bool = False) -> Iterator[Path]:
    """Yields a local folder with the tokenizer and the configs of a checkpoint: its own folder, or copies from a
    bucket, or with `copied` from any place."""
    if isinstance(manifest.folder, Path) and not copied:
        with plain_path(manifest.folder) as path:
            yield path
        return
    with TemporaryDirectory() as name:
        for companion, facts in companions_of(manifest).items():
            copy_companion(manifest, companion, FolderSink(Path(name)), companion, facts)
        yield Path(name)
