"""The files of a source beside its weights: configs, tokenizers, templates, licenses, modules of sentence-transformers.
They are copied, and never run as code. What is not copied has a reason.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tpuconv import buckets
from tpuconv.errors import SourceError, TpuconvError
from tpuconv.jsonfile import LFS_POINTER, check, opened, parse, read_bytes, refuse_placeholder
from tpuconv.location import BucketPath, Location
from tpuconv.names import LAYOUTS, MANIFEST
from tpuconv.sources.files import CONFIG_FILE, INDEX_FILE
from tpuconv.storage.hashes import blocks, hash_file
from tpuconv.storage.places import files_below, is_there, names_in
from tpuconv.text import has_surrogates, plain

CARD, SOURCE_CARD = "README.md", "README.source.md"
"""The model card, and the name of the source's card in our output."""
TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates, as transformers saves them."""
MODULES = "modules.json"
"""The list of modules of sentence-transformers, each with a folder: pooling, dense layers and so on."""

AN_ADAPTER = "an adapter, which transformers would apply; `adapter=` with this folder or id merges it"
OTHER_WEIGHTS = (
    "weights that are not read: as in transformers, model.safetensors goes before an index, an index before others"
)
LEFT_OUT: Mapping[str, Sequence[str]] = {
    "written by tpuconv": (MANIFEST, LAYOUTS, SOURCE_CARD.lower(), "quantization.html"),
    "the state of a trainer": (
        *("trainer_state.json", "training_args*", "*_results.json", "optimizer*", "scheduler*", "rng_state*"),
        *("scaler*", "latest", "zero_to_fp32.py", "*.distcp", "zero_pp_rank_*", "random_states_*", "sampler*.bin"),
        *("custom_checkpoint_*", "dl_state_dict*", "recipe_state*", "value_head.*"),
    ),
    AN_ADAPTER: ("adapter_config.json", "adapter_model.*"),
    OTHER_WEIGHTS: ("*.safetensors", "*.index.json", "params.json"),
    "weights in a format that is not read": (
        *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
        *("*.gguf", "*.ot", "*.npz", "*.npy", "*.nemo"),
    ),
    "code, which is never run": ("*.py", "*.pyc", "*.so", "*.sh", "*.ipynb"),
    "of git": (".git*",),
}
"""By reason the names, in lower case, of files that are not copied. The first reason that has a name holds."""

COPIED_NAMES = (
    *("*.json", "*.jinja", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "tokenizer*", "vocab*", "merges*"),
    *("dict.txt", "chat_template*", "license*", "licence*", "notice*", "copying*", "use_policy*"),
)
"""The names of files that are copied unless `LEFT_OUT` has them."""
UNKNOWN = "not a config, tokenizer, template or license"
OTHER_FOLDER = f"a folder that {MODULES} does not name"

COMPANION_SUFFIXES = (".json", ".model", ".tiktoken", ".txt", ".jinja")
"""The name suffixes of configs and tokenizers. A folder of such a name is an error."""


class LeftOut(NamedTuple):
    """A file of a source that is not copied, or a folder, whose name ends with a slash; and why."""

    name: str
    reason: str


class Beside(NamedTuple):
    """The files beside the weights. `copied` has size and hash of each, as a manifest has them."""

    copied: dict[str, dict[str, Any]]
    left_out: tuple[LeftOut, ...]


def why_left_out(name: str, modules: Collection[str] = ()) -> str | None:
    """Returns the reason why a file is not copied; None if it is copied. The model card is not decided here.

    Args:
        name: its path in the folder.
        modules: folders of modules, whose weights are copied too.
    """
    if has_surrogates(name):
        return "its name is no text"
    parent, _, base = name.rpartition("/")
    in_module = any(f"{parent}/".startswith(f"{module}/") for module in modules)
    if parent and not in_module and parent != TEMPLATES:
        return OTHER_FOLDER
    lower = base.lower()
    for reason, patterns in LEFT_OUT.items():
        if any(fnmatchcase(lower, pattern) for pattern in patterns):
            return None if in_module and reason is OTHER_WEIGHTS else reason
    return None if any(fnmatchcase(lower, pattern) for pattern in COPIED_NAMES) else UNKNOWN


def is_companion(name: str) -> bool:
    """Returns True if a file at the top of a folder goes with the weights. The model card does not count."""
    return "/" not in name and why_left_out(name) is None


def is_config_alone(folder: Location) -> bool:
    """Returns True if a local folder has config.json, and beside it nothing but files that go with weights."""
    names: set[str] = set()
    if isinstance(folder, Path):
        with suppress(OSError):  # whoever reads the folder says so
            names = set(names_in(folder)) - {CARD}
    return CONFIG_FILE in names and INDEX_FILE not in names and all(map(is_companion, names))


def module_folders(folder: Location) -> list[str]:
    """Returns the folders that the list of modules names, if there is one; see `listed_modules`."""
    return [module["path"] for module in listed_modules(folder, {"path": str}, SourceError) if module["path"]]


def listed_modules(folder: Location, keys: Mapping[str, Any], error: type[TpuconvError]) -> list[dict[str, Any]]:
    """Returns the modules of the list of modules, if there is one: `path`, which is empty for the folder itself, and
    what else `keys` has.

    Args:
        folder: the checkpoint.
        keys: of a module, with their types.
        error: the class of the error if it is no such list.

    Raises:
        SourceError: it names what is not a folder inside.
        TpuconvError: it is no such list.
    """
    path = folder / MODULES
    if not is_there(path):
        return []
    listed = check(parse(read_bytes(path, 1 << 20, error), str(path), error), [keys], str(path), error)
    modules = [{**module, "path": module["path"].strip("/")} for module in listed]
    for name in (module["path"] for module in modules if module["path"]):
        if not re.fullmatch(r"[^/\\\0]+(/[^/\\\0]+)*", name) or {".", ".."} & set(name.split("/")):
            raise SourceError(f"{path} names {name!r}, which is no folder inside", hint="do not trust this checkpoint")
    return modules


def find_companions(
    folder: Location,
    card: str = CARD,
    *,
    trusted: bool = False,
    weights: Collection[str] = (),
    listed: Collection[str] = (),
) -> Beside:
    """Returns the files beside the weights of a folder, with its model card.

    Args:
        folder: the checkpoint.
        card: the name of the model card.
        trusted: whether files may be links, as in the cache of the Hub's client.
        weights: the files that are read as weights, and their index.
        listed: names of files that the checkpoint has elsewhere, on the Hub.

    Raises:
        SourceError: a file cannot be read, is a Git LFS pointer, or a link that leads out of the folder.
    """
    modules = module_folders(folder)
    try:
        present = _files_in(folder, [*modules, TEMPLATES])
    except OSError as e:
        raise SourceError(f"{folder} cannot be read: {e.strerror}") from None
    names = [name for name in present if name == card or (name[-1] != "/" and why_left_out(name, modules) is None)]
    if isinstance(folder, BucketPath):
        names = [name for name in names if is_there(folder / name)]
    elif not trusted:
        check_inside(folder, names)
    others = sorted({*present, *listed} - {*names, *weights, card})
    return Beside({name: _facts(folder / name) for name in names}, tuple(_left_out(others, modules)))


def _left_out(names: Iterable[str], modules: Collection[str]) -> Iterable[LeftOut]:
    """Returns the reasons for files that are not copied; one reason for each folder that belongs to no module."""
    folders = set()
    for name in names:
        reason = why_left_out(name, modules)
        if reason == OTHER_FOLDER:
            folders.add(plain(name.partition("/")[0]) + "/")
        elif reason is not None:
            yield LeftOut(plain(name), reason)
    yield from (LeftOut(name, "of git" if name == ".git/" else OTHER_FOLDER) for name in sorted(folders))


def _files_in(folder: Location, inside: Collection[str]) -> list[str]:
    """Returns the files at the top of a folder and in some folders of it; of others the name, with a slash at its
    end."""
    tops = {name.partition("/")[0] for name in inside}
    if isinstance(folder, BucketPath):
        names = names_in(folder)
        deep = [f"{top}/{name}" for top in sorted(tops & set(names)) for name in buckets.listing(folder / top)]
        return sorted([*(name for name in names if name not in tops), *deep])
    names = []
    for name in names_in(folder):
        if name in tops and (folder / name).is_dir() and not (folder / name).is_symlink():  # which may lead anywhere
            names += [path.relative_to(folder).as_posix() for path in files_below(folder / name)]
        elif (folder / name).is_dir() and not (is_companion(name) and name.endswith(COMPANION_SUFFIXES)):
            names.append(f"{name}/")
        else:
            names.append(name)
    return sorted(names)


def _facts(path: Location) -> dict[str, Any]:
    if isinstance(path, BucketPath):
        start, facts = bytes(next(blocks(path), b"")[:1024]), hash_file(path)
    else:
        with opened(path, SourceError) as (fd, _):
            start = os.pread(fd, 1024, 0)
            facts = hash_file(path)
    # A template or a vocabulary may begin with a tag, and a licence or a card be a page.
    is_page = path.suffix == ".json" or (path.suffix in COMPANION_SUFFIXES and _PAGE.match(start))
    if is_page or start.startswith(LFS_POINTER):
        refuse_placeholder(path, start, SourceError)
    return facts


_PAGE = re.compile(rb"\s*<(!doctype html|html)", re.I)


def check_inside(folder: Location, names: "list[str] | Mapping[str, object]") -> None:
    """Checks that no file is a link that leads out of the folder: a checkpoint from elsewhere could name any file of
    this machine. A snapshot in the Hub's cache, `models--*/snapshots/*`, may link to blobs of that cache. What is no
    regular file raises its error when it is read.

    Raises:
        SourceError: a file is such a link.
    """
    if isinstance(folder, BucketPath):
        return  # buckets have no links
    inside = Path(os.path.realpath(folder))
    roots = [inside]
    if inside.parent.name == "snapshots" and inside.parents[1].name.startswith("models--"):
        roots += [inside.parents[1] / "blobs", inside.parents[2] / "blobs"]  # the repository's, and the blobs of all
    for name in names:
        target = Path(os.path.realpath(folder / name))
        if target.is_file() and not any(root in target.parents for root in roots):
            raise SourceError(
                f"{folder / name} is a link out of its folder, to {target}",
                hint="copy the file into the folder, if you trust it",
            )
