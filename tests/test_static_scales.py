"""Static scales of activations: Qwix's own, in a checkpoint, in the loaded model and in an export."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import tpuconv
from helpers.checkpoints import read_tensors
from helpers.conversions import Options, assert_same, convert, restore
from helpers.quantizing import ONE_OF_EACH, interrupted, quantize
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.run.building import FOUND_STEP
from tpuconv.errors import ConfigError, UsageError
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.generate import Generator
from tpuconv.models.logits import forward
from tpuconv.names import INPUT_SCALE
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.calibrate.layers import LayerRunner
from tpuconv.quantize.config import QuantConfig, parse_config
from tpuconv.quantize.input_scale import MeanScale

DATA = from_ids("ids", np.random.default_rng(0).integers(3, 100, (4, 24)))
INNER = r"layers/\d+/(attn|mlp|moe)/(?!(.*/)?router).*"
AXES = "act_static_scale: true, act_batch_axes: [0, 1]"


def config(module: str = INNER, qtype: str = "int8", more: str = "", method: str = "nearest") -> QuantConfig:
    rule = f"{{module_path: '{module}', weight_qtype: {qtype}, act_qtype: {qtype}, {AXES}{more}}}"
    text = f"qwix: {{rules: [{rule}]}}\ncalibration: {{method: {method}}}\n"
    return parse_config(text.encode(), "mine", "mine.yaml")


class Dense(nnx.Module):
    def __init__(self):
        self.up = Einsum("BTD,DF->BTF", {"D": 32, "F": 48}, dtype=jnp.float32, keys=Keys(jax.random.key(0)))

    def __call__(self, x_BTD):
        return self.up(x_BTD)


@pytest.mark.filterwarnings("ignore:'.value' setter:DeprecationWarning")  # Qwix's
@pytest.mark.parametrize("method", ["absmax", "absmax,1.5", "rms,3", "fixed,-2,2"])
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_a_scale_is_the_one_that_qwix_finds_for_a_dense(method, qtype):
    """Qwix collects statistics while a model with its training provider runs, and `quantize_params` makes the scale."""
    fields = {"weight_qtype": qtype, "act_qtype": qtype, "act_calibration_method": method}
    rule = {"module_path": "up", "act_static_scale": True, "act_batch_axes": (0, 1), **fields}
    samples = np.random.default_rng(1).normal(size=(5, 1, 7, 32))
    samples = jnp.asarray(samples * np.arange(1, 8)[:, None] / 3, jnp.float32)
    model = Dense()
    trained = qwix.quantize_model(model, qwix.QtProvider([qwix.QtRule(**rule)]), samples[0])
    for x_BTD in samples:
        trained(x_BTD)  # not as one program, in which jax 0.12 rounds otherwise
    stats = {"up": {"einsum0_lhs": trained.up.einsum0_lhs.get_value()}}
    served = qwix.quantize_model(model, qwix.PtqProvider([qwix.QuantizationRule(**rule)]), samples[0])
    params = qwix.quantize_params(nnx.to_pure_dict(nnx.state(model)), served, stats)
    want = params["up"]["einsum0_lhs_scale"]["array"]

    mean = MeanScale(served.up.einsum0_lhs_scale.how)
    for x_BTD in samples:
        mean.add(np.asarray(x_BTD[0]))
    assert want.shape == (1, 1, 1)
    assert np.float32(mean.scale) == np.asarray(want).item()


@pytest.mark.slow
def test_a_checkpoint_has_the_scales_of_what_its_products_read(orbax, tmp_path):
    """Of the first layer, from the inputs themselves."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(), DATA)
    manifest, arrays = read_manifest(tmp_path / "out"), restore(tmp_path / "out")
    runner = LayerRunner(read_manifest(ckpt), DATA.length)
    weights = runner.weights("layers.0")
    largest = [
        np.abs(runner.observe("layers.0", weights, x_TD)[0].x).max(1).mean() for x_TD in runner.embedded(DATA.each())
    ]
    scales = {name: array for name, array in arrays.items() if name.endswith(INPUT_SCALE)}
    assert len(scales) == 7 * 3
    assert {array.dtype for array in scales.values()} == {np.dtype(np.float32)}
    for name in "qkv":
        assert scales[f"layers.0.attn.{name}{INPUT_SCALE}"].item() == pytest.approx(np.mean(largest) / 127.5, rel=1e-6)
    assert scales["layers.0.attn.o" + INPUT_SCALE].shape == (1, 1, 1, 1)
    assert manifest.raw["parameters"] == read_manifest(ckpt).raw["parameters"]

    loaded = tpuconv.load(tmp_path / "out").layers[0].attn.q.einsum0_lhs_scale.array[...]
    assert loaded == arrays["layers.0.attn.q" + INPUT_SCALE].astype(jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "smooth_quant"])
