"""Static scales of KV caches as servers read them: two tensors beside the projections of each attention, and the
`kv_cache_scheme` of compressed-tensors."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.names import CACHE_SCALES
from tpuconv.notation.layout import UNIT
from tpuconv.notation.table import Map, MappingTable, row_indices
from tpuconv.options import KV_CACHES

KEYS = ".attn.k.kernel"
"""The suffix of the projection beside which the scales are."""
PER_HEAD = "attn_head"
"""The strategy with a scale for each head, in tensors [K, 1, 1]."""


def cache_scales_of(manifest: Manifest) -> str | None:
    """Returns which static scales of KV caches a checkpoint holds, of `KV_CACHES`; None if it holds none."""
    calibration: dict[str, str] = (manifest.quantization or {}).get("calibration", {})
    return calibration.get("kv_cache")


def with_cache_scales(table: MappingTable, manifest: Manifest) -> MappingTable:
    """Returns a checkpoint's table, from released tensors to parameters, with the rows of its static scales of KV
    caches."""
    found = cache_scales_of(manifest)
    if found is None:
        return table
    stored = {name.split(".attn.")[0] for name in manifest.arrays if name.endswith(CACHE_SCALES)}
    rows = (row for row in _rows(table, KV_CACHES[found]) if _has_layers(row, stored))
    return table.with_rows([*table.rows, *rows])


def _has_layers(row: Map, stored: Collection[str]) -> bool:
    """Returns True if some of these layers are of a row; others of the table may have projections without a cache."""
    layers = re.compile(re.sub(r"\\{.*?\\}", r"\\d+", re.escape(row.jax_names[0].split(".attn.")[0])))
    return any(map(layers.fullmatch, stored))


def _rows(table: MappingTable, strategy: str) -> Iterator[Map]:
    stored, own = (f"K {UNIT} {UNIT}", "K") if strategy == PER_HEAD else (UNIT, UNIT)
    for row in table.rows:
        for name in row.jax_names:
            if name.startswith("layers.") and name.endswith(KEYS):
                module, attention = row.hf_names[0].rsplit(".", 2)[0], name.removesuffix(".k.kernel")
                layout = f"{stored} -> {' '.join([*row_indices(row)[1], own])}"
                for suffix in CACHE_SCALES:
                    yield Map(f"{module}{suffix}", f"{attention}{suffix}", layout, row.when, buffer=True)


def cache_scheme(kv_cache: str) -> dict[str, Any]:
    """Returns the `kv_cache_scheme` of a choice of `KV_CACHES`."""
    return {"num_bits": 8, "type": "float", "strategy": KV_CACHES[kv_cache], "symmetric": True, "dynamic": False}
