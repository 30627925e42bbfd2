"""Explains how a config quantizes each parameter, from a plan alone."""

from typing import Any

from tpuconv.convert.plan.types import Plan
from tpuconv.quantize.config import QuantConfig


def explain(plan: Plan, rules: QuantConfig) -> list[dict[str, Any]]:
    """Returns a row for each parameter: the line of its rule, the type, elements of each axis that share a scale, bits
    of a weight, and bytes before and after; `line` and `qtype` are None if it is not quantized."""
    rows = []
    for name in dict.fromkeys(stack.names[0] for binding in plan.bindings for stack in binding.dst):
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
                "bytes_before": plan.source.tensors[name].nbytes if name in plan.source.tensors else None,
                "bytes": sum(array.nbytes for array in arrays),
            }
        )
    return rows
