"""Learned rounding: layers improve what GPTQ leaves, deterministically, and runs go on after a kill."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.conversions import restore
from helpers.quantizing import ONE_OF_EACH, interrupted, quantize
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError
from tpuconv.models.logits import forward
from tpuconv.quantize.calibrate import learned
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.calibrate.layers import LayerRunner
from tpuconv.quantize.calibrate.run import layer_entry
from tpuconv.quantize.config import QuantConfig, parse_config
from tpuconv.quantize.encode import decoded_values

pytestmark = pytest.mark.usefixtures("quick_compiler")

INNER = r"layers/\d+/(attn|mlp|moe)/(?!(.*/)?router).*"
DATA = from_ids("ids", np.random.default_rng(0).integers(3, 100, (6, 24)))


def config(learn: int, settings: str = "weight_qtype: int4, tile_size: 32") -> QuantConfig:
    text = f"qwix: {{rules: [{{module_path: '{INNER}', {settings}}}]}}\ncalibration: {{method: gptq, learn: {learn}}}\n"
    return parse_config(text.encode(), "mine", "mine.yaml")


def decoded(folder: Path) -> dict[str, np.ndarray]:
    """The weights that a checkpoint in int4 stands for, by the names of the parameters."""
    arrays, out = restore(folder), {}
    for name, x in arrays.items():
        if name.endswith(".array.qvalue"):
            parameter = name.removesuffix(".array.qvalue")
            qbytes = np.asarray(x).astype(np.int8).view(np.uint8)
            out[parameter] = decoded_values("int4", [qbytes, np.asarray(arrays[f"{parameter}.array.scale"])])
    return out


def layer_error(ckpt: Path, weights: dict[str, np.ndarray], stage: str = "layers.0") -> float:
    """The mean squared error of the output of the first layer, from what is stored."""
    runner = LayerRunner(read_manifest(ckpt), DATA.length)
    plain = runner.weights(stage)
    changed = plain | {name: jnp.asarray(x) for name, x in weights.items() if name in plain}
    errors = [
        np.square(runner.run(stage, changed, x_TD) - runner.run(stage, plain, x_TD)).mean()
        for x_TD in runner.embedded(DATA.ids())
    ]
    return float(np.mean(errors))


def test_the_output_of_a_layer_has_a_smaller_error(orbax, tmp_path):
    """Also as computed from what is stored; and the model loads."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "gptq", config(0), DATA)
    quantize(ckpt, tmp_path / "learned", config(20), DATA)
    facts = read_manifest(tmp_path / "learned").quantization["parameters"]
    errors = facts["layers.0.attn.q.kernel"]["calibration"]["layer"]
    before, after = (layer_error(ckpt, decoded(tmp_path / name)) for name in ("gptq", "learned"))
    assert errors["before"] == pytest.approx(before, rel=1e-3)
    assert errors["after"] == pytest.approx(after, rel=1e-3)
    assert after < 0.9 * before
    for parameter in facts.values():
        layer = parameter["calibration"]["layer"]
        assert layer["after"] < layer["before"]
    (logits,) = forward(tpuconv.load(tmp_path / "learned", "float32"), [[3, 1, 4, 1, 5]], "float32")()
    assert np.isfinite(logits).all()
    assert (
        "layer"
        not in read_manifest(tmp_path / "gptq").quantization["parameters"]["layers.0.attn.q.kernel"]["calibration"]
    )


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_ends_in_the_same_bits(when, orbax, tmp_path):
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "whole", config(4), DATA)
    with interrupted(layer_entry(1), when):
        quantize(ckpt, tmp_path / "stopped", config(4), DATA)
    quantize(ckpt, tmp_path / "stopped", config(4), DATA)
    whole, stopped = restore(tmp_path / "whole"), restore(tmp_path / "stopped")
    assert whole.keys() == stopped.keys()
    assert all(np.array_equal(whole[name], stopped[name]) for name in whole)
    assert not list(tmp_path.glob(".stopped*"))


def test_a_layer_that_learns_nothing_keeps_what_gptq_leaves(orbax, tmp_path, monkeypatch):
    """Steps in the wrong direction make the output worse."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "gptq", config(0), DATA)
    step = learned._stepped
    monkeypatch.setattr(learned, "_stepped", lambda own, gradient, rate: step(own, gradient, -rate))
    quantize(ckpt, tmp_path / "worse", config(4), DATA)
    facts = read_manifest(tmp_path / "worse").quantization["parameters"]
    assert all(f["calibration"]["layer"]["after"] == f["calibration"]["layer"]["before"] for f in facts.values())
    gptq, worse = restore(tmp_path / "gptq"), restore(tmp_path / "worse")
    assert all(np.array_equal(gptq[name], worse[name]) for name in gptq)


FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "mamba2", "gemma4")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name in ONE_OF_EACH])
def test_layers_of_every_kind_learn(family, orbax, tmp_path):
    """Experts, latent attention, sinks, linear attention, and layers that read what others hand on."""
    ckpt = orbax(ONE_OF_EACH[family], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(4), DATA)
    facts = read_manifest(tmp_path / "out").quantization["parameters"]
    layers = [f["calibration"]["layer"] for name, f in facts.items() if name.startswith("layers.")]
    assert layers
    assert all(layer["after"] <= layer["before"] for layer in layers)
    assert any(layer["after"] < layer["before"] for layer in layers)


def test_gradients_pass_through_rounding():
    """An offset has the gradient of its weight; where a value is at the end of the range, none."""
    fixed = {"latent": jnp.array([[0.3], [7.4], [-2.2], [20.0]]), "scale": jnp.array([[0.5]])}
    start = {"offset": jnp.zeros((4, 1)), "factor": jnp.ones((1, 1))}

    def total(own):
        values, scale = learned._rounded(own, fixed, (8, "bfloat16"))
        return jnp.sum(values * scale * jnp.array([[1.0], [2.0], [3.0], [4.0]]))

    gradient = jax.grad(total)(start)
    assert gradient["offset"][:, 0].tolist() == [0.5, 1.0, 1.5, 0.0]
    values, _ = learned._rounded(start, fixed, (8, "bfloat16"))
    assert values[:, 0].tolist() == [0, 7, -2, 7]
    # d(sum w_i s f q_i)/df, where q of weights within the range falls with f
    want = 0.5 * (1 * (0 - 0.3) + 2 * (7 - 7.4) + 3 * (-2 + 2.2) + 4 * 7)
    assert float(gradient["factor"][0, 0]) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{method: gptq, learn: -1}", "learn"),
        ("{method: gptq, learn: 0.5}", "number of steps"),
        ("{method: awq, learn: 5}", "awq has no such setting"),
    ],
)
def test_settings_that_cannot_be(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(
            f"qwix: {{rules: [{{weight_qtype: int4, tile_size: 32}}]}}\ncalibration: {text}".encode(), "m", "m.yaml"
        )
    again = QuantConfig.from_json(config(7).to_json())
    assert again.calibration == config(7).calibration


def test_learning_needs_integers():
    for settings in ("weight_qtype: nf4, tile_size: 32", "weight_qtype: int8, weight_calibration_method: minmax"):
        with pytest.raises(ConfigError, match="learns integers without zero points"):
            config(5, settings)
