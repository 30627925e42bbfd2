"""Calibrated quantization: GPTQ against its definition, every kind of product, and runs that are interrupted."""

import gc
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.attacks.processes import halted_after, started
from helpers.attacks.simulated import contents
from helpers.buckets import ROOT, in_memory, objects
from helpers.calibrations import DATA, INNER, INT4, MSE, config, same_arrays
from helpers.checkpoints import qwen3_config, random_checkpoint
from helpers.conversions import Options, convert, restore, same_bits
from helpers.families import CASES, is_inseparable
from helpers.quantizing import ONE_OF_EACH, interrupted, quantize
from helpers.times import wait_for
from tpuconv import api
from tpuconv.api.calibration import CalibrationText
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.commands.convert import show_plan
from tpuconv.commands.flags import with_flags
from tpuconv.errors import ConfigError, CorruptOutput, GateError, ResourceError, SourceError, UsageError
from tpuconv.models.logits import forward
from tpuconv.models.registry import get_family
from tpuconv.models.tokenizer import load_tokenizer
from tpuconv.private import qarray
from tpuconv.quantize.calibrate import gptq, scaled, smoothing, triangular
from tpuconv.quantize.calibrate import run as calibrate
from tpuconv.quantize.calibrate import stage as calibrate_stage
from tpuconv.quantize.calibrate.data import EXAMPLE_LINE, from_ids, from_prompts, from_text
from tpuconv.quantize.calibrate.descent import descended
from tpuconv.quantize.calibrate.layers import LayerRunner
from tpuconv.quantize.calibrate.memory import calibration_memory
from tpuconv.quantize.config import QuantConfig
from tpuconv.quantize.encode import BF16, QwixEncoder
from tpuconv.quantize.recipe.layerwise import LayerwiseProbe
from tpuconv.quantize.rules import resolve_rules
from tpuconv.sources.shard import read_digest
from tpuconv.storage.bucket_journal import BucketJournal

EXAMPLE = Path(__file__).parent.parent / "examples"

# -- the method -------------------------------------------------------------------------------------------------------


def of_the_paper(w_IO, hessian, group: int, damping: float, order) -> np.ndarray:
    """GPTQ as arXiv:2210.17323 has it, one input after the other and without blocks, with scales that are fixed before:
    the rounded weights of a Dense in int4."""
    scale_IO = np.repeat(np.abs(w_IO.reshape(-1, group, w_IO.shape[1])).max(1) / 7.5, group, 0)
    w_IO, scale_IO = w_IO[order].copy(), scale_IO[order]
    damped = hessian[np.ix_(order, order)] + damping * np.diag(hessian).mean() * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    rounded = np.zeros_like(w_IO)
    for i in range(len(w_IO)):
        rounded[i] = np.clip(np.rint(w_IO[i] / scale_IO[i]), -8, 7) * scale_IO[i]
        error = (w_IO[i] - rounded[i]) / upper[i, i]
        w_IO[i:] -= np.outer(upper[i, i:], error)
    out = np.empty_like(rounded)
    out[order] = rounded
    return out


