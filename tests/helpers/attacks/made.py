"""Tiny sources and every kind of output of them, made as the commands make them."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np

from helpers.checkpoints import qwen3_config, random_checkpoint, read_tensors, write_checkpoint, write_safetensors
from helpers.conversions import export_checkpoint
from tpuconv import api
from tpuconv.checkpoint.device_layouts import DeviceLayout, write_layouts
from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.export.array_source import released_config
from tpuconv.convert.plan.arrays import with_quantization
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options, Plan
from tpuconv.convert.run.conversion import run
from tpuconv.convert.run.sizing import Limits
from tpuconv.models.registry import find_family, get_family
from tpuconv.sources.source import open_source


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder on a disk in memory, where the system has one: a flush takes no time there."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


LIMITS = Limits(jobs=1, max_memory=2**30)
CONFIG = qwen3_config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8)
COMPANIONS = {
    "generation_config.json": '{"eos_token_id": 1}',
    "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE"}}',
    "tokenizer_config.json": '{"model_max_length": 4096}',
    "LICENSE": "Anybody may do anything with this.",
    "README.md": "# A model\n\nIts licence applies.\n",
}


def source(folder: Path, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """A source with all companions; another seed has other values, and other companions of the same sizes."""
    random_checkpoint(folder, CONFIG | changes, shards=shards, seed=seed)
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text.replace("a", "bcdefgh"[seed % 7]) if seed and "json" not in name else text)
    if seed:
        (folder / "tokenizer.json").write_text(COMPANIONS["tokenizer.json"].replace("BPE", f"BP{seed % 10}"))
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {1 + seed % 9}}}')
        (folder / "tokenizer_config.json").write_text(f'{{"model_max_length": {4096 + seed % 999}}}')
    return folder


def encoded_source(folder: Path, seed: int = 0) -> Path:
    """The same with matrices in FP8, in blocks."""
    plain, rng = random_checkpoint(folder, CONFIG, seed=seed), np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, x in read_tensors(plain).items():
        if name.endswith("_proj.weight"):
            tensors[name] = rng.normal(size=x.shape).astype(ml_dtypes.float8_e4m3fn)
            scales = rng.uniform(0.5, 2, tuple(-(-n // 8) for n in x.shape))
            tensors[f"{name}_scale_inv"] = scales.astype(np.float32)
        else:
            tensors[name] = x
    encoding = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    return write_checkpoint(folder, CONFIG | {"quantization_config": encoding}, tensors)


def plan_of(folder: Path, options: Options | None = None, **origin: Any) -> Plan:
    opened = open_source(folder, **origin)
    family = find_family(opened.config)
    config = family.config.from_hf(opened.config)
    return make_plan(opened, family.name, family.table, config, options or Options())


def drain(items: Any) -> None:
    for _ in items:
        pass


def convert(folder: Path, out: Path, options: Options | None = None, *, overwrite: bool = False, **origin: Any) -> None:
    drain(run(plan_of(folder, options, **origin), out, LIMITS, overwrite=overwrite))


def convert_for(target: str, folder: Path, out: Path, **options: Any) -> None:
    api.convert(folder, out, target=target, jobs=1, **options)


def quantization_plan(ckpt: Path) -> Plan:
    from tpuconv.quantize.apply import quantization
    from tpuconv.quantize.config import find_config

    opened, rules = open_checkpoint(ckpt), find_config("int8_weight_only")
    family, table = get_family(opened.manifest.family), opened.table()
    config = family.config.from_hf(opened.config)
    plain = make_plan(opened, family.name, table, config, Options())
    return with_quantization(plain, quantization(plain, family, config, rules))


def quantize(ckpt: Path, out: Path, *, overwrite: bool = False) -> None:
    drain(run(quantization_plan(ckpt), out, LIMITS, overwrite=overwrite))


def export(ckpt: Path, out: Path, *, overwrite: bool = False) -> None:
    manifest = read_manifest(ckpt)
    family = get_family(manifest.family)
    config = family.config.from_hf(released_config(manifest))
    drain(export_checkpoint(manifest, family.table, config, out, overwrite=overwrite))


def adapter(folder: Path, ckpt: Path, rank: int = 2) -> Path:
    """A LoRA adapter of some matrices of a source, with the files that PEFT writes."""
    names = [name for name in read_tensors(ckpt) if re.search(r"(q|down)_proj\.weight$", name)]
    rng, tensors = np.random.default_rng(0), {}
    for name in names:
        rows, columns = read_tensors(ckpt)[name].shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = rng.normal(size=(rank, columns)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.normal(size=(rows, rank)).astype(np.float32)
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG | {"r": rank}))
    return folder


ADAPTER_CONFIG = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model", "bias": "none"},
    **{"lora_alpha": 4, "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None},
    **{"target_modules": ["q_proj", "down_proj"], "rank_pattern": {}, "alpha_pattern": {"layers.0.*q_proj": 8}},
}


def with_layouts(ckpt: Path) -> Path:
    """Written into a checkpoint, as `fit --write-layouts` does it."""
    names = [a.name for a in read_manifest(ckpt).arrays.values() if len(a.shape) == 2]
    write_layouts(
        ckpt, "TPU v5 lite", {"tensor": 8}, dict.fromkeys(names, DeviceLayout("bfloat16", (1, 0), ((8, 128),)))
    )
    return ckpt
