"""Configs with a calibration, and samples for them."""

from pathlib import Path

import numpy as np

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.quantize.calibrate.data import from_ids
from tpuconv.quantize.config import QuantConfig, parse_config

INNER = r"layers/\d+/(attn|mlp|moe)/(?!(.*/)?router).*"
INT4 = f"{{module_path: '{INNER}', weight_qtype: int4, tile_size: 32}}"
MSE = INT4.replace("tile_size: 32", "tile_size: 32, tile_axes: all, weight_calibration_method: mse")
DATA = from_ids("ids", np.random.default_rng(0).integers(3, 100, (4, 24)))


def config(rule: str = INT4, calibration: str | None = "{method: gptq}") -> QuantConfig:
    """A config with one rule, or several after each other, and a calibration."""
    text = f"qwix: {{rules: [{rule}]}}\n" + (f"calibration: {calibration}\n" if calibration else "")
    return parse_config(text.encode(), "mine", "mine.yaml")


def same_arrays(a: Path, b: Path) -> bool:
    """Whether two checkpoints have the same bits."""
    sums = [{n: array.xxh3 for n, array in read_manifest(path).arrays.items()} for path in (a, b)]
    return sums[0] == sums[1]
