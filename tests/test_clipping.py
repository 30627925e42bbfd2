"""Scales by the least squared error of the weights, `weight_calibration_method: mse`."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tpuconv
from helpers.conversions import restore
from helpers.quantizing import ONE_OF_EACH, quantize, quantize_source
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import ConfigError
from tpuconv.models.logits import forward
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.clipping import SCALE_FACTORS
from tpuconv.quantize.config import QuantConfig, parse_config
from tpuconv.quantize.encode import QwixEncoder, values_of_bytes
from tpuconv.quantize.recipe.groups import find_choices
from tpuconv.quantize.recipe.search import to_yaml
from tpuconv.quantize.rules import ParamQuant
from tpuconv.quantize.values import decoded_values

INNER = r"layers/\d+/(attn|mlp|moe)/(?!(.*/)?router).*"


def config(settings: str, calibration: str = "") -> QuantConfig:
    text = f"qwix: {{rules: [{{module_path: '{INNER}', {settings}}}]}}\n{calibration}"
    return parse_config(text.encode(), "mine", "mine.yaml")


class How:
    """The fields of Qwix's description that an encoder reads."""

    def __init__(self, qtype: str):
        self.qtype, self.calibration_method = qtype, "mse"


def encoder(qtype: str, shape, groups, dtype=ml_dtypes.bfloat16, scale_dtype=ml_dtypes.bfloat16) -> QwixEncoder:
    return QwixEncoder("x", ParamQuant(shape, groups, 0, How(qtype)), np.dtype(dtype), np.dtype(scale_dtype))


def least_errors(values: np.ndarray, qtype: str, bound: float, scale_dtype) -> np.ndarray:
    """The least squared error of each row, over all factors, with the nearest value of the type. Quotients are bfloat16
    first for the types that Qwix's tables round."""
    grid, _ = values_of_bytes(qtype)
    signs = (1, -1) if qtype.startswith("int") else (1,)
    errors = []
    for factor in (sign * f for sign in signs for f in SCALE_FACTORS):
        scale = (np.abs(values).max(1) * (factor / np.float32(bound))).astype(scale_dtype).astype(np.float32)
        quotients = values / scale[:, None]
        if not qtype.startswith("int"):
            quotients = quotients.astype(ml_dtypes.bfloat16).astype(np.float32)
        nearest = grid[np.abs(quotients[:, :, None] - grid).argmin(2)]
        if qtype.startswith("float"):  # of two that are as near, the even one
            clipped = np.clip(quotients, grid[0], grid[-1]).astype(ml_dtypes.bfloat16)
            nearest = clipped.astype(getattr(ml_dtypes, qtype)).astype(np.float32)
        errors.append(np.square(nearest * scale[:, None] - values).sum(1))
    return np.min(errors, 0)


