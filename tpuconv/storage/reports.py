"""Writes a file that a user asks for by name, such as a recipe or a page. It appears complete or not at all."""

from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile

from tpuconv.errors import OutputError, ResourceError, UsageError
from tpuconv.names import SIGNATURE
from tpuconv.pages import MARKED_BYTES, is_marked
from tpuconv.storage.disk import PARTIAL, replace_file
from tpuconv.storage.sealed import identity


def check_free(out: Path, option: str, *, overwrite: bool) -> None:
    """Checks that a file can be written.

    Args:
        out: its path.
        option: the name of the option that has the path.
        overwrite: whether an existing file of ours may be replaced. An empty one is nobody's.

    Raises:
        OutputError: the file exists, and must not be replaced, or is not ours; or it lies in an output of ours, which
            would not be as its manifest says any more.
        ResourceError: it cannot be created.
        UsageError: it is a folder, or its folder does not exist.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"{out} is a folder, or its folder does not exist", hint="name a file in an existing folder")
    beside = out.parent.resolve()
    for folder in (beside, *beside.parents) if out.name != SIGNATURE else ():
        if identity(folder) is not None:
            raise OutputError(
                f"{out} lies in an output of tpuconv, {folder}, which would not be as its manifest says any more",
                hint=f"name a file outside of it by `{option}=`",
            )
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists", hint=f"name another file by `{option}=`, or give `overwrite=True`")
    if out.exists() and not _is_ours(out):
        raise OutputError(
            f"{out} exists, and is neither a page nor a recipe of tpuconv: it is not replaced",
            hint=f"name another file by `{option}=`, or move this one away",
        )
    try:
        TemporaryFile(dir=out.absolute().parent).close()
    except OSError as e:
        raise ResourceError(f"{out} cannot be written: {e.strerror}", hint=f"name another file by `{option}=`") from e


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            first = opened.read(MARKED_BYTES)
    except OSError:
        return False
    return not first or is_marked(first)


def write_report(text: str, out: Path, option: str, *, overwrite: bool) -> None:
    """Writes a file. An old one stays until the new one is complete; an interruption leaves no part of it.

    Raises:
        OutputError, ResourceError, UsageError: see `check_free`, which is called again.
    """
    check_free(out, option, overwrite=overwrite)
    partial = out.with_name(f".tpuconv-{token_hex(8)}{PARTIAL}")  # a name that no file of a user has
    try:
        replace_file(out, text.encode(), partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
