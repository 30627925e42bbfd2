"""`tpuconv push`."""

from pathlib import Path

import click

from tpuconv import api
from tpuconv.commands import options
from tpuconv.commands.console import Table, console, print_json, show
from tpuconv.commands.params import File, Name, known_checkpoints
from tpuconv.text import format_count, format_size


@options.command(
    "push",
    "tpuconv push Qwen3-8B-orbax my-org/Qwen3-8B-orbax --dry-run",
    "tpuconv push Qwen3-8B-orbax my-org/Qwen3-8B-orbax --private",
    "tpuconv push Qwen3-8B-orbax my-org/Qwen3-8B-orbax --sign key.pem",
)
@click.argument("path", type=File(), shell_complete=known_checkpoints)
@click.argument("repo", type=Name(), metavar="ORG/NAME")
@options.of(api.push, revision={"type": Name()}, sign={"type": options.FILE, "metavar": "KEY"})
@options.as_json
def push(
    path: Path, repo: str, private: bool, revision: str | None, sign: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Upload PATH, a complete checkpoint or export of tpuconv, to the repository ORG/NAME on the Hub. The repository is
    created if it does not exist.

    --sign writes the signature model.sig into PATH, by the package model-signing: `tpuconv verify --key` checks it.

    Files of an older output of tpuconv in the repository, which PATH does not have, are deleted there.

    After an interruption the same command continues. File sizes are compared with the manifest; `tpuconv verify`
    compares contents.
    """
    done = api.push(path, repo, private=private, revision=revision, sign=sign, dry_run=dry_run)
    if as_json:
        print_json(done.to_json())
        return
    if dry_run:
        table = Table(f"{path} -> {repo}, {done.revision}", ("file", "bytes"), right=("bytes",))
        for name, size in done.files.items():
            table.add_row(name, format_size(size))
        console().print(table)
    what = f"{len(done.files)} files, {format_size(done.bytes)}"
    gone = f", {format_count(len(done.deleted), 'file')} of an older output deleted" if done.deleted else ""
    show((repo, "bold"), f": {what} would be uploaded" if dry_run else f": {what}{gone}, commit {done.commit}")
