"""Upload an output of ours to the Hub."""

import glob
import warnings
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tpuconv.errors import CorruptOutput, HubError, TpuconvError, UsageError, shorten
from tpuconv.location import local_path
from tpuconv.options import argument, option, takes
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from tpuconv.storage.sealed import Sealed

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf")
"""Ends of the names of files that programs read as weights, whatever lies beside them."""


@dataclass(frozen=True, repr=False)
class Push(OneLine):
    """The files that `push` uploaded, or would upload.

    Attributes:
        folder: the output.
        repo: the repository on the Hub, as `org/name`.
        revision: the branch.
        files: size by path.
        deleted: files of an older output of ours in the repository, which this one does not have.
        commit: the commit on the Hub; None if nothing was uploaded.
    """

    folder: Path
    repo: str
    revision: str
    files: Mapping[str, int]
    deleted: Collection[str]
    commit: str | None

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = {"folder": str(self.folder), "repo": self.repo, "revision": self.revision, "commit": self.commit}
        return {**facts, "bytes": self.bytes, "files": dict(self.files), "deleted": list(self.deleted)}


@dataclass(eq=False, repr=False)
class PushRequest:
    """The arguments of `push`."""

    path: str | Path = field(
        metadata=argument("The folder. It must contain the files of its manifest, with their sizes.")
    )
    repo: str = field(metadata=argument("`org/name`; it is made if it does not exist."))
    _: KW_ONLY
    private: bool = option(False, "Create a private repository; a public one is refused.")
    revision: str | None = option(None, "A branch; created if it does not exist.  [default: main]")
    sign: Path | None = option(
        None,
        "Sign the files with this private key of an elliptic curve (PEM), and upload the signature as model.sig.",
    )
    dry_run: bool = option(False, "List the files and stop, without contacting the Hub.")


@takes(PushRequest)
def push(asked: PushRequest) -> Push:
    """Uploads a complete checkpoint or export of ours to the Hub. Interrupted, the same call continues: the client
    skips what is there. Files of an older output of ours are deleted there; files of others stay.

    Raises:
        UsageError: the folder is no output of ours or holds other files, the name is wrong, the key cannot be used,
            `private` was given and the repository is public, or the repository holds weights of others.
        CorruptOutput: files are missing or have the wrong size.
        OutputError: `sign` is given, and there is another signature.
        HubError: the Hub refuses, or cannot be reached.
    """
    from tpuconv.sources.hub_errors import client_errors
    from tpuconv.verify.signature import sign

    folder, branch = local_path(asked.path, "push uploads local folders"), asked.revision or "main"
    files = _complete(folder)
    check_name(asked.repo)
    if asked.dry_run:
        return Push(folder, asked.repo, branch, files, (), None)
    if asked.sign:
        signature = sign(folder, Path(asked.sign))
        files[signature.name] = signature.stat().st_size
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with client_errors(asked.repo, branch, to_write=True), warnings.catch_warnings(action="ignore"):
            hub = HfApi()
            hub.create_repo(asked.repo, private=asked.private or None, exist_ok=True)
            if asked.private and not hub.model_info(asked.repo).private:
                raise UsageError(f"{asked.repo} is public", hint="make it private on the Hub, or leave `private=` out")
            if asked.revision:
                hub.create_branch(asked.repo, branch=asked.revision, exist_ok=True)
            stale = _stale(hub, asked.repo, branch, files)
            done = hub.upload_folder(
                repo_id=asked.repo,
                folder_path=folder,
                revision=branch,
                commit_message=f"Upload {folder.resolve().name}",
                delete_patterns=[glob.escape(name) for name in stale] or None,
            )
    finally:
        if shown:
            enable_progress_bars()
    return Push(folder, asked.repo, branch, files, stale, str(done.oid))


def _stale(hub: "HfApi", repo: str, branch: str, files: Collection[str]) -> list[str]:
    """Returns the files of a repository that an older output of ours has by its manifest, and this one has not, with
    the signature of that manifest. A program would read them beside this one, such as a `model.safetensors` beside an
    index.

    Raises:
        UsageError: there are weights of others.
    """
    from tpuconv.checkpoint.contents import contents_of
    from tpuconv.names import MANIFEST, SIGNATURE
    from tpuconv.storage.ownership import names_of

    listed, older = hub.list_repo_files(repo, revision=branch), set[str]()
    there = set(listed) - set(files)
    if there and MANIFEST in listed:
        with TemporaryDirectory() as temporary:
            for name in {MANIFEST, SIGNATURE} & set(listed):
                hub.hf_hub_download(repo, name, revision=branch, local_dir=temporary)
            older = names_of(Path(temporary), contents_of)
    if foreign := sorted(name for name in there - older if name.endswith(WEIGHTS)):
        raise UsageError(
            f"{repo} holds weights that no manifest of tpuconv names at {branch}, and programs would read them too",
            details=shorten(foreign),
            hint="delete them there, or give another repository or `revision=`",
        )
    return sorted(there & older)


