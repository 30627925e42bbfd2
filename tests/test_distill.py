"""Distilled scales: gradients of the whole model, logits that come nearer, and interrupted runs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.calibrations import DATA, INNER, INT4, MSE, config, same_arrays
from helpers.conversions import Options, convert, restore, same_bits
from helpers.families import CASES, Case, is_inseparable
from helpers.quantizing import ONE_OF_EACH, interrupted, quantize
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.models.logits import forward
from tpuconv.quantize.calibrate import distill
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.calibrate.layers import HEAD_STAGE, LayerRunner
from tpuconv.quantize.values import Coded
from tpuconv.storage.journal import Journal

IDS = np.random.default_rng(1).integers(3, 60, (1, 24)).astype(np.int32)  # which all vocabularies have


# -- gradients --------------------------------------------------------------------------------------------------------


def coded(weights: dict[str, jax.Array]) -> dict[str, Coded]:
    """The kernels of a stage as integers from -4 to 4, with a scale for each element of the last axis."""
    found = {}
    for name, values in weights.items():
        if name.endswith(".kernel") and values.ndim > 1:
            wide = np.asarray(values, np.float32)
            scale = np.maximum(np.abs(wide).max(tuple(range(wide.ndim - 1)), keepdims=True) / 4, 1e-6)
            qvalues = np.rint(wide / scale).astype(np.int8).view(np.uint8)
            found[name] = Coded(jnp.asarray(qvalues), jnp.asarray(scale), (), "int8")
    return found


def by_layers(ckpt: Path) -> tuple[float, dict[str, np.ndarray], dict[str, Coded]]:
    """The divergence of a rounded model and the gradients of its scales, computed layer by layer; and the scales."""
    runner = LayerRunner(read_manifest(ckpt), IDS.shape[1])
    layers = [stage for stage in runner.stages if stage != HEAD_STAGE]
    weights = {stage: runner.weights(stage) for stage in runner.stages}
    parts = {stage: coded(weights[stage]) for stage in layers}
    (exact,) = runner.embedded(from_ids("ids", IDS).each())
    states = [exact]
    for stage in layers:
        exact = runner.run(stage, weights[stage], exact)
        rest = {name: values for name, values in weights[stage].items() if name not in parts[stage]}
        states.append(runner.run(stage, rest, states[-1], parts[stage]))
    kl, _, gradient = runner.divergence(runner.logits_weights(), {}, states.pop(), exact)
    gradients: dict[str, np.ndarray] = {}
    for stage in reversed(layers):
        scales, gradient = runner.pulled(stage, weights[stage], states.pop(), parts[stage], gradient)
        gradients |= scales
    return kl, gradients, {name: each for of_stage in parts.values() for name, each in of_stage.items()}


def of_the_whole(ckpt: Path, parts: dict[str, Coded]) -> tuple[float, dict[str, np.ndarray]]:
    """The same by the model itself."""
    graph, state = nnx.split(tpuconv.load(ckpt, "float32"))
    flat = [(".".join(map(str, path)), path, value) for path, value in nnx.to_flat_state(state)]

    def log_probabilities(decoded: dict[str, jax.Array]) -> jax.Array:
        filled = [(path, value.replace(decoded.get(name, value[...]))) for name, path, value in flat]
        return jax.nn.log_softmax(nnx.merge(graph, nnx.from_flat_state(filled))(IDS))

    def kl(scales: dict[str, jax.Array]) -> jax.Array:
        moved = {n: Coded(parts[n].qvalues, scale, (), "int8").decoded for n, scale in scales.items()}
        want, have = log_probabilities({}), log_probabilities(moved)
        return (jnp.exp(want) * (want - have)).sum(-1).mean()

    with jax.default_matmul_precision("highest"):
        value, gradients = jax.jit(jax.value_and_grad(kl))({name: each.scale for name, each in parts.items()})
    return float(value), {name: np.asarray(each) for name, each in gradients.items()}


def cases() -> list[object]:
    """A model of each family, and those whose layers read more than hidden states."""
    one_of_each = {case.id: case for case in ONE_OF_EACH.values()}
    found = one_of_each | {case.id: case for case in CASES if is_inseparable(case)}
    return [
        pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in found.items() if not case.traits.looped
    ]


@pytest.mark.usefixtures("users_compiler")  # without optimizations the gradients of Xing 4.0 are not finite
@pytest.mark.parametrize("case", cases())
def test_gradients_are_those_of_the_whole_model(case: Case, orbax) -> None:
    ckpt = orbax(case, "bfloat16")
    kl, gradients, parts = by_layers(ckpt)
    want_kl, want = of_the_whole(ckpt, parts)
    assert kl == pytest.approx(want_kl, rel=1e-3)
    assert gradients.keys() == want.keys()
    size = max(np.abs(each).max() for each in want.values())
    assert size > 0
    for name in want:
        np.testing.assert_allclose(gradients[name], want[name], rtol=0, atol=1e-3 * size, err_msg=name)


# -- complete runs ----------------------------------------------------------------------------------------------------

RULES = {
    "gptq": (MSE, "{method: gptq, propagate: 0.5, distill: 6}"),
    "awq": (INT4, "{method: awq, distill: 6}"),
    "nearest": (f"{{module_path: '{INNER}', weight_qtype: nf4, tile_size: 16}}", "{method: nearest, distill: 6}"),
    "zero points": (
        f"{{module_path: '{INNER}', weight_qtype: int4, tile_size: 32, weight_calibration_method: minmax}}",
        "{method: gptq, distill: 6}",
    ),
    "head": ("{module_path: lm_head, weight_qtype: int3, tile_size: 32}", "{method: gptq, distill: 6}"),
}


def divergence(have: Path, want: Path, samples: int = DATA.samples) -> float:
    """The mean KL divergence of two models on the first samples."""
    logits = [forward(tpuconv.load(path, "float32"), DATA.ids()[:samples], "float32")() for path in (want, have)]
    want_TV, have_TV = (np.asarray(jax.nn.log_softmax(jnp.asarray(np.concatenate(each)))) for each in logits)
    return float((np.exp(want_TV) * (want_TV - have_TV)).sum(-1).mean())


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gptq" else [pytest.mark.slow]) for name in RULES]
)
def test_logits_come_nearer(name, scan, hf, tmp_path, monkeypatch):
    """Quantized values, and whatever else AWQ changes, stay as they are; the scales are other ones."""
    monkeypatch.setattr(distill, "RATE", 1e-2)
    kept: list[float] = []
    record = Journal.record

    def recorded(self, entry, *facts):
        kept.extend(each["kl"] for each in facts if "kl" in each)
        record(self, entry, *facts)

    monkeypatch.setattr(Journal, "record", recorded)
    rule, calibration = RULES[name]
    case = ONE_OF_EACH["llama" if name == "head" else "qwen3"]  # qwen3's head is its embedding
    convert(hf(case, "bfloat16"), tmp_path / "ckpt", Options(scan_layers=scan))
    quantize(tmp_path / "ckpt", tmp_path / "out", config(rule, calibration), DATA)
    before = calibration.replace("distill: 6", "distill: 0")
    before_config = None if name == "nearest" else before
    quantize(tmp_path / "ckpt", tmp_path / "before", config(rule, before_config), DATA)
    have, want = restore(tmp_path / "out"), restore(tmp_path / "before")
    assert have.keys() == want.keys()
    changed = {n for n in have if not same_bits(np.asarray(have[n]), np.asarray(want[n]))}
    assert changed == {n for n in have if n.endswith("array.scale")}
    assert kept[0] == pytest.approx(divergence(tmp_path / "before", tmp_path / "ckpt", 2), rel=1e-3)
    first, after = (divergence(tmp_path / each, tmp_path / "ckpt") for each in ("before", "out"))
    assert after < 0.95 * first
    assert after < np.mean(kept[-2:]) * 1.05


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_run_ends_in_the_same_bits(number, when, whole_run, tmp_path):
    ckpt, whole = whole_run
    entry = ("calibrated-distilled-00000", "calibrated-distilled-00001", "calibrated-distilled")[number]
    with interrupted(entry, when):
        quantize(ckpt, tmp_path / "out", config(INT4, TWO_STEPS), DATA)
    quantize(ckpt, tmp_path / "out", config(INT4, TWO_STEPS), DATA)
    assert same_arrays(whole, tmp_path / "out")


@pytest.mark.parametrize("moves", [1, 3, 6])
def test_a_run_that_ends_within_a_step_does_the_step_again(moves, whole_run, tmp_path, monkeypatch):
    """Some layers have new scales then, and others have not."""
    ckpt, whole = whole_run
    real, moved = distill.Distillation._move, []

    def ending(self, stage, *others):
        moved.append(stage)
        if len(moved) > moves:
            raise KeyboardInterrupt
        real(self, stage, *others)

    with monkeypatch.context() as patch:
        patch.setattr(distill.Distillation, "_move", ending)
        with pytest.raises(KeyboardInterrupt):
            quantize(ckpt, tmp_path / "out", config(INT4, TWO_STEPS), DATA)
    quantize(ckpt, tmp_path / "out", config(INT4, TWO_STEPS), DATA)
    assert same_arrays(whole, tmp_path / "out")


TWO_STEPS = "{method: nearest, distill: 1}"


@pytest.fixture(scope="module")
def whole_run(orbax, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint, and its quantization in one go, which leaves nothing beside it."""
    ckpt, folder = orbax(ONE_OF_EACH["qwen3"], "bfloat16"), tmp_path_factory.mktemp("whole")
    quantize(ckpt, folder / "out", config(INT4, TWO_STEPS), DATA)
    assert [path.name for path in folder.iterdir()] == ["out"]
    return ckpt, folder / "out"


