"""The Python API: its documentation page runs, and it prints nothing."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import jax
import pytest
from flax import nnx

import tpuconv
from tpuconv import api
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.verify import benchmark

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "tiny-qwen3"


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "_best", partial(benchmark._best, repeats=1))  # of a gigabyte
    (tmp_path / "tiny-qwen3").symlink_to(EXAMPLE)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert len(blocks) == 23
    said, names = io.StringIO(), {}
    with redirect_stdout(said):
        for block in blocks:
            exec(compile(block, "docs/api.md", "exec"), names)
    assert said.getvalue().startswith("qwen3 1604800 3209600\n")
    assert sorted(set(os.listdir())) == [
        "tiny-int8", "tiny-orbax", "tiny-qwen3", "tiny-safetensors", "tiny-scanned", "tiny-tuned", "tiny.html",
    ]  # fmt: skip


def test_results_are_shown_in_one_line(tmp_path):
    out, quantized = tmp_path / "out", tmp_path / "int8"
    for shown in (
        api.convert(EXAMPLE, out),
        api.quantize(out, quantized, config="int8_default"),
        *(api.plan(EXAMPLE), api.plan_export(out), api.plan_reshard(out, mesh={"data": 2})),
        *(api.verify(out), api.inspect(out), api.recipe(EXAMPLE), api.propose(EXAMPLE)),
        api.compare_checkpoints(out, quantized, prompts=["Once upon a time"]),
    ):
        assert len(repr(shown)) < 500
        assert "\n" not in repr(shown)
    assert repr(api.verify(out)).startswith(f"Verification(checkpoint='{out}', arrays=57, files=67, bytes=")


def test_packed_values_are_counted_as_devices_hold_them(tmp_path):
    api.convert(EXAMPLE, tmp_path / "out", quantize="int4_weight_only")
    loaded = jax.tree.leaves(nnx.state(tpuconv.load(tmp_path / "out")))
    held = sum(-(-x.size * jax.dtypes.itemsize_bits(x.dtype) // 8) for x in loaded)
    assert api.inspect(tmp_path / "out").bytes == held
    assert api.inspect(tmp_path / "out", mesh={"data": 1}).device_bytes == held


def test_every_name_is_documented():
    page = (ROOT / "docs" / "api.md").read_text()
    functions = [name for name in api.__all__ if not name[0].isupper()]
    assert functions
    assert not [name for name in functions if f"api.{name}(" not in page and f"tpuconv.{name}(" not in page]
    assert all(getattr(api, name).__doc__ for name in api.__all__)


def test_it_prints_nothing_and_reports_progress(tmp_path):
    reports, out, err = [], io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        api.convert(EXAMPLE, tmp_path / "out", progress=reports.append)
        api.verify(tmp_path / "out", progress=reports.append)
    assert (out.getvalue(), err.getvalue()) == ("", "")
    assert [*dict.fromkeys(report.stage for report in reports)] == ["converting", "publishing", "checking"]
    converted = [report for report in reports if report.stage == "converting"][-1]
    assert converted.done == converted.total > 0
    assert reports[-1].done == reports[-1].total > 0


def test_progress_is_drawn_as_a_bar(tmp_path, capfd):
    """One for each stage, with its bytes; `True` stands for `Bar`. stdout stays the caller's."""
    for number, progress in enumerate((True, api.Bar())):
        api.convert(EXAMPLE, tmp_path / str(number), progress=progress)
        shown = capfd.readouterr()
        assert shown.out == ""
        assert "converting: 100%" in shown.err
        assert "3.21M/3.21M" in shown.err
    api.convert(EXAMPLE, tmp_path / "quiet")
    assert capfd.readouterr().err == ""
    api.Bar()(api.Progress("", message="a name with \x1b[2J"))
    assert capfd.readouterr() == ("", "a name with \\x1b[2J\n")


def test_errors_are_ours(tmp_path):
    for call in (
        lambda: api.convert(tmp_path / "none", tmp_path / "out"),
        lambda: api.verify(tmp_path),
        lambda: api.quantize(tmp_path, config="int8_default"),
        lambda: api.export(tmp_path, tmp_path / "out"),
        lambda: api.push(tmp_path, "org/name", dry_run=True),
        lambda: api.plan(EXAMPLE, quantize="int8_default", encoding="keep"),
        lambda: tpuconv.load(tmp_path),
    ):
        with pytest.raises(TpuconvError):
            call()


def test_importing_it_imports_neither_numpy_nor_jax():
    program = "import sys, tpuconv.api, tpuconv.cli; print({'numpy', 'jax', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_arguments_that_would_mean_nothing_are_refused(tmp_path):
    """Each was taken: a gate that is none, an axis over which nothing lies, no devices, layers that a manifest cannot
    say, the letters of a stop string, a source named None of the Hub."""
    out = tmp_path / "out"
    api.convert(EXAMPLE, out)
    generator = api.generator(out)
    for call, message in (
        (lambda: api.compare_checkpoints(out, out, prompts="In the", gates={"top_1": 0.9}), "top_1=0.9 is not a gate"),
        (lambda: api.sensitivity(out, gates={"top1": 2}), "top1=2 is not a gate"),
        (lambda: api.inspect(out, mesh={"rows": 2}), "'rows' is not the name of one axis"),
        (lambda: api.inspect(out, mesh={"tensor": 0}), "cannot have 0 devices"),
        (lambda: api.plan_reshard(out, mesh={"tensor": -1}), "cannot have -1 devices"),
        (lambda: api.plan(EXAMPLE, layers=range(0, 4, 2)), r"layers cannot be range\(0, 4, 2\)"),
        (lambda: api.propose(None), "src cannot be None"),
        (lambda: api.explain(3), "error cannot be 3"),
        (lambda: generator(["In the"], "3"), "max_new_tokens cannot be '3'"),
        (lambda: generator([3], 3), r"prompts cannot be \[3\]"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            call()
        assert error.value.hint
    assert api.inspect(out, mesh={"fsdp": 2}).device_bytes == api.inspect(out, mesh={"data": 2}).device_bytes
    (whole,) = generator(["In the beginning"], 8)
    assert generator(["In the beginning"], 8, stop=whole.text[-1] + "\0") == [whole]


def test_progress_may_be_left_out_by_its_value(tmp_path):
    for name, progress in (("none", None), ("false", False)):
        assert api.convert(EXAMPLE, tmp_path / name, progress=progress).published


@pytest.mark.parametrize("given", [{"dtype": "bf16"}, {"encoding": "kept"}], ids=str)
def test_a_value_that_is_not_known_is_a_mistake(given):
    (name,) = given
    with pytest.raises(UsageError, match=f"{name} cannot be") as error:
        api.plan(EXAMPLE, **given)
    assert "give one of" in error.value.hint
