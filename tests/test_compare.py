"""Two checkpoints compared: logits on prompts and in windows of a text, the cache, and parameters."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.commands import EXAMPLE
from helpers.conversions import Options, convert
from helpers.quantizing import ONE_OF_EACH, quantize
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import GateError, UsageError
from tpuconv.models.logits import log_softmax
from tpuconv.quantize.config import find_config, gate_from_text
from tpuconv.quantize.report import report
from tpuconv.verify.logits import model_logits
from tpuconv.verify.pairs import tensor_differences
from tpuconv.verify.weights.trees import layer_weights
from tpuconv.verify.windows import scored_logits, windows

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"


@pytest.mark.parametrize(("tokens", "length", "stride"), [(2, 2, 1), (10, 4, 3), (10, 4, 1), (11, 4, 2), (5, 9, 4)])
def test_each_token_is_predicted_once_from_as_much_as_a_window_holds(tokens, length, stride):
    found = windows(list(range(tokens)), length, stride)
    predicted = [token for window in found for token in window.scored[1:]]
    assert predicted == list(range(1, tokens))
    for window in found[1:]:
        assert window.first + 1 >= length - stride
        assert len(window.ids) <= length
    logits = [np.array(window.ids)[:, None] for window in found]  # of each token its own number
    assert np.concatenate(list(scored_logits(found, logits)))[:, 0].tolist() == list(range(tokens - 1))


@given(st.integers(2, 60), st.integers(4, 20), st.data())
def test_each_window_begins_with_what_the_tokenizer_puts_before_a_text(tokens, length, data):
    """The first token of the text is predicted too, from that."""
    begin = [-1] * data.draw(st.integers(1, 2))
    stride = data.draw(st.integers(1, length - len(begin)))
    found = windows(list(range(tokens)), length, stride, begin)
    assert all(list(window.ids[: len(begin)]) == begin and len(window.ids) <= length for window in found)
    assert [i for window in found for i in window.scored[1:]] == list(range(tokens))


def test_windows_that_cannot_be():
    with pytest.raises(UsageError, match="stride of 4 does not fit windows of 4"):
        windows([1, 2, 3], 4, 4)
    with pytest.raises(UsageError, match="shorter than two tokens"):
        windows([1], 4, 2)


@pytest.fixture(scope="module")
def example(converted: Path) -> Path:
    (folder,) = (path for path in converted.iterdir() if path.is_dir() and (path / "tpuconv.json").exists())
    return folder


def test_perplexity_and_kl_are_those_of_the_definition(example, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "int4"
    quantize(example, out, find_config("int4_weight_only"))
    found = api.compare_checkpoints(example, out, text=tmp_path / "text.txt", length=32, stride=20, dtype="float32")
    from tpuconv.models.tokenizer import load_tokenizer

    ids = load_tokenizer(example)(TEXT)["input_ids"]
    nll = {example: [], out: []}
    kl = []
    done = 1
    parts = [ids[start : start + 32] for start in range(0, len(ids), 20)]
    both = zip(*(model_logits(path, parts, "float32") for path in (example, out)), strict=True)
    for start, part, logits in zip(range(0, len(ids), 20), parts, both, strict=True):
        p, q = map(log_softmax, logits)
        for at in range(done - 1 - start, len(part) - 1):
            nll[example].append(-p[at, part[at + 1]])
            nll[out].append(-q[at, part[at + 1]])
            kl.append((np.exp(p[at]) * (p[at] - q[at])).sum())
        done = start + len(part)
        if done == len(ids):
            break
    result = found.statistics
    assert result.tokens == len(kl) == len(ids) - 1
    assert result.mean_kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert result.perplexity_reference == pytest.approx(np.exp(np.mean(nll[example])), rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(np.mean(nll[out])), rel=1e-5)
    assert read_manifest(out).quantization["gates"] is None
    assert found.passed
    assert result.gates == {"mean_kl": 2 * result.rounding_kl}
    again = api.compare_checkpoints(example, out, text=tmp_path / "text.txt", length=32, stride=20, gates={"top1": 0.1})
    assert again.statistics.rounding_kl is None
    # the same ratios as in the report of the quantization
    snr = {row.name: row.snr_db for row in report(read_manifest(out).raw).rows}
    for tensor in found.tensors:
        if tensor.name in snr:
            assert tensor.snr_db == pytest.approx(snr[tensor.name], abs=1e-3)
        else:
            assert tensor.largest == 0
    assert {tensor.name for tensor in found.tensors} == set(read_manifest(example).arrays)


@pytest.mark.parametrize("side", ["release", "maxtext", "export", "quantized export"])
def test_models_that_are_not_stored_under_our_names(side, example, tmp_path):
    """Releases, exports and checkpoints for other programs are compared as they are loaded."""
    release, out = EXAMPLE, tmp_path / "out"
    if side == "maxtext":
        api.convert(release, out, target="maxtext", scan_layers=True)
    elif side == "export":
        api.export(example, out)
    elif side == "quantized export":
        api.convert(release, out, target="huggingface", quantize="int8_weight_only")
    found = api.compare_checkpoints(example, release if side == "release" else out, prompts=[TEXT])
    again = api.compare_checkpoints(release if side == "release" else out, example, prompts=[TEXT])
    assert {tensor.name for tensor in found.tensors} == set(read_manifest(example).arrays)
    if side == "quantized export":
        assert found.passed is again.passed is None  # no gate tells how much eight bits may change
        assert 0 < found.statistics.mean_kl < 0.01
        assert 20 < found.tensors[0].snr_db < 60
    else:
        assert found.passed
        assert again.passed
        assert found.statistics.max_abs_difference == again.statistics.max_abs_difference == 0
        assert all(tensor.largest == 0 for tensor in [*found.tensors, *again.tensors])


@pytest.mark.slow
def test_a_checkpoint_is_equal_to_itself_and_a_cache_is_not(example):
    same = api.compare_checkpoints(example, example, prompts=[TEXT])
    assert same.passed
    assert same.statistics.max_abs_difference == same.statistics.mean_kl == 0
    kl = {
        dtype: api.compare_checkpoints(example, example, prompts=[TEXT], cache_dtype=dtype, dtype="float32")
        for dtype in ("int8", "float8_e4m3fn")
    }
    assert 0 < kl["int8"].statistics.mean_kl < kl["float8_e4m3fn"].statistics.mean_kl < 0.1
    assert kl["int8"].passed is None
    found = api.compare_checkpoints(example, example, prompts=[TEXT], cache_dtype="int8", gates={"mean_kl": 0.0})
    with pytest.raises(GateError, match="computes other outputs than"):
        found.check()


@pytest.mark.slow
def test_stacked_layers_and_passthrough_are_read_alike(hf, orbax, tmp_path):
    case = ONE_OF_EACH["qwen3"]
    convert(hf(case, "bfloat16"), tmp_path / "scan", Options(scan_layers=True))
    quantize(orbax(case, "bfloat16"), tmp_path / "a", find_config("int4_weight_only"))
    quantize(tmp_path / "scan", tmp_path / "b", find_config("int4_weight_only"))
    plain, scan, a, b = map(read_manifest, (orbax(case, "bfloat16"), *(tmp_path / name for name in ("scan", "a", "b"))))
    assert all(each.largest == 0 for each in tensor_differences(layer_weights(plain), layer_weights(scan)))
    assert all(each.largest == 0 for each in tensor_differences(layer_weights(a), layer_weights(b)))
    found = {each.name: each for each in tensor_differences(layer_weights(scan), layer_weights(a))}
    assert found == {each.name: each for each in tensor_differences(layer_weights(plain), layer_weights(b))}
    assert min(each.snr_db for each in found.values()) < 30


def test_what_cannot_be_compared_is_said_before_a_weight_is_read(example, orbax, tmp_path):
    with pytest.raises(UsageError, match="the models have different shapes: embed"):
        api.compare_checkpoints(example, orbax(ONE_OF_EACH["qwen3"], "bfloat16"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="no text file"):
        api.compare_checkpoints(example, example, text=tmp_path / "binary.txt")
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UsageError, match="a window has 100000 tokens"):
        api.compare_checkpoints(example, example, text=tmp_path / "text.txt", length=100_000)


@pytest.mark.parametrize("text", ["top1", "top1=2", "kl=0.1", "top1=x", "mean_kl=nan", "mean_kl=-1"])
def test_a_gate_that_cannot_be_is_an_error(text):
    with pytest.raises(UsageError, match="is not a gate"):
        gate_from_text(text)


@pytest.mark.slow
def test_the_command(example, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tpuconv", "compare", example, example, *args]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    done = run("--text", tmp_path / "text.txt", "--length", 32, "--cache-dtype", "int8", "--json", "--gate", "top1=0.5")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["passed"] is True
    assert (facts["text"], facts["length"], facts["stride"], facts["cache_dtype"]) == ("text.txt", 32, 16, "int8")
    assert set(facts["perplexity"]) == {"reference", "checkpoint"}
    done = run("--cache-dtype", "int8", "--gate", "mean_kl=0")
    assert done.returncode == 3
    assert "perplexity" in done.stdout
    assert run("--length", 8).returncode == 2