def rounded_in(dtype, w_IO, hessian, scale, group: int, act_order: bool) -> np.ndarray:
    w_IO, hessian, scale = (array.astype(dtype) for array in (w_IO, hessian, scale))
    scales = gptq.KernelScales(scale, np.zeros_like(scale), np.arange(len(w_IO)) // group)
    grid = gptq.Grid.of("int4")
    order = gptq.input_order(np.diag(hessian), act_order)
    chosen = gptq.adjusted(w_IO, gptq.factorize(hessian, 0.01, order), scales, grid)
    return scales.weights(grid.values[chosen])


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_is_that_of_the_paper(act_order):
    rng = np.random.default_rng(1)
    inputs, outputs, group = 288, 24, 32  # more inputs than two blocks
    x_TI = rng.normal(size=(700, inputs)) @ rng.normal(size=(inputs, inputs)) / 16
    w_IO = rng.normal(size=(inputs, outputs))
    hessian = x_TI.T @ x_TI
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(inputs)
    want = of_the_paper(w_IO, hessian, group, 0.01, order)
    scale = np.abs(w_IO.reshape(-1, group, outputs)).max(1) / 7.5
    ours, narrow = (rounded_in(dtype, w_IO, hessian, scale, group, act_order) for dtype in (np.float64, np.float32))
    assert np.abs(ours - want).max() < 1e-6
    error, narrow_error = (np.square(x_TI @ (rounded - w_IO)).sum(0) for rounded in (ours, narrow))
    assert np.allclose(gptq.output_errors(hessian, ours - w_IO), error)
    same_O = (np.abs(narrow - ours) < 1e-6).all(0)
    assert same_O.mean() > 0.8  # in others a weight is in the middle of two values, and float32 rounds it to the other
    assert narrow_error.sum() == pytest.approx(error.sum(), rel=5e-3)
    nearest = np.clip(np.rint(w_IO / scale.repeat(group, 0)), -8, 7) * scale.repeat(group, 0)
    assert error.sum() < 0.6 * np.square(x_TI @ (nearest - w_IO)).sum()


@pytest.mark.parametrize("bad", ["zeros", "nan", "one token"])
def test_a_hessian_without_an_inverse(bad):
    """Zeros and NaN have none; that of one token gets one by the damping."""
    x_TI = np.random.default_rng(0).normal(size=(1, 16)).astype(np.float32)
    hessian = {"zeros": np.zeros((16, 16)), "nan": np.full((16, 16), np.nan), "one token": x_TI.T @ x_TI}[bad]
    if bad == "one token":
        factor = gptq.factorize(hessian.astype(np.float32), 0.01, np.arange(16))
        assert np.isfinite(factor.upper).all()
    else:
        with pytest.raises(gptq.SingularHessian):
            gptq.factorize(hessian.astype(np.float32), 0.01, np.arange(16))


@pytest.mark.parametrize("qtype", ["int4", "int8", "nf4", "float4_e2m1fn"])
@pytest.mark.parametrize("fits_scales", [True, False])
def test_descent_never_raises_the_error_of_an_output(qtype, fits_scales):
    """And scales that GPTQ chooses have a smaller error than Qwix's."""
    grid = gptq.Grid.of(qtype)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        inputs, outputs, group = 288, 20, 24
        x_TI = (rng.normal(size=(500, inputs)) @ rng.normal(size=(inputs, inputs)) / 16).astype(np.float32)
        w_IO = (rng.normal(size=(inputs, outputs)) * rng.uniform(0.1, 3, inputs)[:, None]).astype(np.float32)
        hessian, rows = x_TI.T @ x_TI, np.arange(inputs) // group
        largest = np.abs(w_IO.reshape(-1, group, outputs)).max(1)
        scale = (largest / grid.values.max()).astype(BF16).astype(np.float32)
        scales = gptq.KernelScales(scale, np.zeros_like(scale), rows)
        factor = gptq.factorize(hessian, 0.01, gptq.input_order(np.diag(hessian), True, rows))
        plain = gptq.Rounded(gptq.adjusted(w_IO, factor, scales, grid), scales)
        errors = gptq.output_errors(hessian, plain.weights(grid) - w_IO)
        start, dtype = plain, BF16 if fits_scales else None
        if fits_scales:
            tried = np.linspace(0.5, 1.1, 25, dtype=np.float32) / grid.values.max()
            start = gptq.fitted(w_IO, factor, scales, grid, tried, BF16)
        begun = gptq.output_errors(hessian, start.weights(grid) - w_IO)
        assert begun.sum() < errors.sum() or not fits_scales
        now, after = descended(w_IO, hessian, start, grid, factor.order, 2, dtype)
        assert (after <= begun * (1 + 1e-4)).all()
        assert after.sum() < 0.99 * begun.sum()
        assert np.allclose(after, gptq.output_errors(hessian, now.weights(grid) - w_IO), rtol=1e-3)
        assert (now.scales.scale != scale).any() == fits_scales
        assert same_bits(now.scales.scale.astype(BF16).astype(np.float32), now.scales.scale)


@pytest.mark.parametrize("scan", [False, True])
def test_scales_that_gptq_chose_are_stored(scan, hf, tmp_path):
    """The recorded error is smaller than without descent, and an interrupted run ends in the same bits."""
    convert(hf(ONE_OF_EACH["qwen3"], "bfloat16"), tmp_path / "ckpt", Options(scan_layers=scan))
    ckpt, mine = tmp_path / "ckpt", config(MSE)
    quantize(ckpt, tmp_path / "out", mine, DATA)
    quantize(ckpt, tmp_path / "plain", config(MSE, "{method: gptq, refine: 0}"), DATA)
    quantize(ckpt, tmp_path / "nearest", config(MSE, None))
    with interrupted("calibrated-00001", "before"):
        quantize(ckpt, tmp_path / "again", mine, DATA)
    quantize(ckpt, tmp_path / "again", mine, DATA)
    assert same_arrays(tmp_path / "out", tmp_path / "again")
    have, nearest = restore(tmp_path / "out"), restore(tmp_path / "nearest")
    scales = [name for name in have if name.endswith("array.scale")]
    assert scales
    assert all((np.asarray(have[n]) != np.asarray(nearest[n])).any() for n in scales)
    facts = [read_manifest(tmp_path / name).quantization["parameters"] for name in ("out", "plain")]
    sums = [sum(each["calibration"]["calibrated"] for each in found.values()) for found in facts]
    assert sums[0] < sums[1]


# -- errors of earlier layers -----------------------------------------------------------------------------------------


def test_a_kernel_makes_up_for_errors_of_earlier_layers():
    rng = np.random.default_rng(3)
    y = rng.normal(size=(400, 300)).astype(np.float32)  # more inputs than are summed at once
    x = y + 0.3 * rng.normal(size=y.shape).astype(np.float32)
    w = rng.normal(size=(300, 7)).astype(np.float32)
    hessian, change = x.T @ x, np.zeros((300, 300), np.float32)
    for rows in (slice(150), slice(150, None)):
        triangular.add_product(change, x[rows], (y - x)[rows])
    np.testing.assert_allclose(change, x.T @ (y - x), rtol=0, atol=1e-3)
    damped = hessian + gptq.PROPAGATION_DAMPING * np.diag(hessian).mean() * np.eye(300)
    want = w + 0.5 * np.linalg.solve(damped.astype(np.float64), change @ w)
    have = gptq.propagation(hessian, change, 0.5)(w)
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-4)
    assert np.square(x @ have - y @ w).sum() < 0.8 * np.square(x @ w - y @ w).sum()


def test_errors_are_propagated_from_the_second_layer_on(orbax, tmp_path, monkeypatch):
    """An interrupted run ends in the same bits, and so does one that keeps inputs in files."""
    ckpt, mine = orbax(ONE_OF_EACH["qwen3"], "bfloat16"), config(calibration="{method: gptq, propagate: 0.5}")
    quantize(ckpt, tmp_path / "alone", config(), DATA)
    quantize(ckpt, tmp_path / "out", mine, DATA)
    have, alone = restore(tmp_path / "out"), restore(tmp_path / "alone")
    changed = {name for name in have if not same_bits(np.asarray(have[name]), np.asarray(alone[name]))}
    assert {".".join(name.split(".")[:2]) for name in changed} == {"layers.1", "layers.2"}
    with interrupted("calibrated-00001", "before"):
        quantize(ckpt, tmp_path / "again", mine, DATA)
    monkeypatch.setattr(calibrate_stage, "HESSIAN_BYTES", 1)
    quantize(ckpt, tmp_path / "again", mine, DATA)
    assert same_arrays(tmp_path / "out", tmp_path / "again")


# -- every product ----------------------------------------------------------------------------------------------------


def check_each(out: Path, ckpt: Path) -> dict[str, dict]:
    """Every quantized parameter was calibrated, to a smaller error; the model loads and runs. Returns the facts."""
    manifest = read_manifest(out)
    facts = {name: each["calibration"] for name, each in manifest.quantization["parameters"].items()}
    assert not {n: f for n, f in facts.items() if not f["left"] and not f["calibrated"] < f["nearest"]}
    (have,), (want,) = (forward(tpuconv.load(path, "float32"), [[3, 1, 4, 1, 5]], "float32")() for path in (out, ckpt))
    assert np.isfinite(have).all()
    assert np.abs(have - want).max() > 0
    return facts


FAST = {"qwen3"}
"""Einsums."""


def cases():
    for family, case in ONE_OF_EACH.items():
        if case.traits.looped:
            continue
        marks = [] if family in FAST else [pytest.mark.slow]
        yield pytest.param(case, id=family, marks=marks)


def rule_for(family: str) -> str:
    """int4 in groups of 32, or int8 in a family whose sizes here no group divides."""
    return INT4 if not family.startswith("deepseek_v4") else f"{{module_path: '{INNER}', weight_qtype: int8}}"


