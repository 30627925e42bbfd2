"""Adapters that a checkpoint has merged, merged into the reference too, by peft."""

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.errors import UsageError
from tpuconv.sources.adapter import names_for_peft, read_adapter
from tpuconv.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tpuconv.sources.headers import read_header
from tpuconv.text import format_count

WeightedAdapter = tuple[Path, float]
"""The local folder of an adapter, and the weight by which its changes are multiplied."""


def merged_adapters(manifest: Manifest, given: Sequence[str]) -> list[WeightedAdapter]:
    """Returns the adapters that a checkpoint has merged, in their order.

    Args:
        manifest: of the checkpoint.
        given: the adapters as a user names them; none for the Hub ids that the manifest names.

    Raises:
        UsageError: not all are given, or one is another adapter, or has another weight.
        TpuconvError: see `tpuconv.sources.adapter.read_adapter`.
    """
    merged = manifest.raw["options"].get("adapters") or []
    names = given or [f"{facts['name']}:{facts['weight']}" for facts in merged if "name" in facts]
    if not merged and names:
        raise UsageError(f"{manifest.folder} has no merged adapters", hint="leave out `adapter=`")
    if len(names) != len(merged):
        raise UsageError(
            f"{manifest.folder} has {format_count(len(merged), 'merged adapter')}, but {len(names)} to compare with",
            hint="give all in the order of the conversion by `adapter=`, or by `source=` a folder that peft merged; "
            "a manifest names no folder of a machine",
        )
    out = []
    for name, facts in zip(names, merged, strict=True):
        found = read_adapter(name)
        if (found.digest, found.weight) != (facts["xxh3_128"], facts["weight"]):
            raise UsageError(
                f"{name} has other contents, or another weight, than the adapter that was merged with the weight "
                f"{facts['weight']:g}",
                hint="give the adapter of the conversion, and its weight: `my-lora:0.5`",
            )
        out.append((found.folder, found.weight))
    return out


def with_adapters(model: Any, adapters: Sequence[WeightedAdapter]) -> Any:
    """Returns transformers' model with adapters merged.

    Raises:
        UsageError: peft is not installed.
    """
    if not adapters:
        return model
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as e:
        raise UsageError(f"peft merges adapters, and cannot be imported: {e}", hint="pip install peft") from None
    for folder, weight in adapters:
        config = PeftConfig.from_pretrained(str(folder))
        config.lora_alpha *= weight
        config.alpha_pattern = {name: alpha * weight for name, alpha in (config.alpha_pattern or {}).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft reads attributes that transformers renamed
            with _spelled_for_peft(folder) as own:
                model = PeftModel.from_pretrained(model, str(own), config=config).merge_and_unload()
    return model


@contextmanager
def _spelled_for_peft(folder: Path) -> Iterator[Path]:
    """Yields a folder with an adapter under the names that peft loads: it leaves out tensors of other names."""
    from safetensors.torch import load_file, save_file

    _, _, infos = read_header(folder / ADAPTER_WEIGHTS)
    names = names_for_peft(info.name for info in infos)
    if all(names.get(info.name) == info.name for info in infos):
        yield folder
        return
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    with TemporaryDirectory() as copy:
        shutil.copyfile(folder / ADAPTER_CONFIG, Path(copy) / ADAPTER_CONFIG)
        save_file({other: tensors[name] for name, other in names.items()}, Path(copy) / ADAPTER_WEIGHTS)
        yield Path(copy)