def _complete(folder: Path) -> dict[str, int]:
    """Returns the files of an output and their sizes, after checking that it is complete and holds nothing else."""
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.names import MANIFEST, SIGNATURE, is_beside
    from tpuconv.storage.places import size_faults
    from tpuconv.storage.sealed import SAFETENSORS, STAGED, read_sealed

    sealed = read_sealed(folder)
    if not sealed.is_sealed:
        raise UsageError(f"{folder} is of an early version and does not list its files", hint="convert it again")
    sizes = {name: int(facts["bytes"]) for name, facts in sealed.files.items()}
    if sealed.raw.get("kind") != SAFETENSORS:
        manifest = read_manifest(folder)
        manifest.check_complete()
        sizes = manifest.file_sizes()
    if faults := [f"{name} {fault}" for name, fault in size_faults(folder, sizes)]:
        raise CorruptOutput(
            f"{folder} is not complete", details=shorten(faults), hint="`tpuconv verify` shows all; make it again"
        )
    sizes[MANIFEST] = (folder / MANIFEST).stat().st_size
    if (folder / STAGED).exists():
        raise CorruptOutput(f"{folder} was not published", hint="run the command that made it again")
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
    if SIGNATURE in found:
        sizes[SIGNATURE] = (folder / SIGNATURE).stat().st_size
    if foreign := sorted(name for name in found - sizes.keys() if not is_beside(name)):
        raise UsageError(
            f"{folder} holds files that tpuconv did not write", details=shorten(foreign), hint="move them elsewhere"
        )
    return dict(sorted(sizes.items()))


def check_repository(repo: str) -> "Sealed | None":
    """Checks before an output is made that it can be pushed.

    Returns:
        The manifest of a complete output of ours in the repository; None if there is none.

    Raises:
        UsageError: the repository holds weights of others.
        HubError: the user is not logged in, the repository is of another account, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    from tpuconv.sources.hub_errors import client_errors

    if not get_token():
        raise HubError(f"an upload to {repo} needs a token", hint="log in with `hf auth login`, or set HF_TOKEN")
    with client_errors(repo, "main", to_write=True):
        hub = HfApi()
        user = hub.whoami()
        names = [user["name"], *(org["name"] for org in user.get("orgs", ()))]
        if repo.partition("/")[0] not in names:
            raise HubError(
                f"{repo} is not of an account that you may write to", hint=f"give {' or '.join(names)} as ORG"
            )
        if not hub.repo_exists(repo):
            return None
        _stale(hub, repo, "main", ())
        return _output_on_hub(hub, repo)


def _output_on_hub(hub: "HfApi", repo: str) -> "Sealed | None":
    """Returns the manifest of an output of ours in a repository, if all its files are there with their sizes."""
    from tpuconv.checkpoint.contents import contents_of
    from tpuconv.names import MANIFEST
    from tpuconv.storage.sealed import read_sealed

    tree = hub.list_repo_tree(repo, recursive=True)
    there = {each.path: each.size for each in tree if hasattr(each, "size")}  # folders have none
    if MANIFEST not in there:
        return None
    with TemporaryDirectory() as temporary:
        hub.hf_hub_download(repo, MANIFEST, local_dir=temporary)
        try:
            sealed = read_sealed(Path(temporary))
            sizes = contents_of(Path(temporary), sealed).sizes
        except TpuconvError:  # it was changed, or is of another version
            return None
    is_complete = sealed.is_sealed and all(there.get(name) == size for name, size in sizes.items())
    return sealed if is_complete else None


def check_name(repo: str) -> None:
    """Checks that a text is the id of a repository, with its owner.

    Raises:
        UsageError: it is not.
    """
    from huggingface_hub.errors import HFValidationError

    from tpuconv.private import validate_repo_id

    try:
        validate_repo_id(repo)
        is_id = repo.count("/") == 1
    except HFValidationError:
        is_id = False
    if not is_id:
        raise UsageError(f"'{repo}' is not a Hub id", hint="give ORG/NAME, as your-name/Qwen3-8B-orbax")