def test_scales_are_those_of_calibrated_weights(method, orbax, tmp_path):
    """SmoothQuant divides the inputs: their scales are smaller then."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "nearest", config(), DATA)
    quantize(ckpt, tmp_path / "out", config(method=method), DATA)
    have, want = restore(tmp_path / "out"), restore(tmp_path / "nearest")
    name = f"layers.0.attn.q{INPUT_SCALE}"
    assert (have[name] == want[name]).all() == (method == "gptq")
    assert (have[name.replace("0", "2", 1)] != want[name.replace("0", "2", 1)]).all()


@pytest.mark.slow
def test_stacked_layers_have_the_scales_of_separate_ones(hf, orbax, tmp_path):
    case = ONE_OF_EACH["qwen3"]
    convert(hf(case, "bfloat16"), tmp_path / "scan", Options(scan_layers=True))
    quantize(orbax(case, "bfloat16"), tmp_path / "a", config(), DATA)
    quantize(tmp_path / "scan", tmp_path / "b", config(), DATA)
    separate, stacked = restore(tmp_path / "a"), restore(tmp_path / "b")
    for name in (name for name in stacked if name.endswith(INPUT_SCALE)):
        assert np.array_equal(
            stacked[name], np.stack([separate[name.replace("layers", f"layers.{i}")] for i in range(3)])
        )
    logits = [forward(tpuconv.load(tmp_path / out, "float32"), DATA.ids()[:1], "float32")() for out in "ab"]
    assert np.array_equal(*logits)
    for out in "ab":
        api.export(tmp_path / out, tmp_path / f"{out}-hf")
    assert_same(read_tensors(tmp_path / "b-hf"), read_tensors(tmp_path / "a-hf"))


@pytest.mark.parametrize(
    ("family", "module", "message"),
    [
        ("qwen3_moe", INNER, "layers/0/moe/gate: has no single product of each token with weights"),
        ("deepseek_v3", r"layers/\d+/attn/k_b", "layers/0/attn/k_b: has other products when the model decodes"),
    ],
)
def test_a_product_without_a_static_scale_is_named(family, module, message, orbax, tmp_path):
    with pytest.raises(ConfigError) as error:
        quantize(orbax(ONE_OF_EACH[family], "bfloat16"), tmp_path / "out", config(module), DATA)
    assert any(message in line for line in error.value.details)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rule", "calibration", "message"),
    [
        (f"weight_qtype: int8, act_qtype: int8, {AXES}", None, "no calibration finds the scales"),
        (f"weight_qtype: int8, {AXES}", "nearest", "needs a rule with act_qtype"),
        (f"act_qtype: int8, {AXES}", "nearest", "needs a rule with weight_qtype"),
        ("weight_qtype: int8, act_qtype: int8, act_static_scale: true", "nearest", "for all texts and positions"),
        ("weight_qtype: int8, act_qtype: int8, act_batch_axes: [0, 1]", "gptq", "is for static scales"),
        (f"weight_qtype: int8, act_qtype: int8, tile_size: 32, {AXES}", "nearest", "belongs to complete inputs"),
        (
            f"weight_qtype: int8, act_qtype: int8, act_calibration_method: minmax, {AXES}",
            "nearest",
            "has no zero point",
        ),
        ("weight_qtype: int8", "nearest", "no rule has act_static_scale"),
    ],
)
def test_a_rule_that_cannot_be_is_an_error(rule, calibration, message):
    text = f"qwix: {{rules: [{{{rule}}}]}}\n" + (f"calibration: {{method: {calibration}}}" if calibration else "")
    with pytest.raises(ConfigError, match=message):
        parse_config(text.encode(), "mine", "mine.yaml")


def test_a_config_is_read_back_from_a_manifest():
    rules = config(more=", act_calibration_method: 'absmax,1.5'")
    again = QuantConfig.from_json(json.loads(json.dumps(rules.to_json())))
    assert again.to_json() == rules.to_json()
    assert again.rules[0].to_qwix()["act_static_scale"]


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_an_export_has_the_scales_and_computes_the_same(qtype, orbax, tmp_path):
    """transformers rounds weights and activations by what compressed-tensors stores."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ckpt = orbax(ONE_OF_EACH["qwen3"], "float32")
    quantize(ckpt, tmp_path / "out", config(qtype=qtype, more=", act_calibration_method: 'absmax,1.5'"), DATA)
    api.export(tmp_path / "out", tmp_path / "hf")
    group = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    inputs = {"dynamic": False, "strategy": "tensor"}
    assert {key: group["input_activations"][key] for key in inputs} == inputs
    arrays, tensors = restore(tmp_path / "out"), load_file(tmp_path / "hf" / "model.safetensors")
    for i in range(3):
        want = arrays[f"layers.{i}.mlp.down{INPUT_SCALE}"].reshape(1)
        assert np.array_equal(tensors[f"model.layers.{i}.mlp.down_proj.input_scale"].numpy(), want)
    import torch

    ids = DATA.ids()[:2]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    want = reference(torch.tensor(ids, dtype=torch.long)).logits.detach().numpy()
    have, plain = (forward(tpuconv.load(path, "float32"), ids, "float32")() for path in (tmp_path / "out", ckpt))
    assert np.abs(have - want).mean() < 0.1 * np.abs(plain - want).mean()
    with pytest.raises(UsageError, match=r"fp8|awq|no format"):
        api.export(tmp_path / "out", tmp_path / "other", scheme="fp8" if qtype != "int8" else "awq")


