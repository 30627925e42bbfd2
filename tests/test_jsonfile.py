"""Strict reading of JSON files: each kind of wrong file, text or value is an error that names it."""

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuconv.errors import ConfigError, CorruptOutput
from tpuconv.jsonfile import Each, Exactly, OneOf, Optional, Range, Size, check, parse, read_bytes

# -- bytes ------------------------------------------------------------------------------------------------------------


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


PLACES = {
    "nothing": (lambda p: None, "is missing\n  -> look there"),
    "a dangling link": (lambda p: p.symlink_to("nowhere"), "is missing: it is a link"),
    "a folder": (lambda p: p.mkdir(), "is not a regular file but a folder"),
    "a FIFO": (lambda p: os.mkfifo(p), "is not a regular file but a FIFO"),
    "a socket": (listen, "cannot be read: No such device"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "is not a regular file but a device"),
    "a loop of links": (lambda p: p.symlink_to(p.name), "cannot be read: Too many levels"),
    "too large": (lambda p: p.write_bytes(bytes(101)), "has 101 bytes, the limit is 100"),
    "a Git LFS pointer": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "is a Git LFS"),
    "a web page": (lambda p: p.write_text("\n <!DOCTYPE html>"), "is a web page"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_is_no_file_is_named_and_never_hangs(case, tmp_path):
    make, message = PLACES[case]
    path = tmp_path / "x.json"
    make(path)
    with pytest.raises(ConfigError, match=f"x.json {message}"):
        read_bytes(path, 100, ConfigError, hint="look there")


def test_names_that_no_file_can_have_are_named(tmp_path):
    with pytest.raises(ConfigError, match="File name too long"):
        read_bytes(tmp_path / ("x" * 300), 100, ConfigError)
    with pytest.raises(ConfigError, match="is not a file name"):
        read_bytes(tmp_path / "x\0", 100, ConfigError)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        read_bytes(tmp_path / "file" / "x", 100, ConfigError)
    assert read_bytes(tmp_path / "file", 2, ConfigError) == b"{}"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_file_that_the_system_does_not_give_is_named(code, tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("{}")

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open" if code == errno.EACCES else "fstat", refuse)
        with pytest.raises(ConfigError) as info:
            read_bytes(tmp_path / "x.json", 100, ConfigError)
    assert f"x.json cannot be read: {os.strerror(code)}" in info.value.message


# -- values -----------------------------------------------------------------------------------------------------------

TEXTS = {
    "nonsense": (b"{", "Expecting"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "UTF-16": ("{}".encode("utf-16"), "codec"),
    "UTF-32 with a mark": ("{}".encode("utf-32"), "codec"),
    "UTF-32": ("{}".encode("utf-32-le"), "Expecting"),
    "Latin-1": (b'"\xe9"', "codec"),
    "a key twice": (b'{"a": {"b": 1, "b": 2}}', "the key 'b' appears twice"),
    "deep nesting": (b"[" * 100_000, "nested too deep"),
    "deep nesting of objects": (b'{"a":' * 100_000, "nested too deep"),
    "an endless integer": (b"[1%s]" % (b"0" * 1000), "1001 digits"),
    "half of a pair": (rb'{"\ud800": 1}', "surrogates"),
    "the other half": (rb'["\uDFFF"]', "surrogates"),
    "a control character": (b'["\n"]', "control character"),
    "two values": (b"{} {}", "Extra data"),
    "nothing": (b"", "Expecting value"),
    "a bracket too many": (b"[1]]", "Extra data"),
    "a comment": (b'{"a": 1, // one\n"b": 2}', "Expecting property"),
    "a comment in front": (b"# of a program\n{}", "Expecting value"),
    "a comment behind a value": (b'{"a": 1 /* one */}', "Expecting"),
    "a last comma": (b'{"a": 1,\n}', "Expecting property|Illegal trailing comma"),
    "a last comma of a list": (b"[1, 2, ]", "Expecting value|Illegal trailing comma"),
}
HINTS = {
    **dict.fromkeys(("a byte order mark", "UTF-16", "UTF-32 with a mark"), "save it in UTF-8"),
    **{case: "remove them" for case in TEXTS if "comm" in case},
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_is_ambiguous_is_refused(case):
    data, message = TEXTS[case]
    with pytest.raises(CorruptOutput, match=rf"x\.json is not valid JSON: .*({message})") as info:
        parse(data, "x.json", CorruptOutput)
    assert bool(info.value.hint) == (case in HINTS)
    assert HINTS.get(case, "") in (info.value.hint or "")


def test_values_are_those_of_json():
    data = rb'{"a": [1, -2, 0.5, true, null, "\ud83d\ude00 \\ud800"], "b": NaN}'
    value = parse(data, "x.json", ConfigError)
    assert value["a"] == [1, -2, 0.5, True, None, "\U0001f600 \\ud800"]
    for text in (b"NaN", b"-Infinity", b"[Infinity]", b"1e999"):
        parse(text, "x.json", ConfigError)
        with pytest.raises(ConfigError, match="not a finite number"):
            parse(text, "x.json", ConfigError, constants=False)
    assert type(parse(b"-0", "x.json", ConfigError)) is float


# -- types ------------------------------------------------------------------------------------------------------------

SCHEMA = {
    "format": int,
    "source": {"name": str, "repo": Optional(str | None), "share": Optional(float)},
    "arrays": Each({"shape": [Size], "dtype": OneOf("int8", "bfloat16"), "axes": Optional((str, [int], None))}),
    "mesh": Optional(Exactly({"tensor": Range(1, 8)})),
    "extra": Optional(Any),
}
GOOD = {"format": 1, "source": {"name": "x"}, "arrays": {"embed.kernel": {"shape": [2, 0], "dtype": "int8"}}, "more": 1}

WRONG = [
    ([], "must be an object, not []"),
    ({}, "format must be an integer, and is absent"),
    ({**GOOD, "format": True}, "format must be an integer, not True"),
    ({**GOOD, "format": 1.0}, "format must be an integer, not 1.0"),
    ({**GOOD, "source": {"name": "x", "repo": 1}}, "source.repo must be a text or null, not 1"),
    ({**GOOD, "source": {"name": "x", "share": float("nan")}}, "source.share must be a number, not nan"),
    ({**GOOD, "arrays": {"a.b": {"shape": [1, -1]}}}, "arrays.a.b.shape[1] must be an integer from 0 to"),
    ({**GOOD, "arrays": {"a": {"shape": [], "dtype": "int9"}}}, "arrays.a.dtype must be 'int8' or 'bfloat16'"),
    (
        {**GOOD, "arrays": {"a": {"shape": [], "dtype": "int8", "axes": ["D"]}}},
        "arrays.a.axes[0] must be an integer, not 'D'",
    ),
    (
        {**GOOD, "arrays": {"a": {"shape": [], "dtype": "int8", "axes": 1}}},
        "arrays.a.axes must be a text or a list or null, not 1",
    ),
    ({**GOOD, "mesh": {"tensor": 9}}, "mesh.tensor must be an integer from 1 to 8, not 9"),
    ({**GOOD, "mesh": {"tensor": 8, "x": 0}}, "mesh.x must be absent: the key is unknown, not 0"),
    ({**GOOD, "arrays": {"\x1b[2J": 1}}, r"'arrays.\x1b[2J' must be an object, not 1"),
]


@pytest.mark.parametrize(("value", "message"), WRONG, ids=range(len(WRONG)))
def test_a_value_of_another_type_is_named_with_its_key(value, message):
    with pytest.raises(CorruptOutput) as info:
        check(value, SCHEMA, "x.json", CorruptOutput)
    assert info.value.message.startswith(f"x.json: {message}")


def test_a_value_that_fits_is_given_back():
    assert check(GOOD, SCHEMA, "x.json", CorruptOutput) is GOOD
    assert check({**GOOD, "mesh": {"tensor": 8}, "extra": [{}]}, SCHEMA, "x.json", CorruptOutput)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["int8", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(["shape", "dtype", "name", "tensor"]), inner, max_size=3)
        | st.fixed_dictionaries({}, optional=dict.fromkeys((*SCHEMA, "shape", "dtype", "axes"), inner))
    ),
)


def refusal(of: Callable[..., Any], *args: Any) -> str:
    """The message of the given error; empty where there is none. Any other error is raised."""
    try:
        of(*args, "x.json", CorruptOutput)
    except CorruptOutput as e:
        return e.message
    return ""


@given(VALUES | st.fixed_dictionaries(dict.fromkeys(SCHEMA, VALUES)))
def test_any_value_fits_or_raises_the_error_that_was_given(value):
    message = refusal(check, value, SCHEMA)
    assert not message or message.startswith("x.json: ")
    assert len(message) < 1000


@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_value_or_the_error_that_was_given(data):
    message = refusal(parse, data)
    assert not message or message.startswith("x.json is not valid JSON")
