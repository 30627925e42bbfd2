"""The gates of a quantized model, and of one in 16 bits: what another rounding changes. Right models hold them, wrong
ones do not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import tpuconv
from helpers.commands import EXAMPLE
from helpers.conversions import convert
from helpers.quantizing import ONE_OF_EACH, quantize
from tpuconv import api, restore
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.models.logits import forward
from tpuconv.quantize.calibrate.data import from_text
from tpuconv.quantize.config import parse_config
from tpuconv.quantize.rerounding import MOVED, _moved, rerounded
from tpuconv.verify import logits

RULES = {
    "int8": "{module_path: 'layers/.*', weight_qtype: int8}",
    "int8 activations": "{module_path: 'layers/.*', weight_qtype: int8, act_qtype: int8}",
    "fp8": "{module_path: 'layers/.*', weight_qtype: float8_e4m3fn}",
    "int4": "{module_path: 'layers/.*', weight_qtype: int4, tile_size: 32}",
    "int4 with zero points": "{module_path: 'layers/.*', weight_qtype: int4, tile_size: 32, "
    "weight_calibration_method: minmax}",
    "nf4": "{module_path: 'layers/.*', weight_qtype: nf4, tile_size: 32}",
    "mxfp4": "{module_path: 'layers/.*', weight_qtype: mxfp4, tile_size: 32}",
}


def judged(plain: Path, out: Path, ids: list[list[int]], change: Callable[[Any], Any] = lambda model: model) -> Any:
    """The statistics of a quantized model, which is changed before, as `verify --compare-hf` has them."""
    reference, model = tpuconv.load(plain, "float32"), change(tpuconv.load(out, "float32"))
    theirs, ours = (forward(each, ids, "float32")() for each in (reference, model))
    again = logits.rounding_divergence(
        ids, lambda: ours, lambda seed: forward(rerounded(model, seed), ids, "float32")(), "float32"
    )
    quantization = read_manifest(out).quantization
    assert quantization is not None
    return logits.compare_logits(
        ids, theirs, ours, "float32", logits.quantized_gates("float32", again, quantization), again
    )


def rounded(plain: Path, out: Path, kind: str) -> Path:
    quantize(plain, out, parse_config(f"qwix: {{rules: [{RULES[kind]}]}}".encode(), "c", "c.yaml"))
    return out


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("example") / "plain"
    convert(EXAMPLE, out)
    return out


@pytest.fixture(scope="module")
def text() -> list[list[int]]:
    return logits.tokenize(EXAMPLE, (), 257)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_a_right_model_holds_its_gates(kind: str, example: Path, text: list[list[int]], tmp_path: Path) -> None:
    found = judged(example, rounded(example, tmp_path / "out", kind), text)
    assert found.passed, (found.mean_kl, found.rounding_kl)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "phi3", "qwen3_next"])
def test_a_right_model_of_a_family_holds_its_gates(family: str, kind: str, orbax: Any, tmp_path: Path) -> None:
    plain = orbax(ONE_OF_EACH[family])
    found = judged(plain, rounded(plain, tmp_path / "out", kind), random_ids())
    assert found.passed, (found.mean_kl, found.rounding_kl)


def random_ids() -> list[list[int]]:
    return np.random.default_rng(0).integers(0, 101, (8, 60)).tolist()


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes the arrays whose names begin so."""

    def of_model(model: Any) -> Any:
        graph, state = nnx.split(model)
        leaves = [
            (path, value.replace(change(value.get_value())) if ".".join(map(str, path)).startswith(name) else value)
            for path, value in nnx.to_flat_state(state)
        ]
        assert any(".".join(map(str, path)).startswith(name) for path, _ in leaves)
        return nnx.merge(graph, nnx.from_flat_state(leaves))

    return of_model


def with_rope(factor: float) -> Callable[[Any], Any]:
    def of_model(model: Any) -> Any:
        rope = model.config.rope
        model.config = replace(model.config, rope=replace(rope, theta=rope.theta * factor))
        return model

    return of_model


