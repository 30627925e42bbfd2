"""The Python interface: one function for each command. Functions return dataclasses, never print, and raise children of
`tpuconv.errors.TpuconvError`. `progress` is called with a `Progress` while long work runs.

    from tpuconv import api

    conversion = api.convert("Qwen/Qwen3-8B", "/data/Qwen3-8B")
    assert api.verify(conversion.out).passed

Importing this module imports neither jax nor numpy; a function imports what it needs when it is called.
"""

from tpuconv.api.comparison import CheckpointComparison, compare_checkpoints
from tpuconv.api.conversion import convert, plan
from tpuconv.api.converted import Conversion, ConversionPlan
from tpuconv.api.evaluation import Comparison, compare
from tpuconv.api.explanation import explain
from tpuconv.api.exporting import Export, ExportPlan, export, plan_export
from tpuconv.api.inspection import Inspection, inspect, propose
from tpuconv.api.model_recipe import recipe
from tpuconv.api.models import generator, load, save
from tpuconv.api.performance import Benchmark, Fit, benchmark, fit
from tpuconv.api.pushing import Push, push
from tpuconv.api.quantization import plan_quantization, quantize
from tpuconv.api.ray_tasks import on_ray
from tpuconv.api.recipe_facts import ModelRecipe
from tpuconv.api.recipes import Sensitivity, sensitivity
from tpuconv.api.resharding import Resharding, plan_reshard, reshard
from tpuconv.api.served import ServerComparison, compare_server
from tpuconv.api.verification import Verification, verify
from tpuconv.api.weight_maps import weight_map
from tpuconv.explanations import Explanation
from tpuconv.progress import Bar, Progress

__all__ = [
    "Bar",
    "Benchmark",
    "CheckpointComparison",
    "Comparison",
    "Conversion",
    "ConversionPlan",
    "Explanation",
    "Export",
    "ExportPlan",
    "Fit",
    "Inspection",
    "ModelRecipe",
    "Progress",
    "Push",
    "Resharding",
    "Sensitivity",
    "ServerComparison",
    "Verification",
    "benchmark",
    "compare",
    "compare_checkpoints",
    "compare_server",
    "convert",
    "explain",
    "export",
    "fit",
    "generator",
    "inspect",
    "load",
    "on_ray",
    "plan",
    "plan_export",
    "plan_quantization",
    "plan_reshard",
    "propose",
    "push",
    "quantize",
    "recipe",
    "reshard",
    "save",
    "sensitivity",
    "verify",
    "weight_map",
]
