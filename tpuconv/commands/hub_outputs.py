"""OUT as `hf://ORG/NAME`: the output is made in a local folder and pushed to the Hub; then its local files are
removed."""

import os
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tpuconv import api
from tpuconv.commands.options import PROCESS_OPTIONS
from tpuconv.commands.params import LocationParam
from tpuconv.errors import UsageError
from tpuconv.location import BucketPath, Location
from tpuconv.progress import Listener, Progress

if TYPE_CHECKING:
    from tpuconv.storage.sealed import Sealed

    Made = TypeVar("Made", "api.Conversion", "api.Export")

SCHEME = "hf"


class OutputParam(LocationParam):
    """A local path, the URL of a folder in a bucket, or a repository on the Hub."""

    def convert(self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None) -> Any:
        scheme, _, repo = str(value).partition("://")
        if scheme.lower() != SCHEME:
            return super().convert(value, param, ctx)
        from tpuconv.api.pushing import check_name

        check_name(repo)
        owner, _, name = repo.partition("/")
        return BucketPath(SCHEME, owner, name)


def _repository(out: Location | None) -> str | None:
    """Returns ORG/NAME if OUT is on the Hub."""
    return f"{out.bucket}/{out.key}" if isinstance(out, BucketPath) and out.scheme == SCHEME else None


def local_place(
    out: Location | None, given: MutableMapping[str, Any], *, planned: bool = False
) -> "tuple[Location | None, Sealed | None]":
    """Returns the folder in which an output is made: OUT, or for the Hub a folder in the workspace or beside its cache.
    For the Hub, `workspace` is taken out of the options `given`. Unless the output is only `planned`, the Hub is asked
    whether it takes the output, and the manifest of an output that is there is returned too. With `--overwrite` and
    `--check` it is not: all is made and pushed again.

    Raises:
        UsageError: several processes would make it, or the repository holds weights of others.
        HubError: the user is not logged in, or ORG is another account.
    """
    repo = _repository(out)
    if repo is None:
        return out, None
    if any(given[name] not in (None, False) for name in PROCESS_OPTIONS):
        raise UsageError(
            f"{out} is made in a local folder first, by one process",
            hint="convert into a folder or bucket that all processes see, then `tpuconv push` it",
        )
    from huggingface_hub.constants import HF_HOME

    from tpuconv.api.pushing import check_repository

    there = None if planned else check_repository(repo)
    work = given.get("workspace") or HF_HOME
    given["workspace"] = None
    return Path(work, "tpuconv", repo), None if given["overwrite"] or given["check"] else there


def pushed(out: Location | None, done: "Made", there: "Sealed | None", progress: Listener) -> "Made":
    """Pushes an output to the Hub if OUT is there, unless it was `there` before, and removes its local files: those
    that its manifest names. Files of another output, which was not pushed yet, stay. Returns what was done, with this
    OUT."""
    repo = _repository(out)
    if out is None or repo is None:
        return done
    from tpuconv.checkpoint.contents import contents_of
    from tpuconv.convert.run.card import serve_commands
    from tpuconv.storage.ownership import names_of, remove_known
    from tpuconv.storage.sealed import identity

    folder = Path(str(done.out))
    if not done.is_elsewhere:
        progress(Progress(f"pushing to {repo}"))
        api.push(str(done.out), repo)
    if not done.is_elsewhere or (there is not None and identity(folder) == there.identity):
        remove_known(folder, names_of(folder, contents_of).__contains__)
    done = replace(done, out=out, already_there=done.is_elsewhere)
    if isinstance(done, api.Conversion) and done.serve:
        done = replace(done, serve=serve_commands(done.family, repo, done.drafts))
    return done
