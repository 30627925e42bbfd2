"""The Python interface: one function for each command. Functions return dataclasses, never print, and raise children of
`tpuconv.errors.TpuconvError`. `progress` is called with a `Progress` while long work runs.

    from tpuconv import api

    conversion = api.convert("Qwen/Qwen3-8B", "/data/Qwen3-8B")
    assert api.verify(conversion.out).passed

Importing this module imports neither jax nor numpy; a function imports what it needs when it is called.
"""

from tpuconv.api.conversion import (
    Conversion,
    ConversionPlan,
    convert,
    plan,
    plan_quantization,
    quantize,
)
from tpuconv.api.evaluation import Comparison, Verification, compare, verify
from tpuconv.api.exporting import Export, export
from tpuconv.api.inspection import Inspection, inspect
from tpuconv.api.models import generator, load, save
from tpuconv.api.performance import Benchmark, Fit, benchmark, fit
from tpuconv.api.pushing import Push, push
from tpuconv.api.recipes import Sensitivity, sensitivity
from tpuconv.progress import Progress

__all__ = [
    "Benchmark",
    "Comparison",
    "Conversion",
    "ConversionPlan",
    "Export",
    "Fit",
    "Inspection",
    "Progress",
    "Push",
    "Sensitivity",
    "Verification",
    "benchmark",
    "compare",
    "convert",
    "export",
    "fit",
    "generator",
    "inspect",
    "load",
    "plan",
    "plan_quantization",
    "push",
    "quantize",
    "save",
    "sensitivity",
    "verify",
]