@pytest.mark.slow
def test_a_loaded_model_decodes(orbax, tmp_path):
    """It rounds by the scales that are stored, and tokens with a cache as those without."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "out", config(), DATA)
    model = tpuconv.load(tmp_path / "out", "float32")
    text = list(map(int, DATA.ids()[0, :9]))
    tokens = [int(ids[0]) for ids in Generator(model)([text], 3)]
    for i, token in enumerate(tokens):
        assert forward(model, [text + tokens[:i]], "float32")()[0][-1].argmax() == token
    before = forward(model, [text], "float32")()
    scale = model.layers[0].attn.q.einsum0_lhs_scale.array
    scale[...] = 4 * scale[...]
    assert (forward(model, [text], "float32")()[0] != before[0]).any()
    assert api.compare_checkpoints(ckpt, tmp_path / "out", gates={}).statistics.mean_kl > 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_run_ends_in_the_same_bits(when, orbax, tmp_path):
    """At the moment when the scales are written, and before the first unit of work."""
    ckpt = orbax(ONE_OF_EACH["qwen3"], "bfloat16")
    quantize(ckpt, tmp_path / "whole", config(), DATA)
    with interrupted(FOUND_STEP, when):
        quantize(ckpt, tmp_path / "out", config(), DATA)
    assert not (tmp_path / "out").exists()
    quantize(ckpt, tmp_path / "out", config(), DATA)
    sums = [{n: a.xxh3 for n, a in read_manifest(tmp_path / out).arrays.items()} for out in ("whole", "out")]
    assert sums[0] == sums[1]
    assert api.verify(tmp_path / "out").passed
