"""The least work of a step, which a benchmark divides the times by."""

import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from helpers.families import CASES, CORE, Case, one_fast_of_each
from helpers.quantizing import ONE_OF_EACH, quantize
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.names import QVALUE, ZERO_POINT
from tpuconv.quantize.config import parse_config
from tpuconv.restore import abstract_model
from tpuconv.verify.benchmark import Roofline


@pytest.mark.parametrize(
    ("family", "rule", "bits"),
    [
        ("llama", "weight_qtype: int4, tile_size: 32", 4),
        pytest.param("llama", "weight_qtype: int8, act_qtype: int8", 8, marks=pytest.mark.slow),
        pytest.param(
            "llama", "weight_qtype: int4, tile_size: 32, weight_calibration_method: minmax", 4, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_moe", "weight_qtype: mxfp4, tile_size: 32", 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_reads_the_bits_of_its_weights_and_a_prefill_multiplies_no_scales(
    family: str, rule: str, bits: int, orbax: Any, tmp_path: Path
) -> None:
    modules = "layers/.*/moe/(gate|up|down)" if "moe" in family else "layers/.*"
    config = parse_config(f"qwix: {{rules: [{{module_path: '{modules}', {rule}}}]}}".encode(), "low", "low.yaml")
    plain = orbax(ONE_OF_EACH[family])
    quantize(plain, tmp_path / "out", config)
    manifests = [read_manifest(plain), read_manifest(tmp_path / "out")]
    before, after = (Roofline(abstract_model(manifest)) for manifest in manifests)
    assert after.prefill_flops(2, 30) == before.prefill_flops(2, 30)
    rows = manifests[1].arrays["embed.embedding"].shape[0]
    batch = before.experts  # so that every expert is read

    def size(name: str, array: Any) -> float:
        width = bits if name.endswith((QVALUE, ZERO_POINT)) else 8 * np.dtype(array.dtype).itemsize
        return prod(array.shape) * width / 8 * (batch / rows if name == "embed.embedding" else 1)

    expected = sum(size(name, array) for name, array in manifests[1].arrays.items())
    assert after.step_bytes(batch, 0) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("key", "chosen", "tables"),
    [
        ("gemma3", 0, ()),  # with an encoder of images
        ("gemma3n_text-plain", 0, ("per_layer.embed.embedding",)),
        pytest.param("gemma4_text-plain", 0, ("per_layer.embed.embedding",), marks=pytest.mark.slow),
        ("ernie4_5_moe-plain", 3, ()),
        ("hunyuan_v1_moe-plain", 3, ("embed.embedding",)),
        ("phimoe-plain", 2, ("embed.embedding",)),
    ],
)
def test_a_step_reads_no_encoder_a_row_of_each_table_and_the_chosen_experts(
    key: str, chosen: int, tables: Sequence[str], orbax: Any, whole: Any
) -> None:
    case = next((case for case in CASES if case.id == key), None)
    manifest = read_manifest(whole(key)[1] if case is None else orbax(case))

    def size(name: str, array: Any) -> float:
        share = chosen / array.shape[0] if re.search(r"moe\.(gate|up|down)\.kernel", name) else 1.0
        share = 1 / array.shape[0] if name in tables else share
        return 0 if name.startswith("vision.") else prod(array.shape) * np.dtype(array.dtype).itemsize * share

    expected = sum(size(name, array) for name, array in manifest.arrays.items())
    assert Roofline(abstract_model(manifest)).step_bytes(1, 0) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("case", one_fast_of_each(CORE))
def test_every_family_has_a_least_work(case: Case, orbax: Any) -> None:
    """A token is multiplied by weights of each layer, and by none more often than its layer runs."""
    model = abstract_model(read_manifest(orbax(case)))
    found, runs = Roofline(model), max(Counter(model.config.executed_layers).values())
    assert 0 < found.prefill_flops(1, 1) <= 2 * runs * sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert found.step_bytes(1, 0) > 0