def test_scales_of_few_bits_stay(orbax, tmp_path, monkeypatch):
    """mxfp4's are powers of two. Where no others are, there is nothing to distill."""
    monkeypatch.setattr(distill, "RATE", 1e-2)
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    rules = [
        "{module_path: 'layers/.*/mlp/.*', weight_qtype: mxfp4, tile_size: 32}",
        "{module_path: 'layers/.*/attn/.*', weight_qtype: int4}",
    ]
    quantize(ckpt, tmp_path / "out", config(", ".join(rules), TWO_STEPS), DATA)
    quantize(ckpt, tmp_path / "before", config(", ".join(rules), None))
    have, want = restore(tmp_path / "out"), restore(tmp_path / "before")
    changed = {n for n in have if not same_bits(np.asarray(have[n]), np.asarray(want[n]))}
    assert changed == {n for n in have if ".attn." in n and n.endswith("array.scale")}
    with pytest.raises(UnsupportedConfig, match="no scales to distill"):
        quantize(ckpt, tmp_path / "none", config(rules[0], TWO_STEPS), DATA)


@pytest.mark.parametrize(
    ("rule", "calibration", "message"),
    [
        (INT4, "{method: gptq, distill: 0.5}", "whole number"),
        (INT4, "{method: gptq, distill: -1}", "from 0 to 100"),
        (INT4, "{method: smooth_quant, distill: 1}", "smooth_quant has no such setting"),
        (INT4, "{method: gptq, distill: 1, kv_cache: fp8}", "after the static scales"),
        (INT4, "{method: nearest, distill: 0}", "nearest finds scales"),
    ],
)
def test_a_config_that_cannot_be_is_an_error(rule, calibration, message):
    with pytest.raises(ConfigError, match=message):
        config(rule, calibration)
