"""Default inputs of commands: the newest checkpoint, and prompts from a file."""

from pathlib import Path

from tpuconv.commands.console import show
from tpuconv.errors import UsageError
from tpuconv.location import Location


def chosen_checkpoint(
    ckpt: Location | None, doing: str, *, quiet: bool, own: bool = False, quantized: bool | None = None
) -> Location:
    """Returns the given checkpoint, or the newest one in the current folder (or this folder itself). Shows the choice
    unless `quiet`.

    Args:
        ckpt: what the user gave.
        doing: the first word of the line that is shown, such as "Verifying".
        quiet: show nothing.
        own: consider only checkpoints with our names, not checkpoints for other programs.
        quantized: True considers only quantized checkpoints, False only unquantized ones.

    Raises:
        UsageError: there is none.
    """
    if ckpt is not None:
        return ckpt
    newest = _newest_checkpoint(own, quantized)
    if not quiet and newest == Path():
        show(f"{doing} ", (Path.cwd().name, "bold"), ", this folder.")
    elif not quiet:
        show(f"{doing} ", (str(newest), "bold"), ", the newest checkpoint in this folder.")
    return newest


def _newest_checkpoint(own: bool, quantized: bool | None) -> Path:
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.names import MANIFEST, OWN_TARGET
    from tpuconv.storage.sealed import CHECKPOINT, kind_of

    here = [Path(MANIFEST)] if Path(MANIFEST).is_file() else Path().glob(f"*/{MANIFEST}")
    for path in sorted(here, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if kind_of(path.parent) not in (CHECKPOINT, None):
            continue
        if not own and quantized is None:
            return path.parent
        manifest = read_manifest(path.parent)
        if own and manifest.target != OWN_TARGET:
            continue
        if quantized is None or quantized == (manifest.quantization is not None):
            return path.parent
    raise UsageError(
        "there is no checkpoint in the current folder", hint="make one with `tpuconv convert SRC`, or name it"
    )


def read_prompts(file: Path | None) -> list[str]:
    """Returns the prompts of a text file, one per line; none without a file.

    Raises:
        UsageError: it is not UTF-8 text, cannot be read, or holds none.
    """
    if file is None:
        return []
    try:
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        raise UsageError(f"{file} is not text in UTF-8: {e.reason} at byte {e.start}", hint="save it as UTF-8") from e
    except OSError as e:
        raise UsageError(f"{file} cannot be read: {e.strerror}") from e
    if not prompts:
        raise UsageError(f"{file} holds no prompt", hint="write one prompt per line")
    return prompts