@pytest.mark.parametrize("case", list(cases()))
def test_each_array_of_a_family_has_a_smaller_error(case, orbax, tmp_path):
    ckpt = orbax(case, "bfloat16")
    quantize(ckpt, tmp_path / "out", config(rule_for(case.family)), DATA)
    facts = check_each(tmp_path / "out", ckpt)
    assert sum(bool(each["left"]) for each in facts.values()) <= len(facts) // 2
    assert {each["why"] for each in facts.values() if each["left"]} <= {
        "no token reached it",
        "its inputs were not seen",
    }


CARRYING = {
    case.id: case
    for case in CASES
    if is_inseparable(case) and not case.traits.looped and case.id != "deepseek_v4-flash"
}
"""Models with a head whose layers read more than hidden states: inputs of their own, or what earlier layers hand on."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CARRYING)
def test_layers_that_run_one_by_one_are_the_model(name, orbax):
    ckpt = orbax(CARRYING[name], "bfloat16")  # the model is in float32 all the same
    runner = LayerRunner(read_manifest(ckpt), DATA.length)
    want = forward(tpuconv.load(ckpt, "float32"), DATA.ids(), "float32")()
    for states_TW, logits_TV in zip(runner.embedded(DATA.each()), want, strict=True):
        for stage in runner.stages:
            if stage != "lm_head":
                states_TW = runner.run(stage, runner.weights(stage), states_TW)
        have = runner.logits(runner.logits_weights(), states_TW)
        assert np.abs(have - logits_TV).max() < 1e-4 * np.abs(logits_TV).max()


def test_one_layer_is_in_memory_however_rarely_garbage_is_collected(orbax):
    """Modules are in cycles of references, and commands collect garbage rarely."""
    manifest = read_manifest(orbax(ONE_OF_EACH["qwen3"], "bfloat16"))
    runner, live = LayerRunner(manifest, DATA.length), []
    gc.collect()
    gc.disable()
    try:
        states_TW = next(runner.embedded(DATA.each()))
        for stage in runner.stages[:3]:
            weights = runner.weights(stage)
            runner.observe(stage, weights, states_TW)
            states_TW = runner.run(stage, weights, states_TW)
            live.append(sum(array.nbytes for array in jax.live_arrays()))
    finally:
        gc.enable()
    assert live[2] <= live[1]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])  # with attributes that have a hash, and without
def test_samples_leave_nothing_in_memory_however_rarely_garbage_is_collected(family, orbax):
    manifest = read_manifest(orbax(ONE_OF_EACH[family], "bfloat16"))
    runner, live = LayerRunner(manifest, DATA.length), []
    weights, states_TW = runner.weights("layers.0"), next(runner.embedded(DATA.each()))
    gc.disable()
    try:
        for _ in range(3):
            runner.observe("layers.0", weights, states_TW)
            runner.run("layers.0", weights, states_TW)
            live.append(sum(array.nbytes for array in jax.live_arrays()))
    finally:
        gc.enable()
    assert live[2] == live[0]


@pytest.mark.slow
def test_errors_are_those_of_the_outputs(orbax, tmp_path):
    """The recorded errors of the first layer, from what is stored and from the inputs themselves."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(), DATA)
    quantize(ckpt, tmp_path / "nearest", config(calibration=None))
    runner = LayerRunner(read_manifest(ckpt), DATA.length)
    weights, stored, nearest = runner.weights("layers.0"), restore(tmp_path / "out"), restore(tmp_path / "nearest")
    facts = read_manifest(tmp_path / "out").quantization["parameters"]
    inputs: dict[str, list[np.ndarray]] = {}
    axes = {}
    for x_TD in runner.embedded(DATA.each()):
        for observed in runner.observe("layers.0", weights, x_TD):
            for name, summed in observed.summed_axes.items():
                inputs.setdefault(name, []).append(observed.x)
                axes[name] = summed
    assert sorted(inputs) == [
        f"{n}.kernel" for n in ("attn.k", "attn.o", "attn.q", "attn.v", "mlp.down", "mlp.gate", "mlp.up")
    ]
    for name, x in inputs.items():
        full = f"layers.0.{name}"
        x_TI, w = np.concatenate(x), np.asarray(weights[full])
        for arrays, key in ((stored, "calibrated"), (nearest, "nearest")):
            array = qarray.QArray(
                *(jnp.asarray(arrays[f"{full}.array.{p}"]) for p in ("qvalue", "scale")), None, "int4"
            )
            array = array.replace(scale=array.scale.astype(jnp.float32))
            lost = (np.asarray(qarray.dequantize(array), np.float32) - w).reshape(x_TI.shape[1], -1)
            assert axes[name] == tuple(range(len(axes[name])))
            assert np.square(x_TI @ lost).sum() == pytest.approx(facts[full]["calibration"][key], rel=1e-3)
    assert all(np.array_equal(stored[n], nearest[n]) for n in stored if not n.endswith("qvalue"))