BOUNDS = {"int4": 7.5, "int8": 127.5, "float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0, "nf4": 1.0}


@pytest.mark.parametrize("scale_dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("qtype", BOUNDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_no_factor_has_a_smaller_error(qtype, axis, scale_dtype):
    rows = np.random.default_rng(0).standard_t(4, (24, 32)).astype(ml_dtypes.bfloat16).astype(np.float32)
    values = rows if axis else rows.T
    groups = (1, 32) if axis else (32, 1)
    made = encoder(qtype, values.shape, groups, np.float32, scale_dtype)
    parts, statistics = made(values)
    lost = np.square(made.decoded([parts[0].view(np.uint8), parts[1]]) - values).sum(axis)
    want = least_errors(rows, qtype, BOUNDS[qtype], scale_dtype)
    assert lost == pytest.approx(want, rel=1e-4)
    assert statistics["noise"] == pytest.approx(lost.sum(), rel=1e-5)
    assert parts[1].dtype == scale_dtype
    if qtype == "int4":
        assert 0.2 < (parts[1].astype(np.float32) < 0).mean() < 0.8


def test_scales_do_not_depend_on_the_order_of_memory():
    """Sums of errors are in the order of the parameter's axes, so that one pass and two choose the same of two scales
    that are nearly as good."""
    values = np.random.default_rng(0).standard_normal((2048, 2048), np.float32).astype(ml_dtypes.bfloat16)
    made = encoder("int4", values.shape, (512, 1))
    (qvalues, scales), statistics = made(values)
    (turned, turned_scales), turned_statistics = made(np.asfortranarray(values))
    assert np.array_equal(scales, turned_scales)
    assert np.array_equal(qvalues, turned)
    assert statistics == turned_statistics


def test_groups_of_zeros_and_boxes():
    """A group does not depend on the box that it is read in, nor on the order of memory."""
    values = np.random.default_rng(1).normal(size=(4, 64, 16)).astype(ml_dtypes.bfloat16)
    values[1, :32] = 0
    made = encoder("int4", values.shape, (1, 32, 1))
    (qvalues, scales), _ = made(values)
    (turned, turned_scales), _ = made(np.asfortranarray(values))
    (part, part_scales), _ = made(values[1:3, 32:, 4:8])
    assert np.array_equal(qvalues, turned)
    assert np.array_equal(scales, turned_scales)
    assert np.array_equal(part, qvalues[1:3, 32:, 4:8])
    assert np.array_equal(part_scales, scales[1:3, 1:, 4:8])
    assert (scales[1, 0] == 1).all()
    assert not qvalues[1, :32].astype(np.int8).any()
    with pytest.raises(FloatingPointError):
        made(np.full((1, 32, 1), np.nan, ml_dtypes.bfloat16))


@pytest.mark.parametrize("qtype", ["int4", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_a_model_with_less_noise(qtype, hf, orbax, tmp_path: Path):
    """The same bits in one pass and in two; GPTQ chooses other scales; the checkpoint loads like any other."""
    case = ONE_OF_EACH["qwen3"]
    rule = f"weight_qtype: {qtype}, tile_size: 32"
    quantize(orbax(case, "bfloat16"), tmp_path / "absmax", config(rule))
    mse = config(f"{rule}, weight_calibration_method: mse")
    quantize(orbax(case, "bfloat16"), tmp_path / "two", mse)
    quantize_source(hf(case, "bfloat16"), tmp_path / "one", mse)
    one, two = restore(tmp_path / "one"), restore(tmp_path / "two")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    facts = {n: read_manifest(tmp_path / n).quantization["parameters"] for n in ("absmax", "two")}
    for name, found in facts["two"].items():
        assert found["method"] == "mse"
        assert found["figures"]["noise"] < facts["absmax"][name]["figures"]["noise"]
    gptq = config(f"{rule}, weight_calibration_method: mse", "calibration: {method: gptq}\n")
    data = from_ids("ids", np.random.default_rng(0).integers(3, 100, (4, 24)))
    quantize(orbax(case, "bfloat16"), tmp_path / "gptq", gptq, data)
    kept = restore(tmp_path / "gptq")
    for part in ("qvalue", "scale"):
        assert any(not np.array_equal(kept[name], two[name]) for name in two if name.endswith(part))
    (logits,) = forward(tpuconv.load(tmp_path / "two", "float32"), [[3, 1, 4, 1, 5]], "float32")()
    decoded = {}
    for name, x in two.items():
        if name.endswith(".array.qvalue"):
            base = name.removesuffix(".array.qvalue")
            codes = np.asarray(x).astype(np.int8) if qtype == "int4" else np.asarray(x)
            decoded[base] = decoded_values(qtype, [codes.view(np.uint8), np.asarray(two[f"{base}.array.scale"])])
    plain = tpuconv.load(orbax(case, "bfloat16"), "float32")
    for name, value in decoded.items():
        *path, last = name.split(".")
        node = plain
        for key in path:
            node = node[int(key)] if key.isdigit() else getattr(node, key)
        getattr(node, last).set_value(value)
    (want,) = forward(plain, [[3, 1, 4, 1, 5]], "float32")()
    assert np.abs(logits - want).max() < 1e-4 * np.abs(want).max()


def test_a_recipe_has_scales_of_the_least_error_in_int4(orbax):
    space = find_choices(read_manifest(orbax(ONE_OF_EACH["qwen3"], "bfloat16"))).space
    chosen = [group.options[-1] for group in space.groups]
    assert {(option.qtype, option.method) for group in space.groups for option in group.options[1:]} == {
        ("int8", "absmax"),
        ("int4", "mse"),
    }
    written = parse_config(to_yaml(space, chosen, []).encode(), "recipe", "recipe.yaml")
    assert {rule.weight_calibration_method for rule in written.rules} == {"mse"}


def test_negative_scales_are_exported_and_read_back(orbax, tmp_path):
    """Our reader of compressed-tensors takes negative scales of integers, as auto-round writes them."""
    settings = "weight_qtype: int4, tile_size: 32, tile_axes: all, weight_calibration_method: mse"
    quantize(orbax(ONE_OF_EACH["qwen3"], "bfloat16"), tmp_path / "mse", config(settings))
    api.export(tmp_path / "mse", tmp_path / "hf")
    api.convert(tmp_path / "hf", tmp_path / "back")
    stored, back = restore(tmp_path / "mse"), restore(tmp_path / "back")
    negative = 0
    for name, x in stored.items():
        if name.endswith(".array.qvalue"):
            parameter = name.removesuffix(".array.qvalue")
            scale = np.asarray(stored[f"{parameter}.array.scale"])
            weights = decoded_values("int4", [np.asarray(x).astype(np.int8).view(np.uint8), scale])
            assert np.array_equal(weights.astype(ml_dtypes.bfloat16), np.asarray(back[parameter]))
            negative += int((scale.astype(np.float32) < 0).sum())
    assert negative > 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("weight_qtype: mxfp4, tile_size: 32, weight_calibration_method: mse", "scales of mxfp4 are not free"),
        ("weight_qtype: int8, act_qtype: int8, act_calibration_method: mse", "unknown calibration method"),
        ("weight_qtype: int8, weight_calibration_method: 'mse,2'", "unknown calibration method"),
    ],
)
def test_where_it_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(settings)
