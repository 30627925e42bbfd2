"""Ids of errors: each message that the package raises has one, and is found by it and by its text."""

import ast
import json
import runpy
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.commands import EXAMPLE, tpuconv
from tpuconv import api
from tpuconv.errors import SourceError, TpuconvError, UsageError
from tpuconv.explanations import ANY, EXPLANATIONS_FILE, GAP, Explanation, explanation_of, explanations
from tpuconv.sources.config import read_json
from tpuconv.storage.shared_journal import PartRunning

ROOT = Path(__file__).parent.parent
MAKE = runpy.run_path(str(ROOT / "docs" / "make_errors.py"), run_name="make_errors")
ALL = [*explanations().values()]


def test_ids_and_pages_are_up_to_date():
    """Else run `python docs/make_errors.py`."""
    known = json.loads(EXPLANATIONS_FILE.read_text())
    assert MAKE["numbered"](MAKE["raised"](), known) == known
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "errors").glob("*.md")}
    assert dict(MAKE["pages"]()) == written
    assert len(ALL) > 500


@settings(max_examples=200)
@given(st.sampled_from(ALL), st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_a_message_has_the_id_of_the_wording_that_fits_best(entry: Explanation, value: str):
    message = GAP.sub(lambda gap: value, entry.message)
    assert entry.fits(message)
    error = type(entry.error, (TpuconvError,), {})(message)
    found = explanation_of(error)
    assert found is not None
    assert found.fits(message)
    assert found.precision >= entry.precision


def test_a_plain_message_has_its_own_id():
    found = {
        entry.id: api.explain(f"{entry.error}: {GAP.sub('x', entry.message)}").id for entry in ALL if entry.error != ANY
    }
    assert {id: other for id, other in found.items() if other != id} == {}


def test_what_is_reworded_keeps_its_id_and_what_goes_frees_none():
    Found, numbered = MAKE["Found"], MAKE["numbered"]

    def found(*messages: str) -> list[object]:
        return [Found("SourceError", message, [], [f"{place}: Reads."]) for place, message in enumerate(messages)]

    first = numbered(found("{name} is missing", "{name} is too short"), {"next": 1, "errors": {}})
    assert {id: entry["message"] for id, entry in first["errors"].items()} == {
        "TC0001": "{name} is missing",
        "TC0002": "{name} is too short",
    }
    second = numbered(found("{path} is missing now", "the header ends early"), first)
    assert {id: entry["message"] for id, entry in second["errors"].items()} == {
        "TC0001": "{path} is missing now",
        "TC0003": "the header ends early",
    }
    assert second["next"] == 4


@pytest.mark.parametrize("shown", ["UsageError[TC0226]", "[TC0226]", "UsageError[TC0226]:", "tc226", "226"])
def test_an_id_is_taken_as_messages_begin_with_it(shown):
    assert api.explain(shown).id == "TC0226"


def test_commands_show_the_id_and_explain_it(tmp_path):
    shown = tpuconv("inspect", tmp_path / "nowhere", code=2).stderr
    id = shown.partition("[")[2].partition("]")[0]
    assert shown.startswith(f"UsageError[{id}]: ")
    assert json.loads(tpuconv("inspect", tmp_path / "nowhere", "--json", code=2).stdout)["error"]["id"] == id
    first = shown.splitlines()[0]
    for words in ([id], [id.lower()], [first], first.partition(": ")[2].split()):
        text = tpuconv("explain", *words).stdout
        assert text.startswith(f"{id}: UsageError, exit code 2.")
        assert f"docs/errors/UsageError.md#{id.lower()}" in text
    facts = json.loads(tpuconv("explain", id, "--json").stdout)
    assert (facts["id"], facts["exit_code"], facts["page"]) == (id, 2, f"docs/errors/UsageError.md#{id.lower()}")
    assert "tpuconv." in facts["places"][0]


def test_a_class_that_the_caller_chooses_and_one_that_derives_from_another(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError) as raised:
        read_json(tmp_path / "config.json", SourceError)
    found = explanation_of(raised.value)
    assert found is not None
    assert (found.error, found.exit_code) == (ANY, None)
    assert tpuconv("explain", found.id).stdout.startswith(f"{found.id}: any class. The class says what was read")
    assert Path(found.page.partition("#")[0]).name == "any-class.md"
    found = explanation_of(PartRunning("process 1 of 2 is running already, and writes to out"))
    assert found is not None
    assert (found.error, found.exit_code) == ("OutputError", 9)


MISTYPED = {
    "a command": (("convrt", "x"), "no such command 'convrt'", "did you mean 'convert'?"),
    "an option": (("convert", "x", "--drry-run"), "No such option '--drry-run'", "did you mean --dry-run? Or see"),
    "an option like none": (("convert", "x", "--zzz"), "No such option '--zzz'", "see `tpuconv convert --help`"),
    "a missing argument": (("convert",), "Missing argument 'SRC'", "see `tpuconv convert --help`"),
    "a missing option": (("fit", "x"), "Missing option '--topology'", "A TPU slice such as v5e:4x4. Or see"),
    "a missing value": (
        ("convert", "x", "--jobs"),
        "Wrong arguments: Option '--jobs' requires an argument.",
        "see `tpuconv convert --",
    ),
    "no number": (("convert", "x", "--jobs", "many"), "Invalid value for '--jobs': 'many' is not a valid int", "see"),
    "no choice": (("convert", "x", "--encoding", "k"), "Invalid value for '--encoding': 'k' is not one of", "see"),
    "one argument more": (("push", "a", "b", "c"), "Wrong arguments: Got unexpected extra argument (c)", "see"),
}


@pytest.mark.parametrize("mistake", MISTYPED)
def test_mistyped_arguments_have_an_id(mistake):
    args, message, hint = MISTYPED[mistake]
    error = json.loads(tpuconv(args[0], "--json", *args[1:], code=2).stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"].startswith(message)
    assert error["hint"].startswith(hint)
    assert GAP.sub("", api.explain(error["id"]).message) != ""


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("pointer", [True, False])
def test_a_placeholder_has_an_id_and_advice(name, pointer, tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "src")
    (tmp_path / "src" / name).write_text("version https://git-lfs.github.com/spec/v1\n" if pointer else "<html>")
    shown = tpuconv("convert", "src", "--json", cwd=tmp_path, code=4)
    error = json.loads(shown.stdout)["error"]
    assert name in error["message"]
    assert error["hint"] == (
        "run `git lfs pull`, or give the Hub id"
        if pointer
        else "download it again, logged in: a login or error page was stored in its place"
    )
    assert api.explain(error["id"]).error == ANY


def test_a_message_without_words_is_not_accepted():
    """Such as `SourceError(f"{path} is {what}")`: it would have no id."""
    for message, is_told in (('f"{path} is {what}"', True), ('f"{path} is missing"', False), ("e.message", False)):
        tree = ast.parse(f"def read(path):\n    raise SourceError({message})")
        found: dict[object, object] = {}
        with pytest.raises(SystemExit) if is_told else nullcontext():
            MAKE["Calls"]("tpuconv.errors", tree, {"SourceError": "SourceError"}, found)
        assert len(found) == (message == 'f"{path} is missing"')


def test_what_has_no_explanation():
    assert explanation_of(SourceError("worded by a plugin, not here")) is None
    for text in ("TC9999", "strange"):
        with pytest.raises(UsageError, match=f"no error of tpuconv has the id or the message '{text}'"):
            api.explain(text)
