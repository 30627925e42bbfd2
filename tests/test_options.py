"""Options are described once: from a field come keyword, flag, key of the manifest and documentation."""

import json
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from tpuconv import api
from tpuconv.cli import tpuconv
from tpuconv.commands import options
from tpuconv.commands.flags import with_flags
from tpuconv.convert.export.serving.formats import IN_AWQ, IN_COMPRESSED, IN_FP8, IN_MXFP4
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.types import FLOAT_DTYPES
from tpuconv.errors import UsageError
from tpuconv.location import BucketPath
from tpuconv.models.common.saved import BY_RELEASES, BY_TRANSFORMERS
from tpuconv.models.eagle3.formats import SGLANG, SPECULATORS
from tpuconv.options import (
    DTYPE_CHOICES,
    FORM_CHOICES,
    SCHEME_CHOICES,
    Key,
    argument,
    option,
    options_of,
    takes,
)

ROOT = Path(__file__).parent.parent
COMMANDS = {
    **{"compare_checkpoints": "compare", "sensitivity": "quantize", "generator": "generate", "compare": "verify"},
    **{"weight_map": "families", "compare_server": "verify", "plan_reshard": "reshard"},
}
"""The commands of functions with other names; a plan is an option of the command."""
WITHOUT_COMMAND = ("load", "save", "embedder")
FUNCTIONS = [name for name in api.__all__ if hasattr(getattr(api, name), "request") and name not in WITHOUT_COMMAND]


@dataclass(kw_only=True)
class More(Options):
    """Options of a conversion with one more."""

    least_rows: int = option(2, "Rows.", least=1, manifest=Key())


@dataclass
class Request(More):
    src: str = field(metadata=argument("A source."))


@takes(Request)
def work(asked: Request) -> dict:
    """Works.

    Raises:
        UsageError: never.
    """
    return asked.to_json()


def test_a_field_is_a_keyword_a_flag_a_key_of_the_manifest_and_a_line_of_the_documentation():
    assert work("x", least_rows=5) == {**work("x"), "least_rows": 5}
    assert "least_rows" not in work("x")
    assert "    least_rows: Rows.\n\nRaises:\n    UsageError" in work.__doc__
    assert "| `least_rows` | `2` | Rows. |" in runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["_arguments"](work)
    command = click.command()(options.of(work)(lambda **given: click.echo(given["least_rows"])))
    assert "--least-rows INTEGER RANGE" in (said := CliRunner().invoke(command, ["--help"]).output)
    assert "Rows.  [default: 2; x>=1]" in said
    assert CliRunner().invoke(command, ["--least-rows", "7"]).output == "7\n"
    with pytest.raises(UsageError, match="least_rows cannot be 0"):
        work("x", least_rows=0)


@dataclass
class Several:
    adapter: Sequence[str] = field(default=(), metadata=argument("Adapters."))


@takes(Several)
def given_to(asked: Several) -> Sequence[str]:
    """Returns them."""
    return asked.adapter


def test_a_single_value_is_no_sequence_of_characters():
    assert given_to(adapter="ab") == given_to(adapter=Path("ab")) == ("ab",)
    assert given_to(adapter=["a", "b"]) == given_to(adapter=iter("ab")) == ("a", "b")


@dataclass(kw_only=True)
class Kinds:
    place: str | Path | BucketPath = field(metadata=argument("A place."))
    count: int | None = option(None, "A count.", least=1)
    share: float = option(0.5, "A share.")
    is_on: bool = option(False, "A switch.")
    name: str = option("x", "A name.", choices=("x", "y"))
    counts: Sequence[int] = option((1,), "Counts.", least=1)
    sizes: Mapping[str, int] | None = option(None, 'Sizes, such as {"a": 1}.')
    layers: range | None = option(None, "Layers.")
    when: Callable[[], None] = option(print, "A function.")
    mesh: "Mesh | None" = option(None, "A mesh.")  # noqa: F821
    dtype: "DTypeLike | None" = option(None, "A dtype.")  # noqa: F821
    adapter: "Sequence[str | Adapter]" = option((), "Adapters.")  # noqa: F821


@takes(Kinds)
def kinds(asked: Kinds) -> dict:
    """Returns them."""
    return vars(asked)


