"""The types of arguments and options: a value that cannot be right is refused before the command runs."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tpuconv.location import BucketPath, local_path, path_problem, to_location
from tpuconv.names import MANIFEST
from tpuconv.text import has_surrogates


class ByteSize(click.ParamType[int]):
    """Bytes: 8GB, 500MB, 16GiB."""

    name = "size"
    units: Mapping[str, int] = {
        "": 1,
        "k": 10**3,
        "m": 10**6,
        "g": 10**9,
        "t": 10**12,
        "ki": 2**10,
        "mi": 2**20,
        "gi": 2**30,
        "ti": 2**40,
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower().removesuffix("b")
        number = text.rstrip("kmgti")
        try:
            size = int(float(number) * self.units[text[len(number) :]])
        except (KeyError, ValueError, OverflowError):
            size = 0
        if size < 1:
            self.fail(f"'{value}' is not a size; write 8GB or 500MB", param, ctx)
        return size


class Layers(click.ParamType[range]):
    """A range of layers, first and last: 0-3."""

    name = "A-B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        first, dash, last = str(value).partition("-")
        low, high = _integer(first), _integer(last if dash else first)
        if low is None or high is None or high < low:
            self.fail(f"'{shortened(value)}' is not a range of layers; write 0-3", param, ctx)
        return range(low, high + 1)


class Numbers(click.ParamType[tuple[int, ...]]):
    """Positive integers up to `most`: 1,8,64."""

    name = "N,..."

    def __init__(self, most: int):
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = [number for part in str(value).split(",") if (number := _integer(part.strip()))]
        if len(numbers) != str(value).count(",") + 1:
            self.fail(f"'{shortened(value)}' is not a list of positive integers; write 1,8", param, ctx)
        if max(numbers) > self.most:
            self.fail(f"{max(numbers)} is more than {self.most}", param, ctx)
        return tuple(numbers)


class Number(click.FloatRange):
    """A finite number in a range. NaN is neither below nor above a bound, so that click's own range accepts it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return float(number)


class File(click.Path):
    """The path of a local file or folder, which need not exist unless `exists` is given."""

    def __init__(self, **kwargs: Any):
        super().__init__(path_type=Path, **kwargs)

    def convert(self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None) -> Any:
        local_path(os.fspath(value))
        if fault := _path_fault(value):
            self.fail(fault, param, ctx)
        return super().convert(value, param, ctx)


class LocationParam(File):
    """A local path, or the URL of a folder in a bucket."""

    def convert(self, value: "str | os.PathLike[str]", param: click.Parameter | None, ctx: click.Context | None) -> Any:
        location = to_location(value if isinstance(value, BucketPath) else os.fspath(value))
        return location if isinstance(location, BucketPath) else super().convert(value, param, ctx)


class Name(click.ParamType[str]):
    """A path, a Hub id or the address of its page, or the name of a config or target."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if fault := _path_fault(value):
            self.fail(fault, param, ctx)
        return id_of_page(str(value))


class KnownName(Name):
    """A name that a shell completes: of a config, a target or a family. Configs may be files too.

    Args:
        names: returns the known names; called only to complete.
        or_file: complete the names of files where no name begins so.
    """

    def __init__(self, names: Callable[[], Iterable[str]], *, or_file: bool = False):
        self.names, self.or_file = names, or_file

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if self.or_file else [])


def known_configs() -> Iterable[str]:
    """Returns the names of the quantization configs of the package."""
    from tpuconv.quantize.config import config_names

    return config_names()


def known_targets() -> Iterable[str]:
    """Returns the names of all targets."""
    from tpuconv.targets.registry import target_names

    return target_names()


def known_families() -> Iterable[str]:
    """Returns the names of all families and of multimodal models."""
    from tpuconv.models.registry import family_names
    from tpuconv.models.wrappers import WRAPPERS

    return [*family_names(), *WRAPPERS]


def known_checkpoints(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the path of a checkpoint or an export of tpuconv; folders where none begins so."""
    folder, begun = os.path.split(incomplete)
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        names = []
    paths = [os.path.join(folder, name) for name in names if name.startswith(begun)]
    found = [CompletionItem(path) for path in paths if os.path.isfile(os.path.join(path, MANIFEST))]
    return found or [CompletionItem(incomplete, type="dir")]


class RayAddress(click.ParamType[str]):
    """The address of a Ray cluster."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"auto|(ray://)?[\w.\[\]:-]+:\d+", str(value)):
            self.fail(
                f"'{shortened(value)}' is no address of a cluster; write HOST:PORT, or --ray behind the arguments",
                param,
                ctx,
            )
        return str(value)


class Prompt(click.ParamType[str]):
    """Text for a model."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:  # bytes that the locale's encoding does not have stand in an argument as surrogates
            return os.fsencode(value).decode() if has_surrogates(value) else str(value)
        except UnicodeError:
            self.fail(f"'{shortened(value)}' is not text in UTF-8", param, ctx)


def id_of_page(text: str) -> str:
    """Returns the id of a model whose page on the Hub is at this address; other texts as they are."""
    hub = re.escape(os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/"))
    found = re.fullmatch(rf"(?:hf:/|{hub}|https://huggingface\.co)/([\w.-]+/[\w.-]+?)(?:/tree/main)?/?", text)
    return found[1] if found else text


def shortened(value: object) -> str:
    """Returns an argument in the form in which messages show it."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:60]}... ({len(text):,} characters)"


def _integer(text: str) -> int | None:
    """Parses an integer. Returns None if the text is not one, or has so many digits that it is a mistake."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _path_fault(value: "str | os.PathLike[str]") -> str | None:
    """Returns what is wrong with a path that no file can have; None if one can have it."""
    problem = path_problem(value)
    return problem and f"'{shortened(value)}' cannot be a path: {problem}"
