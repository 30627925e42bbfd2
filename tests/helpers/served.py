"""What quantized exports for servers stand for: by our arrays, and by the decompressors of compressed-tensors."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors
from helpers.conversions import restore
from tpuconv import api
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.models.registry import get_family


def dequantized(ckpt: Path, named_by: Path | None = None) -> dict[str, np.ndarray]:
    """Every quantized weight under its released name: values times scales in float32, rounded to bfloat16. Each scale
    is repeated for all values that it stands for, and takes the way of the values. The names are those of the
    config.json in `named_by`, if it is given."""
    manifest, arrays = read_manifest(ckpt), restore(ckpt)
    family, raw = get_family(manifest.family), json.loads(((named_by or ckpt) / "config.json").read_text())
    out = {}
    for binding in family.table.bind(family.read_config(raw)):
        facts = manifest.quantization["parameters"]
        if not all(stack.names[0] in facts for stack in binding.dst):
            continue

        values = {}
        for stack in binding.dst:
            (name,) = stack.names
            scales = arrays[f"{name}.array.scale"].astype(np.float32)
            zeros = arrays.get(f"{name}.array.zero_point", np.zeros(scales.shape)).astype(np.float32)
            for axis, tile in enumerate(facts[name]["tiles"]):
                scales, zeros = np.repeat(scales, tile, axis), np.repeat(zeros, tile, axis)
            values[name] = (arrays[f"{name}.array.qvalue"].astype(np.float32) - zeros) * scales
        out |= {name: x.astype(ml_dtypes.bfloat16) for name, x in binding.inverse(values.__getitem__).items()}
    return out


def decompressed(folder: Path) -> dict[str, np.ndarray]:
    """What compressed-tensors makes of every quantized weight, in bfloat16, by the description in config.json."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(**json.loads((folder / "config.json").read_text())["quantization_config"])
    tensors = {name: to_torch(x) for name, x in read_tensors(folder).items()}
    out = {}
    for name in tensors:
        if not name.endswith(".weight_scale"):
            continue
        base = name.removesuffix(".weight_scale")
        (scheme,) = (s for s in config.config_groups.values() if any(_fits(target, base) for target in s.targets))
        assert not any(_fits(pattern, base) for pattern in config.ignore if pattern != "Linear")
        state = {part.removeprefix(f"{base}."): x for part, x in tensors.items() if part.startswith(f"{base}.")}
        weight = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        out[f"{base}.weight"] = weight.to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return out


def _fits(target: str, module: str) -> bool:
    return target in ("Linear", module) or (target.startswith("re:") and bool(re.match(target[3:], module)))


def to_torch(x: np.ndarray) -> torch.Tensor:
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    if x.dtype.name in kinds:
        return torch.from_numpy(x.view(f"i{x.itemsize}").copy()).view(kinds[x.dtype.name])
    return torch.from_numpy(x.copy())


def quantized(folder: Path, rules: str, **config) -> Path:
    """A checkpoint quantized by these rules."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    random_checkpoint(folder / "hf", qwen3_config(**(sizes | config)))
    (folder / "rules.yaml").write_text(f"summary: test\nqwix:\n  rules:\n{rules}gates: none\n")
    api.convert(folder / "hf", folder / "quantized", quantize=folder / "rules.yaml")
    return folder / "quantized"


def rule(path: str, **fields: object) -> str:
    lines = {"module_path": f"'{path}'", **fields}
    return "".join(f"    {'- ' if i == 0 else '  '}{key}: {value}\n" for i, (key, value) in enumerate(lines.items()))