class Folder:
    def __fspath__(self) -> str:
        return "folder"


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("place", Folder(), "folder"),
        ("place", np.str_("x"), "x"),
        ("place", "~/x", "/home/me/x"),
        ("place", Path("~/x"), Path("/home/me/x")),
        ("place", "./~/x", "./~/x"),
        ("place", "~x", "~x"),
        ("place", BucketPath("gs", "b"), BucketPath("gs", "b")),
        ("count", np.int64(2), 2),
        ("count", 8e9, 8_000_000_000),
        ("share", np.float32(0.25), 0.25),
        ("share", 1, 1),
        ("is_on", np.True_, True),
        ("is_on", 1, True),
        ("counts", np.arange(1, 3), (1, 2)),
        ("counts", 4, (4,)),
        ("sizes", {"a": np.int64(2)}, {"a": 2}),
        ("dtype", np.float32, np.float32),
        ("adapter", [Path("a"), "b"], ("a", "b")),
    ],
)
def test_values_become_those_of_the_declared_type(name, given, taken, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    found = kinds(**({"place": "x"} | {name: given}))[name]
    assert found == taken
    assert type(found) is type(taken)


def test_a_folder_that_is_named_like_the_home_folder_is_there_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    assert kinds(place="~/x")["place"] == "~/x"


@pytest.mark.parametrize(
    ("name", "given", "hint"),
    [
        *(
            ("place", wrong, "a path: a text or a pathlib.Path")
            for wrong in (b"x", None, 3, ["x"], "", "a\0b", "a" * 300, "\ud800")
        ),
        *(("count", wrong, "a whole number, or leave it out") for wrong in ("2", 2.5, True, [2])),
        *(("share", wrong, "a number, or leave it out") for wrong in ("1", float("nan"), float("inf"), None)),
        *(("is_on", wrong, "True or False, or leave it out") for wrong in ("no", None, 2, np.zeros(2))),
        *(("name", wrong, "one of x, y, or leave it out") for wrong in (np.dtype("float32"), None)),
        *(("counts", wrong, "a list of whole numbers, or leave it out") for wrong in ("12", [1, "2"], b"1", {1: 2})),
        *(("sizes", wrong, "a dict, or leave it out") for wrong in ("a=1", {"a": "1"}, {1: 1}, [("a", 1)])),
        *(("layers", wrong, "a range, such as range(2), or leave it out") for wrong in (2, [0, 1], "0-1")),
        *(("when", wrong, "a function, or leave it out") for wrong in ("x", None)),
        *(("mesh", wrong, "a Mesh, or leave it out") for wrong in ({"tensor": 2}, (2, 4))),
        *(("adapter", wrong, "a list of texts, or leave it out") for wrong in (3, None, b"x")),
    ],
)
def test_a_value_of_another_type_is_a_mistake(name, given, hint):
    with pytest.raises(UsageError, match=f"^{name} cannot be ") as error:
        kinds(**({"place": "x"} | {name: given}))
    assert error.value.hint == f"give {hint}"
    assert "\n" not in error.value.message
    assert error.value.details


def test_bounds_hold_for_each_of_several_values():
    for given, message in (((4, 0), "counts cannot be 0"), ((), "counts cannot be empty")):
        with pytest.raises(UsageError, match=message):
            kinds(place="x", counts=given)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_of_a_function_is_an_option_of_its_command(name):
    command = tpuconv.command_of(
        COMMANDS.get(
            name, {"plan": "convert"}.get(name, name.removeprefix("plan_")).replace("quantization", "quantize")
        )
    )
    flags = {param.name for param in command.params}
    assert {each.name for each, known in options_of(getattr(api, name).request) if known.is_flag} <= flags


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.convert("x", dtyp="auto"), r"convert\(\) got an unexpected .*'dtyp'\. Did you mean 'dtype'\?"),
        (lambda: api.convert(), r"convert\(\) missing a required argument: 'src'"),
        (lambda: api.export("x"), r"export\(\) missing a required argument: 'out'"),
        (lambda: api.convert("x", "y", "z"), r"convert\(\) too many positional arguments"),
    ],
)
def test_a_wrong_call_is_a_type_error_that_names_the_function(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_choices_are_those_of_the_rooms_that_read_them():
    assert FORM_CHOICES == (BY_RELEASES, BY_TRANSFORMERS, SPECULATORS, SGLANG)
    assert set(SCHEME_CHOICES) == {IN_COMPRESSED, IN_FP8, IN_AWQ, IN_MXFP4}
    assert set(DTYPE_CHOICES) - {"auto"} <= set(FLOAT_DTYPES)


def test_commands_show_reasons_with_flags(capsys):
    command = ["convert", str(ROOT / "examples" / "tiny-qwen3"), "--layers", "0-0", "--dry-run"]
    tpuconv.main([*command, "--json"], standalone_mode=False)
    assert {skip["reason"] for skip in json.loads(capsys.readouterr().out)["skipped"]} == {"outside --layers 0-0"}
    tpuconv.main(command, standalone_mode=False)
    assert "outside --layers 0-0" in capsys.readouterr().out


def test_the_manifest_has_the_keys_that_it_had():
    plain = {"dtype": "auto", "scan_layers": False, "layers": None, "include_mtp": False, "encoding": "dequantize"}
    assert Options().to_json() == plain
    asked: Sequence[str] = ["b", "a", "b"]
    given = Options(layers=range(1, 3), compress=True, allow_config=asked, target="maxtext", scheme="awq", adapter=[])
    more = {"compress": True, "allow_config": ["a", "b"], "target": "maxtext", "scheme": "awq"}
    assert given.to_json() == {**plain, "layers": [1, 2], **more}


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("leave `mesh=` out", "leave --mesh out"),
        ('give `encoding="keep"`', "give --encoding keep"),
        ("give `overwrite=True`", "give --overwrite"),
        ('give `allow_config=["a", "b"]`', "give --allow-config a --allow-config b"),
        ('`gates={"top1": 0.99}`', "--gate top1=0.99"),
        ("give `config=SRC`", "give --config SRC"),
        ("leave out `part=`", "leave out --process-count, --distributed and --ray"),
        ("`tpuconv verify --update`", "`tpuconv verify --update`"),
        ("a config with `calibration`", "a config with `calibration`"),
    ],
)  # fmt: skip
def test_commands_show_options_as_flags(text, flags):
    assert with_flags(text) == flags
