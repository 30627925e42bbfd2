"""Cases of families as data, and `pytest --family`."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers.families import CASES, FOLDER, TRAITS, families_of, read
from tpuconv.models.registry import get_family

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: {cases: {plain: {x: 1}, plain: {}}}", "plain is there twice"),
        ("a: {cases: {plain: {rope_parameters: *YARM}}}", "undefined alias 'YARM'"),
        ("a: {case: {plain: {}}}", "unexpected keyword argument 'case'"),
        ("a: {cases: {plain: {}}, no_scan: kinds, repeating: [plane]}", "a has no case plane"),
        ("other: {cases: {plain: {}}}", "other is in another file too"),
    ],
)
def test_a_mistake_in_a_file_is_an_error_that_names_the_file(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text((FOLDER / "shared.yaml").read_text())
    (tmp_path / "a.yaml").write_text(
        "other: {cases: {plain: {norm_eps: 1e-3, rope_parameters: {<<: *YARN, factor: 2.0}}}}"
    )
    (config,) = read(tmp_path)[1]["other"].cases.values()
    assert (config["norm_eps"], config["rope_parameters"]["factor"]) == (0.001, 2.0)
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises((ValueError, yaml.YAMLError), match=error) as raised:
        read(tmp_path)
    assert "b.yaml" in str(raised.value)


def test_a_test_is_about_the_families_among_its_parameters() -> None:
    parameters = {"case": CASES[0], "family": get_family("qwen3"), "name": "glm", "scan": True, "sizes": {}}
    assert families_of(parameters) == {CASES[0].family, "qwen3", "glm"}


def collected(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_models.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_no_family_of_this_name() -> None:
    done = collected("--family", "quen3")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "did you mean qwen3" in done.stderr


@pytest.mark.slow
def test_slow_tests_of_a_family_are_chosen_too_and_no_others() -> None:
    ids = [line for line in collected("--family", "qwen3", "--family", "glm").stdout.splitlines() if "::" in line]
    for name in ("qwen3", "glm"):
        assert all(f"test_logits_of_a_sequence[{name}-{case}-scanned]" in " ".join(ids) for case in TRAITS[name].cases)
    others = [f"[{case}" for case in CASES if case.family not in ("qwen3", "glm")]
    assert not [line for line in ids if any(other in line for other in others)]
