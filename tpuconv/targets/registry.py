"""The table of targets. Other packages add theirs by entry points."""

from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from tpuconv.errors import UsageError
from tpuconv.names import OWN_TARGET
from tpuconv.plugins import by_name, check_alone, plugin
from tpuconv.targets.target import OWN, Target

ENTRY_POINTS = "tpuconv.targets"
"""The group of entry points for targets."""

TARGETS = {
    "maxtext": "tpuconv.targets.maxtext:MAXTEXT",
    "tunix": "tpuconv.targets.tunix:TUNIX",
    "gemma": "tpuconv.targets.gemma:GEMMA",
    "nnx": "tpuconv.targets.target:NNX",
    "huggingface": "tpuconv.targets.target:HUGGINGFACE",
    "jax-llm-examples": "tpuconv.targets.jax_llm_examples:JAX_LLM_EXAMPLES",
}
"""The targets of this package besides the default, by name."""


SAFETENSORS_READERS = ("vllm", "sglang", "tpu-inference", "transformers")
"""Programs that read the output for `huggingface`: their names are given for it."""


@cache
def _plugins() -> dict[str, list[EntryPoint]]:
    return by_name(entry_points(group=ENTRY_POINTS))


def target_names() -> list[str]:
    """Returns the names of all targets: the default first, then the targets of this package."""
    return list(dict.fromkeys((OWN_TARGET, *TARGETS, *_plugins())))


def get_target(name: str) -> Target:
    """Returns the target of this name.

    Raises:
        UsageError: there is no such target, or several packages have it, or its package cannot be imported or has
            another one.
    """
    points = _plugins().get(name, [])
    check_alone("target", name, points, is_ours=name in (OWN_TARGET, *TARGETS))
    if name == OWN_TARGET:
        return OWN
    if name in TARGETS:
        module, _, attribute = TARGETS[name].partition(":")
        found: Target = getattr(import_module(module), attribute)
        return found
    if not points:
        near = ["huggingface"] if name.lower() in SAFETENSORS_READERS else get_close_matches(name, target_names(), n=1)
        raise UsageError(
            f"there is no target '{name}'",
            hint=f"known are {', '.join(target_names())}" + (f"; the nearest is {near[0]}" if near else ""),
        )
    return plugin("target", Target, points[0])


def all_targets() -> list[Target]:
    """Returns all targets whose packages can be imported."""
    found = []
    for name in target_names():
        with suppress(UsageError):
            found.append(get_target(name))
    return found
