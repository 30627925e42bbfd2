"""Patterns from files: an invalid or slow one is an error within a second."""

import subprocess
import sys
import time

import pytest

from helpers.canaries import canaries
from helpers.times import HANG, ProcessorTime
from tpuconv import patterns
from tpuconv.errors import ConfigError
from tpuconv.patterns import check_patterns

NAMES = ["", *(f"model.layers.{i}.self_attn.q_proj" for i in range(50))]

WRONG = {
    "none": ("(", "is not a regular expression: error: missing \\)"),
    "a repetition in a repetition": ("([a-z.0-9_]+)+Z", "takes too long"),
    "many repetitions": ("(.*)*(.*)*(.*)*Z", "takes too long"),
    "choices that are alike": ("(?:a|e|.|.)*Z", "takes too long"),
    "one name alone": (r"model\.layers\.37.*(?:.*.*)*Z", "takes too long"),
    "too long": ("a" * 5000, "a pattern of 5000 characters"),
    "deep": ("(" * 2000 + ")" * 2000, "is not a regular expression: RecursionError"),
    "a count that is too large": ("a{99999999999}", "is not a regular expression: OverflowError"),
    "what takes too long to compile": ("(?i)" + "[\0-\U0010ffff]" * 800, "takes too long"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_pattern_that_cannot_be_used_is_named_with_its_place(case):
    pattern, message = WRONG[case]
    with ProcessorTime(children=True) as usual:
        check_patterns([("x", "model.*")], NAMES, ConfigError)
    with ProcessorTime(children=True) as taken, pytest.raises(ConfigError, match=f"^the file, line 3: .*{message}"):
        check_patterns([("the file, line 2", "model.*"), ("the file, line 3", pattern)], NAMES, ConfigError)
    assert taken.seconds < usual.seconds + 2 * patterns.SECONDS  # what the child may take, and twice that


def test_patterns_that_are_used_pass():
    good = [("x", pattern) for pattern in (".*", r"model\.layers\.(1|2)\..*", "", r"(?!)", "lm_head|embed", "é.*")]
    check_patterns(good, NAMES, ConfigError)
    check_patterns(good, [], ConfigError, method="match")
    check_patterns([], NAMES, ConfigError)
    check_patterns(
        [("x", ".*self_attn.*"), ("x", r".*mlp\.(gate|up|down)_proj.*")],
        (f"model.layers.{i}.mlp.experts.{j}.gate_proj" for i in range(60) for j in range(384)),
        ConfigError,
        method="match",
    )


def test_a_child_that_gets_no_processor_is_given_up(monkeypatch):
    monkeypatch.setattr(patterns, "WALL_SECONDS", 0.5)
    monkeypatch.setattr(patterns, "_CHILD", "print(0, flush=True); import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^x: 'a' could not be tested .* too little processor time") as caught:
        check_patterns([("x", "a")], NAMES, ConfigError)
    assert "again" in caught.value.hint
    assert time.monotonic() - began < HANG / 2


def test_the_child_runs_no_code_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(canaries(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    check_patterns([("x", ".*")], NAMES, ConfigError)
    assert not list(tmp_path.glob("*.run"))
    subprocess.run([sys.executable, "-c", "import json"], check=False, capture_output=True)
    assert list(tmp_path.glob("*.run"))  # the canaries sing
