"""Every command that publishes an output, in this process, on a disk or into a bucket."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tpuconv
from helpers.attacks import made
from tpuconv import api, persist
from tpuconv.checkpoint.reader import open_checkpoint
from tpuconv.convert.export import files as export_files
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.arrays import with_quantization
from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.types import Options
from tpuconv.convert.run.conversion import run
from tpuconv.location import Location
from tpuconv.models.registry import find_family
from tpuconv.sources.source import open_source

Command = Callable[[Any, bool], None]
"""Writes an output, with or without --overwrite."""

INT4_RULES = "qwix: {rules: [{module_path: 'layers/.*', weight_qtype: int4, tile_size: 8}]}"
PUBLISHERS = (
    *("convert", "quantize", "convert --quantize", "export", "save"),
    *("convert --target maxtext", "convert --target huggingface", "convert --scheme awq"),
    *("convert --keep-adapter", "export --adapter", "reshard"),
)


@dataclass(frozen=True)
class Publishers:
    """The commands that publish, by name; the command that makes another output, which each may replace; the sources
    of both."""

    run: dict[str, Command]
    old: dict[str, Command]
    new_source: Path
    other_source: Path


def small(patch: pytest.MonkeyPatch) -> None:
    """Units and files enough of a small model."""
    patch.setattr(sizes, "CHUNK_BYTES", 1500)
    patch.setattr(sizes, "SLAB_BYTES", 6000)
    patch.setattr(sizes, "UNIT_BYTES", 12_000)
    patch.setattr(export_files, "SHARD_BYTES", 6000)


def publishers(base: Path, new: Path, other: Path) -> Publishers:
    """The commands on two sources. What they read beside these is made in `base`."""
    from tpuconv.quantize.config import find_config

    (base / "int4.yaml").write_text(INT4_RULES)
    source, rules = open_source(new), find_config("int8_weight_only")
    family = find_family(source.config)
    ckpt, other_ckpt = base / "ckpt", base / "other-ckpt"
    made.convert(new, ckpt)
    made.convert(other, other_ckpt)
    checkpoint = open_checkpoint(ckpt)
    lora = str(made.adapter(base / "lora", new))
    _kept(new, lora)(base / "trained", False)
    run = {
        "convert": _convert(new),
        "quantize": _quantized(checkpoint, family, checkpoint.table(), rules),
        "convert --quantize": _quantized(source, family, family.table, rules),
        "export": _export(ckpt),
        "save": _saved(ckpt),
        "convert --target maxtext": _for_target(new, "maxtext"),
        "convert --target huggingface": _for_target(new, "huggingface"),
        "convert --scheme awq": _for_target(new, "huggingface", quantize=base / "int4.yaml", scheme="awq"),
        "convert --keep-adapter": _kept(new, lora),
        "export --adapter": _adapter(base / "trained" / "params", new),
        "reshard": _resharded(ckpt),
    }
    old = {name: _export(other_ckpt) if name == "export" else _convert(other) for name in run}
    return Publishers(run, old, new, other)


def _convert(folder: Path) -> Command:
    return lambda out, overwrite: made.convert(folder, out, overwrite=overwrite)


def _export(ckpt: Path) -> Command:
    return lambda out, overwrite: made.export(ckpt, out, overwrite=overwrite)


def _kept(folder: Path, lora: str) -> Command:
    def command(out: Location, overwrite: bool) -> None:
        api.convert(folder, out, adapter=[lora], keep_adapter=True, overwrite=overwrite, jobs=1)

    return command


def _adapter(tree: Path, config: Path) -> Command:
    def command(out: Location, overwrite: bool) -> None:
        api.export(tree, out, config=config, adapter=True, lora_alpha=4.0, overwrite=overwrite, jobs=1)

    return command


def _resharded(ckpt: Path) -> Command:
    def command(out: Location, overwrite: bool) -> None:
        api.reshard(ckpt, out, mesh={"data": 2}, scan_layers=True, overwrite=overwrite, jobs=1)

    return command


def _for_target(folder: Path, target: str, **options: Any) -> Command:
    def command(out: Location, overwrite: bool) -> None:
        api.convert(folder, out, target=target, overwrite=overwrite, jobs=1, **options)

    return command


def _quantized(source: Any, family: Any, table: Any, rules: Any) -> Command:
    from tpuconv.quantize.apply import quantization

    config = family.config.from_hf(source.config)
    plain = make_plan(source, family.name, table, config, Options())
    plan = with_quantization(plain, quantization(plain, family, config, rules))
    return lambda out, overwrite: made.drain(run(plan, out, made.LIMITS, overwrite=overwrite))


def _saved(ckpt: Path) -> Command:
    model = tpuconv.load(ckpt)
    return lambda out, overwrite: made.drain(persist.save(model, out, ckpt, made.LIMITS, overwrite=overwrite))
