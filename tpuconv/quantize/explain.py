"""Explains how a config quantizes each parameter, from a plan alone."""

from math import prod
from typing import Any

from tpuconv.convert.plan.types import Plan
from tpuconv.quantize.config import QuantConfig


def explain(plan: Plan, rules: QuantConfig) -> list[dict[str, Any]]:
    """Returns a row for each parameter: the line of its rule, the type, elements of each axis that share a scale, bits
    of a weight, and bytes unquantized and as stored; `line` and `qtype` are None if it is not quantized."""
    rows = []
    dtypes = {name: slab.dtype for unit in plan.units for slab in unit.slabs for name in slab.binding.dst_shapes()}
    shapes = {name: shape for binding in plan.bindings for name, shape in binding.dst_shapes().items()}
    for name, shape in shapes.items():
        arrays = [plan.arrays[part] for part in plan.stored_names(name)]
        encoder = plan.encoders.get(name)
        facts = encoder.to_json() if encoder else None
        rows.append(
            {
                "parameter": name,
                "line": rules.rules[facts["rule"]].line if facts else None,
                "qtype": facts["qtype"] if facts else None,
                "axes": arrays[0].axes,
                "shape": list(arrays[0].shape),
                "tiles": facts["tiles"] if facts else None,
                "tile_size": rules.rules[facts["rule"]].tile_size if facts else None,
                "bits": facts["bits"] if facts else 8 * arrays[0].dtype.itemsize,
                "bytes_before": prod(shape) * dtypes[name].itemsize,
                "bytes": sum(array.nbytes for array in arrays),
            }
        )
    return rows
