"""Child processes import nothing from the current folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.canaries import canaries
from helpers.commands import EXAMPLE
from helpers.tpu_compiler import compiler
from tpuconv.errors import ConfigError
from tpuconv.verify.topology.chips import Slice
from tpuconv.verify.topology.request import INSTALL_FOLDER, CompileRequest, ask

INSTALLED = "import sys; from tpuconv.cli import main; sys.exit(main())"
"""As the installed command begins, which other than `python -m tpuconv` does not see the current folder."""


def run(folder: Path, *args: object, **environment: str) -> str:
    """Runs the command in a folder of canaries."""
    command = [sys.executable, "-P", "-c", INSTALLED, *map(str, args)]
    path = os.pathsep.join([str(INSTALL_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.glob("*.run")) == []
    return done.stdout


def test_quantizing_runs_nothing_of_the_current_folder(converted, tmp_path):
    (ckpt,) = (path for path in converted.iterdir() if path.is_dir())
    canaries(tmp_path)
    run(tmp_path, "quantize", ckpt, "--config", "int8_weight_only", "--explain")
    run(tmp_path, "convert", EXAMPLE, tmp_path / "out", "--quantize", "int8_weight_only", "--dry-run")


@compiler
@pytest.mark.parametrize("also", ["", os.pathsep])
def test_asking_the_compiler_runs_nothing_of_the_current_folder(also, tmp_path, monkeypatch):
    """Nor where PYTHONPATH has an empty entry, which stands for it."""
    config = json.loads((EXAMPLE / "config.json").read_text())
    monkeypatch.chdir(canaries(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(INSTALL_FOLDER) + also)
    quantize = {"name": "x", "summary": "", "rules": [{"weight_qtype": "int8"}], "scale_dtype": None, "gates": {}}
    (answer,) = ask(CompileRequest(config, context=64, quantize=quantize, programs=("decode",)), [[Slice("v5e:1x1")]])
    assert answer.fits
    assert sorted(path.name for path in tmp_path.glob("*.run")) == []


@compiler
def test_the_compiler_is_not_asked_about_rules_that_are_matched_for_ever():
    config = json.loads((EXAMPLE / "config.json").read_text())
    rules = [{"weight_qtype": "int8", "module_path": "(((.+)+)+)+!"}]
    quantize = {"name": "x", "summary": "", "rules": rules, "scale_dtype": None, "gates": {}}
    with pytest.raises(ConfigError, match=r"x, line 1: matching .* takes too long"):
        list(ask(CompileRequest(config, quantize=quantize), [[Slice("v5e:1x1")]]))


TOLD = """
import sys, time
from tpuconv.cli import main
try:
    main()
except SystemExit as e:
    print(e.code, "jax" in sys.modules)
"""


def test_a_rule_that_is_matched_for_ever_is_refused_before_jax_is_imported(converted, tmp_path):
    (ckpt,) = (path for path in converted.iterdir() if path.is_dir())
    config = tmp_path / "redos.yaml"
    config.write_text("qwix: {rules: [{module_path: '(((.+)+)+)+!', weight_qtype: int8}]}")
    for args in (("quantize", ckpt), ("convert", EXAMPLE, tmp_path / "out")):
        option = "--config" if args[0] == "quantize" else "--quantize"
        command = [sys.executable, "-c", TOLD, *map(str, args), option, str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout.split()[-2:] == ["6", "False"], done.stdout + done.stderr
        assert "redos, line 1: matching" in done.stderr
        assert "takes too long" in done.stderr