RULES = {
    "int8": "weight_qtype: int8",
    "fp8": "weight_qtype: float8_e4m3fn",
    "fp4": "weight_qtype: float4_e2m1fn, tile_size: 32",
    "mxfp4": "weight_qtype: mxfp4, tile_size: 32",
    "nf4": "weight_qtype: nf4, tile_size: 32",
    "zero points": "weight_qtype: int4, tile_size: 32, weight_calibration_method: minmax",
    "clipped": "weight_qtype: int4, tile_size: 32, weight_calibration_method: 'absmax,0.8'",
    "int8 activations": "weight_qtype: int8, act_qtype: int8",
    "all axes": "weight_qtype: int4, tile_size: 16, tile_axes: all",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_type_can_be_calibrated(name, orbax, tmp_path):
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(f"{{module_path: '{INNER}', {RULES[name]}}}"), DATA)
    facts = check_each(tmp_path / "out", ckpt)
    assert not any(each["left"] for each in facts.values())
    if name == "all axes":
        arrays = read_manifest(tmp_path / "out").arrays
        heads, size, width = arrays["layers.0.attn.o.kernel.array.qvalue"].shape
        assert arrays["layers.0.attn.o.kernel.array.scale"].shape == (heads, size // 16, width)


@pytest.mark.slow
def test_stacked_layers_are_calibrated_as_separate_ones(hf, orbax, tmp_path):
    case = ONE_OF_EACH["qwen3"]
    convert(hf(case, "bfloat16"), tmp_path / "scan", Options(scan_layers=True))
    quantize(orbax(case, "bfloat16"), tmp_path / "a", config(), DATA)
    quantize(tmp_path / "scan", tmp_path / "b", config(), DATA)
    separate, stacked = restore(tmp_path / "a"), restore(tmp_path / "b")
    for name, array in stacked.items():
        top, *rest = name.split(".")
        if top == "layers":
            for i, layer in enumerate(array):
                assert np.array_equal(layer, separate[".".join([top, str(i), *rest])]), (name, i)


@pytest.mark.slow
@pytest.mark.parametrize("without", [(), (0,), (1, 2)])
def test_stacked_layers_of_which_some_take_no_scales(without, hf, orbax, tmp_path, monkeypatch):
    """Those stay as they are, whichever they are."""
    search = scaled._search

    def of_some(runner, weights, fold, kernels, *rest):
        scales, before, after = search(runner, weights, fold, kernels, *rest)
        layer = int(next(iter(kernels)).split(".")[1])
        return (None, before, before) if layer in without else (scales, before, after)

    monkeypatch.setattr(scaled, "_search", of_some)
    case = ONE_OF_EACH["qwen3"]
    convert(hf(case, "bfloat16"), tmp_path / "scan", Options(scan_layers=True))
    quantize(orbax(case, "bfloat16"), tmp_path / "a", config(calibration="{method: awq}"), DATA)
    quantize(tmp_path / "scan", tmp_path / "b", config(calibration="{method: awq}"), DATA)
    separate, stacked = restore(tmp_path / "a"), restore(tmp_path / "b")
    for name, array in stacked.items():
        top, *rest = name.split(".")
        for i, layer in enumerate(array) if top == "layers" else ():
            assert same_bits(np.ascontiguousarray(layer), separate[".".join([top, str(i), *rest])]), (name, i)


@pytest.mark.slow
def test_an_expert_without_tokens_is_rounded_to_nearest_and_said_so(orbax, tmp_path):
    ckpt = orbax(ONE_OF_EACH["qwen3_moe"], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(), from_ids("ids", np.array([[5, 5]])))
    quantize(ckpt, tmp_path / "nearest", config(calibration=None))
    facts = read_manifest(tmp_path / "out").quantization["parameters"]
    have, want = restore(tmp_path / "out"), restore(tmp_path / "nearest")
    name = "layers.0.moe.gate.kernel"
    left = facts[name]["calibration"]["left"]
    assert left > 0
    assert facts[name]["calibration"]["why"] == "no token reached it"
    same = [
        np.array_equal(a, b) for a, b in zip(have[f"{name}.array.qvalue"], want[f"{name}.array.qvalue"], strict=True)
    ]
    assert left <= sum(same) < len(same)


@pytest.mark.slow
def test_hessians_that_are_not_held_at_once_give_the_same_bits(orbax, tmp_path, monkeypatch):
    ckpt = orbax(ONE_OF_EACH["qwen3_moe"], "bfloat16")
    observe, runs = LayerRunner.observe, Counter()

    def counted(self, stage, weights, x_TD):
        runs[stage] += 1
        return observe(self, stage, weights, x_TD)

    quantize(ckpt, tmp_path / "a", config(), DATA)
    monkeypatch.setattr(calibrate_stage, "HESSIAN_BYTES", 1)
    monkeypatch.setattr(LayerRunner, "observe", counted)
    quantize(ckpt, tmp_path / "b", config(), DATA)
    assert same_arrays(tmp_path / "a", tmp_path / "b")
    # Once to see the inputs' widths, then once for all Hessians of the stage.
    assert set(runs.values()) == {1 + DATA.samples}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_sizes_of_inputs_are_known_before(family, orbax):
    runner = LayerRunner(read_manifest(orbax(ONE_OF_EACH[family], "bfloat16")), DATA.length)
    for stage in runner.stages:
        seen = runner.observe(stage, runner.weights(stage), np.zeros((DATA.length, runner.width), np.float32))
        experts = [1 if each.counts_E is None else len(each.counts_E) for each in seen]
        hessians = sum(4 * n * each.x.shape[1] ** 2 for n, each in zip(experts, seen, strict=True))
        assert runner.input_bytes(stage) == (sum(each.x.nbytes for each in seen), hessians)


# -- AWQ and SmoothQuant ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["awq", "smooth_quant"])
def test_the_search_is_as_it_is_written_down(method):
    """On a Dense whose inputs differ in size: the power with the smallest error of the output, of 20 and of none."""
    rng = np.random.default_rng(2)
    sizes_I = np.exp2(rng.uniform(-4, 4, 64)).astype(np.float32)
    x_TI = (rng.normal(size=(200, 64)) * sizes_I).astype(np.float32)
    w_IO = rng.normal(size=(64, 24)).astype(np.float32)
    is_awq = method == "awq"

    def rounded(w, levels):  # a scale for each output
        scale = np.abs(w).max(0) / levels
        return np.clip(np.rint(w / scale), -np.ceil(levels), np.floor(levels)) * scale

    def by_token(x):
        scale = np.abs(x).max(1, keepdims=True) / 127.5
        return np.clip(np.rint(x / scale), -128, 127) * scale

    levels = 7.5 if is_awq else 127.5
    errors = {0: np.square((x_TI if is_awq else by_token(x_TI)) @ rounded(w_IO, levels) - x_TI @ w_IO).sum()}
    for step in range(1, 21):
        a = step / 20
        s = np.abs(x_TI).mean(0) ** a if is_awq else np.abs(x_TI).max(0) ** a / np.abs(w_IO).max(1) ** (1 - a)
        s /= np.sqrt(s.max() * s.min())
        x = x_TI / s if is_awq else by_token(x_TI / s)
        errors[step] = np.square(x @ rounded(w_IO * s[:, None], levels) - x_TI @ w_IO).sum()
    statistics = smoothing.InputStatistics(np.abs(x_TI).mean(0), np.abs(x_TI).max(0), x_TI)
    fold = smoothing.Fold(lambda s: {}, lambda s: s, lambda x: x)
    scales, before, after = smoothing.search(
        statistics,
        [w_IO],
        fold,
        smoothing.awq_scales if is_awq else smoothing.smooth_scales,
        lambda _, s: rounded(w_IO * s[:, None], levels),
        (lambda x: x) if is_awq else smoothing.rounded_by_token,
    )
    best = min(errors, key=lambda step: errors[step])
    assert best > 0
    assert before[0] == pytest.approx(errors[0], rel=1e-4)
    assert after[0] == pytest.approx(errors[best], rel=1e-4)
    assert after[0] < 0.9 * before[0]
    assert scales is not None


INT8 = f"{{module_path: '{INNER}', weight_qtype: int8, act_qtype: int8}}"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awq", "smooth_quant"])
def test_scales_are_folded_into_what_is_before(method, orbax, tmp_path):
    """All products of a dense layer; the norms and values that take the scales are stored as they are then."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(INT4 if method == "awq" else INT8, f"{{method: {method}}}"), DATA)
    manifest = read_manifest(tmp_path / "out")
    facts = {name: each["calibration"] for name, each in manifest.quantization["parameters"].items()}
    assert not any(each["left"] for each in facts.values())
    assert sum(f["calibrated"] for f in facts.values()) < sum(f["nearest"] for f in facts.values())
    plain, changed = read_manifest(ckpt), []
    for name, array in manifest.arrays.items():
        if name in plain.arrays and array.xxh3 != plain.arrays[name].xxh3:
            changed.append(name)
    assert changed
    assert all(name.endswith("norm.scale") and name.startswith("layers.") for name in changed)
    assert all(manifest.arrays[name].dtype == plain.arrays[name].dtype for name in changed)
    logits = [
        forward(tpuconv.load(path, "float32"), [[3, 1, 4, 1, 5, 9, 2]], "float32")()[0]
        for path in (tmp_path / "out", ckpt)
    ]
    quantize(ckpt, tmp_path / "nearest", config(INT4 if method == "awq" else INT8, None))
    logits.append(forward(tpuconv.load(tmp_path / "nearest", "float32"), [[3, 1, 4, 1, 5, 9, 2]], "float32")()[0])
    assert np.abs(logits[0] - logits[1]).mean() < 1.2 * np.abs(logits[2] - logits[1]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ONE_OF_EACH.values() if not case.traits.looped], ids=str)
def test_each_family_is_smoothed_where_its_layers_allow_it(case, orbax, tmp_path):
    ckpt = orbax(case, "bfloat16")
    rule = rule_for(case.family)
    quantize(ckpt, tmp_path / "out", config(rule, "{method: awq}"), DATA)
    facts = {n: f["calibration"] for n, f in read_manifest(tmp_path / "out").quantization["parameters"].items()}
    assert all(f["calibrated"] <= f["nearest"] for f in facts.values())
    assert {f["why"] for f in facts.values() if f["left"]} <= {"nothing before it can take its scales"}
    (have,), (want,) = (
        forward(tpuconv.load(path, "float32"), [[3, 1, 4, 1, 5]], "float32")() for path in (tmp_path / "out", ckpt)
    )
    error = np.linalg.norm(have - want) / np.linalg.norm(want)
    quantize(ckpt, tmp_path / "nearest", config(rule, calibration=None))
    (nearest,) = forward(tpuconv.load(tmp_path / "nearest", "float32"), [[3, 1, 4, 1, 5]], "float32")()
    assert error < 2 * np.linalg.norm(nearest - want) / np.linalg.norm(want)  # a wrong fold gives another model


# -- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("last", ["calibrated-00000", "calibrated-00001"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_calibration_goes_on_after_its_last_layer(last, when, orbax, tmp_path, monkeypatch):
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "whole", config(), DATA)
    with interrupted(last, when):
        quantize(ckpt, tmp_path / "out", config(), DATA)
    assert not (tmp_path / "out").exists()
    real, calibrated = calibrate.LayerwiseCalibration._calibrate, []

    def counted(self, runner, stage, *args, **named):
        calibrated.append(stage)
        return real(self, runner, stage, *args, **named)

    monkeypatch.setattr(calibrate.LayerwiseCalibration, "_calibrate", counted)
    quantize(ckpt, tmp_path / "out", config(), DATA)
    first = int(last[-1]) + (when == "after")
    assert calibrated == [f"layers.{i}" for i in range(first, 3)]
    assert same_arrays(tmp_path / "whole", tmp_path / "out")
    assert read_manifest(tmp_path / "whole").quantization == read_manifest(tmp_path / "out").quantization


@pytest.mark.slow
def test_killed_after_each_of_some_layers(tmp_path):
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    convert(random_checkpoint(tmp_path / "hf", qwen3_config(**sizes)), tmp_path / "ckpt")
    (tmp_path / "mine.yaml").write_text(f"qwix: {{rules: [{INT4}]}}\ncalibration: {{method: gptq}}\n")
    tail = ["--config", str(tmp_path / "mine.yaml"), "--calibration", "self", "--samples", "4", "--length", "64"]
    command = [sys.executable, "-m", "tpuconv", "quantize", str(tmp_path / "ckpt")]
    subprocess.run([*command, str(tmp_path / "whole"), *tail], check=True, capture_output=True)
    for layer in (0, 2):
        entry = f"calibrated-{layer:05d}"
        words = ("quantize", tmp_path / "ckpt", tmp_path / "out", *tail)
        with started(*words, patch=halted_after(entry), stdout=subprocess.DEVNULL) as process:
            wait_for((tmp_path / ".out.tpuconv" / f"{entry}.done").exists, process)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    subprocess.run([*command, str(tmp_path / "out"), *tail], check=True, capture_output=True)
    assert same_arrays(tmp_path / "whole", tmp_path / "out")
    assert not (tmp_path / ".out.tpuconv").exists()


# -- in a bucket ------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_bucket(tmp_path, monkeypatch):
    """A checkpoint on the disk and in a bucket, and the arguments of its calibrated quantization."""
    tokens = EXAMPLE / "tiny-qwen3"
    source = random_checkpoint(tmp_path / "hf", qwen3_config(vocab_size=512, num_hidden_layers=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((tokens / name).read_bytes())
    (tmp_path / "mine.yaml").write_text(
        f"qwix: {{rules: [{{module_path: '{INNER}', weight_qtype: int8}}]}}\ncalibration: {{method: gptq}}\n"
    )
    in_memory(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for out in (tmp_path / "ckpt", f"{ROOT}/ckpt"):
        api.convert(source, out)
    return {"config": tmp_path / "mine.yaml", "samples": 2, "length": 16}


def left_over(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "temporary").iterdir()]


@pytest.mark.parametrize("machine", ["the same", "another"])
def test_a_bucket_is_calibrated_into_a_bucket(machine, in_bucket, tmp_path, monkeypatch):
    """Ended after its first layer, it goes on with the second on the same machine, and begins anew on another."""
    api.quantize(tmp_path / "ckpt", tmp_path / "out", **in_bucket)
    real, calibrated = calibrate.LayerwiseCalibration._calibrate, []

    def ending(self, runner, stage, *args, **named):
        calibrated.append(stage)
        if calibrated == ["layers.0", "layers.1"]:
            raise KeyboardInterrupt
        return real(self, runner, stage, *args, **named)

    monkeypatch.setattr(calibrate.LayerwiseCalibration, "_calibrate", ending)
    with pytest.raises(KeyboardInterrupt):
        api.quantize(f"{ROOT}/ckpt", f"{ROOT}/out", **in_bucket)
    assert not objects(f"{ROOT}/out")
    assert len(left_over(tmp_path)) == 1
    if machine == "another":
        shutil.rmtree(tmp_path / "temporary" / left_over(tmp_path)[0])
    api.quantize(f"{ROOT}/ckpt", f"{ROOT}/out", **in_bucket)
    assert calibrated[2:] == (["layers.1"] if machine == "the same" else ["layers.0", "layers.1"])
    assert objects(f"{ROOT}/out") == contents(tmp_path / "out")
    assert not left_over(tmp_path)


def test_what_is_calibrated_is_kept_until_the_output_is_complete(in_bucket, tmp_path, monkeypatch):
    """All units may be done before the run ends: the manifest still needs what the calibration found."""

    def ending(journal):
        raise KeyboardInterrupt

    api.quantize(tmp_path / "ckpt", tmp_path / "out", **in_bucket)
    with monkeypatch.context() as patch:
        patch.setattr(BucketJournal, "publish", ending)
        with pytest.raises(KeyboardInterrupt):
            api.quantize(f"{ROOT}/ckpt", f"{ROOT}/out", workspace=tmp_path / "mine", **in_bucket)
    (folder,) = (tmp_path / "mine").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(folder)
    api.quantize(f"{ROOT}/ckpt", f"{ROOT}/out", **in_bucket)
    assert objects(f"{ROOT}/out") == contents(tmp_path / "out")
    with pytest.raises(UsageError, match="this output is on a disk or has no"):
        api.quantize(f"{ROOT}/ckpt", tmp_path / "local", workspace=tmp_path / "mine", **in_bucket)


# -- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "calibration", "message"),
    [
        (INT4, "{method: best}", "unknown value"),
        (INT4, "{damping: 0.1}", "no 'method'"),
        (INT4, "{method: gptq, alpha: 0.5}", "unknown key"),
        (INT4, "{method: gptq, damping: 0}", "more than 0"),
        (INT4, "{method: awq, damping: 0.1}", "awq has no such setting"),
        (INT4, "{method: smooth_quant}", "for int8 activations"),
        (INT4, "{method: gptq, act_order: 1}", "true or false"),
        (INT4, "{method: gptq, refine: 0.5}", "whole number"),
        (INT4, "{method: gptq, refine: -1}", "from 0 to 100"),
        (INT4, "{method: gptq, propagate: 1.5}", "from 0 to 1"),
        (INT4, "{method: awq, propagate: 0.5}", "awq has no such setting"),
        ("{weight_qtype: int4, tile_axes: all}", None, "needs a tile_size"),
        ("{weight_qtype: int8, act_qtype: int8, tile_size: 8, tile_axes: all}", None, "weights only"),
        ("{weight_qtype: int8, tile_axes: some}", None, "unknown value"),
    ],
)
def test_a_config_that_cannot_be_is_an_error(rule, calibration, message):
    with pytest.raises(ConfigError, match=message):
        config(rule, calibration)


def test_a_config_with_a_calibration_is_read_back_from_a_manifest():
    mine = config(INT4, "{method: gptq, damping: 0.1, act_order: false, refine: 2, propagate: 0.25}")
    again = QuantConfig.from_json(json.loads(json.dumps(mine.to_json())))
    assert again.calibration == mine.calibration
    assert again.to_json() == mine.to_json()
    assert "calibration" not in config(calibration=None).to_json()
    before = mine.to_json() | {"calibration": {"method": "gptq", "damping": 0.1, "act_order": False}}
    of_before = QuantConfig.from_json(before).calibration
    assert (of_before.refine, of_before.propagate) == (0, 0)
    with pytest.raises(CorruptOutput):
        QuantConfig.from_json(mine.to_json() | {"calibration": {"method": "?"}})


def test_texts_that_cannot_be_calibrated_on(orbax, tmp_path):
    (tmp_path / "short.txt").write_text("In the beginning")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    tokens = EXAMPLE / "tiny-qwen3"
    with pytest.raises(UsageError, match=r"short.txt has 16 tokens, and a sample has 17"):
        from_text(tokens, tmp_path / "short.txt", 8, 17)
    with pytest.raises(UsageError, match="no text file"):
        from_text(tokens, tmp_path / "binary.txt", 8, 17)
    with pytest.raises(UsageError, match=r"absent\.txt cannot be read: No such file or directory"):
        from_text(tokens, tmp_path / "absent.txt", 8, 17)
    with pytest.raises(UsageError, match="no tokenizer"):
        from_text(tmp_path, tmp_path / "short.txt", 8, 16)
    data = from_text(tokens, tmp_path / "short.txt", 8, 4)
    assert data.ids().shape == (4, 4)
    assert from_text(tokens, None, 4, 512).samples == 4
    with pytest.raises(UsageError, match="has no calibration"):
        api.quantize(orbax(ONE_OF_EACH["qwen3"], "bfloat16"), config="int8_weight_only", calibration="self")


def test_prompts_that_cannot_be_calibrated_on(tmp_path):
    file, tokens = tmp_path / "x.jsonl", load_tokenizer(EXAMPLE / "tiny-qwen3")
    encoder: Any = SimpleNamespace(tokenizer=tokens, encode_with=lambda text, *_, **__: (list(range(len(text))), {}))
    for line, message in (("{bad", "is not valid JSON"), ('{"text": "a"}', "prompt must be a text, and is absent")):
        file.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(UsageError, match=f"line 2 of .*{message}") as error:
            from_prompts(file, encoder, 8, 4)
        assert error.value.hint == f"write it such as {EXAMPLE_LINE}"
    separators = "a\u2028b\x85c"  # lines to Python, not to JSON
    file.write_text(json.dumps({"prompt": separators}, ensure_ascii=False) + "\r\n")
    assert from_prompts(file, encoder, 8, 5).ids().tolist() == [list(range(5))]


def test_features_of_one_prompt_are_in_memory_at_a_time(tmp_path):
    """Prepared images of a hundred prompts are gigabytes."""
    alive, shift = weakref.WeakSet(), []

    class Pixels(np.ndarray):
        __hash__ = object.__hash__

    def encode_with(text: str, images: Any, *_: Any, **__: Any) -> Any:
        assert len(alive) <= 1
        pixels = np.full(9, len(text) + len(shift)).view(Pixels)
        alive.add(pixels)
        return [1, 2], {"pixels": pixels} if images else {}

    file = tmp_path / "x.jsonl"
    lines = [{"prompt": "a" * (i + 1), "images": ["x.png"] * (i != 2)} for i in range(5)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    encoder: Any = SimpleNamespace(tokenizer=load_tokenizer(EXAMPLE / "tiny-qwen3"), encode_with=encode_with)
    data = from_prompts(file, encoder, 8, 4)
    assert not alive
    found = []
    for sample in data.each():
        found.append(int(sample.features["pixels"][0]) if sample.features else None)
        del sample
    assert found == [1, 2, None, 4, 5]
    assert data.example is not None
    shift.append(1)
    with pytest.raises(SourceError, match=r"an image or sound of line 1 of .* changed"):
        next(data.each())


def test_how_much_text_there_is_and_what_to_do_with_too_little():
    few = CalibrationText.of(replace(from_ids("x.txt", np.zeros((4, 20), np.int32)), asked=128), 96)
    assert str(few) == "calibration: 4 samples of the 128 asked for, 80 tokens, of x.txt"
    one = CalibrationText.of(replace(from_ids("x.txt", np.zeros((1, 20), np.int32)), asked=2000), 16)
    assert str(one) == "calibration: 1 sample of the 2,000 asked for, 20 tokens, of x.txt"
    assert few.warning == (
        "80 tokens are fewer than the 96 inputs of a product: give a longer text by `calibration=FILE`, or "
        '`calibration="self"`'
    )
    assert few.to_json() == {
        "text": "x.txt", "samples": 4, "length": 20, "asked": 128, "inputs": 96, "tokens": 80, "warning": few.warning,
    }  # fmt: skip
    enough = CalibrationText.of(from_ids("x.txt", np.zeros((5, 20), np.int32)), 96)
    assert (enough.warning, str(enough)) == ("", "calibration: 5 samples, 100 tokens, of x.txt")
    assert CalibrationText.of(from_ids("x.txt", np.zeros((5, 20), np.int32)), 101).warning.endswith(
        "give a larger `samples=`"
    )


def test_the_amount_of_text_is_told_before_the_work(converted, tmp_path, monkeypatch, capsys):
    """By each command that calibrates, and in a plan. The widest product of this model is none of its widths: `attn.o`
    sums over all heads."""
    ckpt, text = converted / "tiny-qwen3-orbax", tmp_path / "x.txt"
    text.write_text("word " * 36)
    (tmp_path / "mine.yaml").write_text(
        "qwix: {rules: [{module_path: 'layers/0/attn/o', weight_qtype: int8}]}\ncalibration: {method: gptq}\n"
    )
    given = {"calibration": text, "samples": 16, "length": 20}
    told = [
        "calibration: 9 samples of the 16 asked for, 180 tokens, of x.txt",
        "warning: 180 tokens are fewer than the 192 inputs of a product: give a longer text by `calibration=FILE`, or "
        '`calibration="self"`',
    ]
    planned = api.plan_quantization(ckpt, config=tmp_path / "mine.yaml", **given)
    assert planned.to_json()["calibration"]["inputs"] == 192
    show_plan(planned, False, None)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(with_flags(line) in shown for line in told)

    class Began(Exception):
        pass

    def begin(*_):
        raise Began

    messages = []
    monkeypatch.setattr(calibrate.LayerwiseCalibration, "run", begin)
    with pytest.raises(Began):
        api.quantize(
            ckpt, tmp_path / "out", config=tmp_path / "mine.yaml", **given,
            progress=lambda at: messages.append(at.message) if at.message else None,
        )  # fmt: skip
    assert messages == told
    monkeypatch.setattr(LayerwiseProbe, "each", begin)
    for wanted in ({}, {"target_bits": 6.0, "recipe": tmp_path / "recipe.yaml"}):
        messages.clear()
        with pytest.raises(Began):
            api.sensitivity(
                ckpt, **given, **wanted, progress=lambda at: messages.append(at.message) if at.message else None
            )
        assert messages == [told[0], told[1].replace("192", "480")]  # all groups may be rounded
    (tmp_path / "plain.yaml").write_text("qwix: {rules: [{module_path: 'layers/.*', weight_qtype: int8}]}\n")
    assert "calibration" not in api.plan_quantization(ckpt, config=tmp_path / "plain.yaml").to_json()


def test_each_sample_begins_with_what_the_tokenizer_puts_before_a_text(tmp_path):
    tokens = Path(shutil.copytree(EXAMPLE / "tiny-qwen3", tmp_path / "tokens"))
    raw = json.loads((tokens / "tokenizer.json").read_text())
    begin, number = next((token["content"], token["id"]) for token in raw["added_tokens"])
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }
    plain = from_text(tokens, None, 3, 15).ids()
    (tokens / "tokenizer.json").write_text(json.dumps(raw))
    ids = from_text(tokens, None, 3, 16).ids()
    assert ids[:, 0].tolist() == [number] * 3
    np.testing.assert_array_equal(ids[:, 1:], plain)


def test_activations_that_are_not_finite_are_named(orbax, tmp_path):
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    outside = from_ids("ids", np.array([[3, 1_000_000]]))
    with pytest.raises(GateError, match="the output of the embedding is not finite on sample 0"):
        quantize(ckpt, tmp_path / "out", config(), outside)


def test_a_conversion_does_not_calibrate(hf, tmp_path):
    with pytest.raises(UsageError, match="has a calibration, which runs the model") as error:
        api.convert(hf(ONE_OF_EACH["qwen3"], "bfloat16"), tmp_path / "out", quantize=written(tmp_path))
    assert "`tpuconv quantize`" in error.value.hint


# -- releases, and checkpoints for other programs ----------------------------------------------------------------------

NUMBERS = {"samples": 2, "length": 24, "calibration": "self"}
"""Text that the model draws: tiny models have no tokenizer."""


def written(folder: Path, calibration: str = "{method: gptq}") -> Path:
    """The file of a config."""
    path = folder / "mine.yaml"
    path.write_text(f"qwix: {{rules: [{INT4}]}}\ncalibration: {calibration}\n")
    return path


OTHERS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "gemma2", "llama4_text", "jamba")


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_release_is_quantized_as_its_checkpoint_is(family, hf, orbax, tmp_path):
    case, rules = ONE_OF_EACH[family], written(tmp_path)
    made = {"release": hf(case, "bfloat16"), "checkpoint": orbax(case, "bfloat16")}
    for name, place in made.items():
        assert api.plan_quantization(place, config=rules, **NUMBERS).calibration.tokens == 48
        done = api.quantize(place, tmp_path / name, config=rules, **NUMBERS)
        assert done.calibration.text == "self"
    assert same_arrays(tmp_path / "release", tmp_path / "checkpoint")
    facts = [read_manifest(tmp_path / name).quantization["parameters"] for name in made]
    release, checkpoint = ({name: each["calibration"] for name, each in of_all.items()} for of_all in facts)
    assert release == checkpoint


@pytest.mark.slow
def test_a_checkpoint_for_another_program_is_calibrated(hf, orbax, tmp_path):
    case, rules = ONE_OF_EACH["qwen3"], written(tmp_path, "{method: awq}")
    api.convert(hf(case, "bfloat16"), tmp_path / "tunix", target="tunix")
    for name, place in (("theirs", tmp_path / "tunix"), ("ours", orbax(case, "bfloat16"))):
        api.quantize(place, tmp_path / name, config=rules, **NUMBERS)
    assert same_arrays(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.slow
def test_an_interrupted_calibration_of_a_release_goes_on(hf, tmp_path):
    release, rules = hf(ONE_OF_EACH["qwen3"], "bfloat16"), written(tmp_path)
    api.quantize(release, tmp_path / "whole", config=rules, **NUMBERS)
    with interrupted("calibrated-00001", "before"):
        api.quantize(release, tmp_path / "out", config=rules, **NUMBERS)
    api.quantize(release, tmp_path / "out", config=rules, **NUMBERS)
    assert same_arrays(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_a_release_that_changes_meanwhile_is_calibrated_anew(tmp_path):
    """The digest of a file has samples of its values alone, and a change may lie between these."""
    release, rules = (
        random_checkpoint(tmp_path / "hf", qwen3_config(hidden_size=64, head_dim=32, intermediate_size=96)),
        written(tmp_path),
    )
    with interrupted("calibrated-00001", "after"):
        api.quantize(release, tmp_path / "out", config=rules, **NUMBERS)
    (file,) = release.glob("*.safetensors")
    before, data = read_digest(file)[0], bytearray(file.read_bytes())
    at = len(data) // 4 * 2 + 1
    data[at : at + 800 : 2] = bytes(byte ^ 0x80 for byte in data[at : at + 800 : 2])  # the signs of 400 values
    file.write_bytes(data)
    assert read_digest(file)[0] == before
    for name in ("out", "fresh"):
        api.quantize(release, tmp_path / name, config=rules, **NUMBERS)
    assert same_arrays(tmp_path / "out", tmp_path / "fresh")


# -- memory -----------------------------------------------------------------------------------------------------------

LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


def test_70b_is_planned_within_20_gb():
    family = get_family("llama")
    settings = family.config.from_hf(LLAMA_70B)
    quants = resolve_rules(lambda: family.model_class(settings, dtype=jnp.bfloat16), config())
    encoders = {name: QwixEncoder(name, quant, BF16, BF16) for name, quant in quants.items()}
    arrays = {
        name: SimpleNamespace(shape=shape, dtype="bfloat16", axes=" ".join("?" * len(shape)))
        for binding in family.table.bind(settings)
        for name, shape in binding.dst_shapes().items()
    }
    manifest = SimpleNamespace(arrays=arrays, scan_layers=False)
    assert 10e9 < calibration_memory(manifest, encoders, 64, 512) < 20e9


def test_a_plan_says_the_memory_and_too_little_is_an_error(orbax, tmp_path):
    path, ckpt = tmp_path / "mine.yaml", orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    path.write_text(f"qwix: {{rules: [{INT4}]}}\ncalibration: {{method: gptq}}\n")
    given = {"config": path, "calibration": "self", "samples": 2, "length": 64}
    plan = api.plan_quantization(ckpt, **given)
    assert plan.peak_memory_bytes > api.plan_quantization(ckpt, config="int4_weight_only").peak_memory_bytes
    with pytest.raises(ResourceError, match=r"needs at least .* of memory; `max_memory=`"):
        api.quantize(ckpt, tmp_path / "out", **given, max_memory=600 << 20)
    assert not list(tmp_path.glob(".out*"))


MEASURED = """
import json, sys, threading, time
from pathlib import Path
import jax
jax.config.update("jax_disable_most_optimizations", True)
from tpuconv import api

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def sample():
    while not ended.is_set():
        peaks.append(anonymous())
        ended.wait(0.005)

given = {"config": sys.argv[3], "calibration": sys.argv[4], "samples": 4, "length": 64}
plan = api.plan_quantization(sys.argv[1], **given)
ended, peaks = threading.Event(), [anonymous()]
thread = threading.Thread(target=sample, daemon=True)
thread.start()
api.quantize(sys.argv[1], sys.argv[2], **given)
ended.set()
thread.join()
print(json.dumps({"planned": plan.peak_memory_bytes, "before": peaks[0], "peak": max(peaks)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "place"), [(INT4, "ckpt"), (MSE, "ckpt"), (INT4, "hf")], ids=["absmax", "mse", "a release"]
)
def test_the_private_memory_is_at_most_what_the_plan_says(rule, place, tmp_path):
    """Anonymous pages of a process of its own, of a model whose layers take more than the interpreter. That a sample
    misses the very peak makes the first bound no stricter."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "head_dim": 64}
    source = random_checkpoint(tmp_path / "hf", qwen3_config(vocab_size=512, num_attention_heads=16, **sizes))
    convert(source, tmp_path / "ckpt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / place / name).write_bytes((EXAMPLE / "tiny-qwen3" / name).read_bytes())
    (tmp_path / "mine.yaml").write_text(f"qwix: {{rules: [{rule}]}}\ncalibration: {{method: gptq}}\n")
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    paths = [tmp_path / name for name in (place, "out", "mine.yaml", "text.txt")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] <= found["planned"]
    weights = 4 * (1024 * 64 * 20 * 2 + 3 * 1024 * 4096)  # of one layer in float32
    assert found["peak"] - found["before"] > weights + 3 * 4 * 4096**2  # with the Hessian of `down` and its copies
    assert found["planned"] < 3 * found["peak"]
