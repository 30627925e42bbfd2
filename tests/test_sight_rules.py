"""Quantization of the encoders of images and sounds, by rules that name them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import tpuconv
from helpers.conversions import LIMITS, assert_same
from helpers.quantizing import leaves
from helpers.sights import SIGHTS, Sight
from helpers.whole_sights import difference, logits, made
from tpuconv import api
from tpuconv.api.quantizers import quantizer_by
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.convert.plan.planning import planned_quantization
from tpuconv.convert.run.conversion import run
from tpuconv.errors import ConfigError
from tpuconv.names import QVALUE, SCALE
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.config import find_config
from tpuconv.quantize.provider import Provider, quantized


def tower_rules(folder: Path, parts: Sequence[str], **more: Any) -> Path:
    """A config for all products of these parts."""
    rules = [{"module_path": f"{part}/.*", "weight_qtype": "int8", **more} for part in parts]
    (folder / "towers.yaml").write_text(json.dumps({"qwix": {"rules": rules}}))
    return folder / "towers.yaml"


OF_EMBEDDINGS = {("inkling", "audio"), ("inkling_of_many_layers", "audio")}
"""Encoders without a product: a rule that names them has no effect."""


def encoded(case: Sight, model: Any) -> np.ndarray:
    """What the encoders make of a case, in one row. The logits of a random model of experts tell less: a small change
    chooses other experts."""
    arrays = jax.tree.leaves(model.see(case.ids_BT, case.mask_BT, **case.features))
    return np.concatenate([np.ravel(x) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)])


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGHTS)
def test_rules_that_name_towers_quantize_their_weights(name, whole, tmp_path):
    case, out = made(name), whole(name)[1]
    parts = [part for part in case.parts if (name, part) not in OF_EMBEDDINGS]
    config = tower_rules(tmp_path, parts)
    api.quantize(out, tmp_path / "int8", config=config)
    names = read_manifest(tmp_path / "int8").quantization["parameters"].keys()
    assert {each.partition(".")[0] for each in names} == set(parts)
    assert any(".layers." in each or ".projector." in each for each in names)
    ours, plain, rounded = (tpuconv.load(folder) for folder in (tmp_path / "int8", out, out))
    arrays = leaves(ours)
    assert_same(arrays, leaves(quantized(plain, Provider(find_config(str(config))))))
    state = nnx.state(rounded)
    for path, kernel in nnx.to_flat_state(state):
        if (each := ".".join(map(str, path))) + QVALUE in arrays:
            kernel[...] = jnp.asarray(arrays[each + QVALUE] * arrays[each + SCALE])
    nnx.update(rounded, state)
    assert difference(logits(case, ours), logits(case, rounded)) < 10 * case.tolerance
    have, want = encoded(case, ours), encoded(case, plain)
    assert 0 < np.linalg.norm(have - want) < 0.1 * np.linalg.norm(want)


def test_a_quantized_tower_is_what_qwix_makes_of_it(whole, tmp_path):
    """Of the encoder alone, which Qwix sees in a call with features."""
    case, out = made("qwen3_vl"), whole("qwen3_vl")[1]
    api.quantize(out, tmp_path / "int8", config=tower_rules(tmp_path, ["vision"]))
    ours: Any = tpuconv.load(tmp_path / "int8")
    vision = cast(Any, tpuconv.load(out)).vision
    arrays = vision.prepare(case.features).arrays
    rule = qwix.QuantizationRule(weight_qtype="int8")
    theirs = qwix.quantize_model(vision, qwix.PtqProvider([rule]), *map(jnp.asarray, arrays))
    assert_same(leaves(ours.vision), leaves(theirs))
    assert difference(ours.vision(*arrays)[0], np.asarray(theirs(*map(jnp.asarray, arrays))[0])) < 1e-5


def test_rules_of_towers_that_have_no_effect_are_refused(whole, tmp_path):
    out = whole("qwen3_vl")[1]
    with pytest.raises(ConfigError, match="of vision weights alone are quantized"):
        api.quantize(out, tmp_path / "a", config=tower_rules(tmp_path, ["vision"], act_qtype="int8"))
    with pytest.raises(ConfigError, match="has no effect"):
        api.quantize(out, tmp_path / "b", config=tower_rules(tmp_path, ["audio"]))
    rules = [{"module_path": path, "weight_qtype": "int8"} for path in ("vision/.*", "vision/layers/.*")]
    (tmp_path / "twice.yaml").write_text(json.dumps({"qwix": {"rules": rules}}))
    with pytest.raises(ConfigError) as caught:
        api.quantize(out, tmp_path / "c", config=tmp_path / "twice.yaml")
    assert any("line 1 already matches" in detail for detail in caught.value.details)


@pytest.fixture
def text_and_tower(tmp_path) -> Path:
    """A config for the layers of both."""
    rules = [{"module_path": path, "weight_qtype": "int8"} for path in ("layers/.*", "vision/layers/.*")]
    (tmp_path / "both.yaml").write_text(json.dumps({"qwix": {"rules": rules}}))
    return tmp_path / "both.yaml"


@pytest.mark.slow
def test_a_server_gets_a_quantized_tower(whole, tmp_path, text_and_tower):
    """And it comes back with the same values."""
    case, (_, out) = made("qwen3_vl"), whole("qwen3_vl")
    api.quantize(out, tmp_path / "int8", config=text_and_tower)
    api.export(tmp_path / "int8", tmp_path / "back")
    api.convert(tmp_path / "back", tmp_path / "again", encoding="keep")
    facts = [read_manifest(tmp_path / each).quantization["parameters"] for each in ("int8", "again")]
    assert facts[0].keys() == facts[1].keys()
    assert any(name.startswith("vision.") for name in facts[1])
    have, want = (logits(case, tpuconv.load(tmp_path / each)) for each in ("again", "int8"))
    assert np.array_equal(have, want)


@pytest.mark.slow
def test_a_quantized_tower_beside_stacked_layers(whole, tmp_path, text_and_tower):
    case, (src, _) = made("qwen3_vl"), whole("qwen3_vl")
    for folder, stacked in (("apart", False), ("stacked", True)):
        api.convert(src, tmp_path / folder, quantize=text_and_tower, scan_layers=stacked)
    have, want = (logits(case, tpuconv.load(tmp_path / folder)) for folder in ("stacked", "apart"))
    assert difference(have, want) < case.tolerance


@pytest.mark.slow
def test_a_calibration_rounds_towers_to_nearest(whole, tmp_path, text_and_tower):
    out = whole("qwen3_vl")[1]
    calibrated = {**json.loads(text_and_tower.read_text()), "calibration": {"method": "gptq"}}
    (tmp_path / "gptq.yaml").write_text(json.dumps(calibrated))
    api.quantize(out, tmp_path / "nearest", config=text_and_tower)
    data = from_ids("numbers", np.arange(64).reshape(2, 32) % 90)
    quantizer = quantizer_by(find_config(str(tmp_path / "gptq.yaml")), data)
    for _ in run(planned_quantization(out, quantizer, compress=False, ahead=None), tmp_path / "gptq", LIMITS):
        pass
    have, want = (leaves(tpuconv.load(tmp_path / each)) for each in ("gptq", "nearest"))
    towers = [name for name in want if name.startswith("vision.")]
    assert_same({name: have[name] for name in towers}, {name: want[name] for name in towers})
    assert any(not np.array_equal(have[name], want[name]) for name in want)