BROKEN = {
    "a scale doubled": edited("layers.1.mlp.gate.kernel.array.scale", lambda x: 2 * x),
    "two heads exchanged": edited(
        "layers.1.attn.o.kernel.array.qvalue", lambda x: x[jnp.array([3, 1, 2, 0, *range(4, len(x))])]
    ),
    "rows in another order": edited("layers.0.mlp.down.kernel.array.qvalue", lambda x: x[::-1]),
    "another rope base": with_rope(10),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int8 activations", "int4"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_wrong_model_does_not(fault: str, kind: str, example: Path, text: list[list[int]], tmp_path: Path) -> None:
    found = judged(example, rounded(example, tmp_path / "out", kind), text, BROKEN[fault])
    assert found.passed is False, (found.mean_kl, found.rounding_kl)


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_wrong_model_of_a_family_does_not(fault: str, family: str, orbax: Any, tmp_path: Path) -> None:
    plain = orbax(ONE_OF_EACH[family])
    found = judged(plain, rounded(plain, tmp_path / "out", "int8"), random_ids(), BROKEN[fault])
    assert found.passed is False, (found.mean_kl, found.rounding_kl)


@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_each_value_moves_to_a_neighbor(dtype: str) -> None:
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    codes = np.arange(256 if "8" in dtype else 16, dtype=np.uint8)
    values = np.arange(-8, 8).astype(numpy_dtype) if dtype == "int4" else codes.view(numpy_dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    ladder = np.unique(values.astype(np.float32))
    x = np.tile(values, 4000)
    moved = np.asarray(jax.jit(_moved)(jnp.asarray(x), jax.random.key(0))).astype(np.float32)
    steps = np.searchsorted(ladder, moved) - np.searchsorted(ladder, x.astype(np.float32))
    assert set(np.unique(steps).tolist()) == {-1, 0, 1}
    inside = (x.astype(np.float32) > ladder[0]) & (x.astype(np.float32) < ladder[-1])
    for step in (-1, 1):
        assert (steps[inside] == step).mean() == pytest.approx(MOVED / 256, rel=0.1)


FAULTS_IN_16_BITS = {
    "two heads exchanged": edited("layers.1.attn.o.kernel", lambda x: x[jnp.array([3, 1, 2, 0, *range(4, len(x))])]),
    "rows in another order": edited("layers.0.mlp.down.kernel", lambda x: x[::-1]),
    "the scales of a norm lost": edited("layers.2.attn.q_norm.scale", jnp.ones_like),
    "another rope base": with_rope(10),
}


@pytest.mark.slow
def test_in_16_bits_a_right_model_holds_its_gates_and_wrong_ones_do_not(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers, whose own roundings are the measure; the most likely token has no gate."""
    right = api.compare(example, source=EXAMPLE, dtype="bfloat16")
    assert (set(right.statistics.gates), right.passed) == ({"mean_kl"}, True)
    load = restore.load
    for fault, change in FAULTS_IN_16_BITS.items():
        monkeypatch.setattr(restore, "load", lambda *args, change=change, **options: change(load(*args, **options)))
        assert api.compare(example, source=EXAMPLE, dtype="bfloat16").passed is False, fault


STATIC = "act_static_scale: true, act_batch_axes: [0, 1], act_calibration_method: 'absmax,2'"


@pytest.fixture(scope="module")
def static(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The example with static scales of activations, in a type."""
    folder, data = tmp_path_factory.mktemp("static"), from_text(EXAMPLE, None, 32, 512)

    @cache
    def of_type(qtype: str) -> Path:
        rule = f"{{module_path: 'layers/\\d+/(attn|mlp)/.*', weight_qtype: {qtype}, act_qtype: {qtype}, {STATIC}}}"
        text = f"qwix: {{rules: [{rule}]}}\ncalibration: {{method: nearest}}\n"
        quantize(example, folder / qtype, parse_config(text.encode(), "c", "c.yaml"), data)
        return folder / qtype

    return of_type


BROKEN_SCALES = BROKEN | {
    "all static scales too small": edited("layers", lambda x: x / 4 if x.shape == (1, 1, 1) else x),
    "a static scale too small": edited("layers.1.mlp.down.einsum0_lhs_scale", lambda x: x / 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_a_right_model_with_static_scales_holds_its_gates(
    qtype: str, static: Callable[[str], Path], example: Path, text: list[list[int]]
) -> None:
    found = judged(example, static(qtype), text)
    assert found.passed, (found.mean_kl, found.rounding_kl)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("fault", BROKEN_SCALES)
def test_a_wrong_model_with_static_scales_does_not(
    fault: str, qtype: str, static: Callable[[str], Path], example: Path, text: list[list[int]]
) -> None:
    found = judged(example, static(qtype), text, BROKEN_SCALES[fault])
    assert found.passed is False, (found.mean_kl, found.rounding_kl)


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ({}, 2),
        ({"weight_calibration_method": "minmax"}, 2),
        ({"weight_calibration_method": "absmax,0.8"}, 5),
        ({"weight_calibration_method": "rms,7"}, 5),
        ({"weight_calibration_method": "absmax,0.5"}, None),
        ({"act_qtype": "int8"}, 2),
        ({"act_qtype": "int8", "act_calibration_method": "absmax,0.8"}, None),
        ({"act_qtype": "int8", "act_calibration_method": "rms,7"}, None),
        ({"act_qtype": "int8", "act_calibration_method": "absmax,2", "act_static_scale": True}, 5),
        ({"act_qtype": "int8", "act_static_scale": True}, None),
        ({"act_qtype": "int8", "act_calibration_method": "fixed,-4,4", "act_static_scale": True}, None),
    ],
)
def test_what_may_be_clipped_has_a_wider_gate_or_none(rule: dict[str, Any], factor: int | None) -> None:
    gates = logits.quantized_gates("float32", 0.01, {"rules": [{}, rule]})
    assert gates == ({"mean_kl": factor * 0.01} if factor else {})
