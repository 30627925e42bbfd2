"""The `quantization_config` of config.json, which tells servers how weights are stored."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tpuconv.convert.export.serving.formats import IN_AWQ, IN_COMPRESSED, IN_FP8, IN_MXFP4, WeightGroup
from tpuconv.errors import UsageError

HEAD = "lm_head"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Projections that servers join into one matrix, which has one format."""
Groups = Mapping[WeightGroup, list[str]]
"""The modules of each group."""


def describe_encoding(scheme: str, groups: Groups, plain: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        scheme: the `quant_method`.
        groups: the modules of each group.
        plain: linear layers that are not quantized.

    Raises:
        UsageError: servers join modules of different formats, or the scheme cannot tell the groups apart.
    """
    module_group = {module: group for group, modules in groups.items() for module in modules}
    plain = list(plain)
    if HEAD not in module_group and not any(name.endswith(HEAD) for name in plain):
        plain.append(HEAD)  # tied to the embedding, it is a linear layer to servers
    _check_fused(module_group, plain)
    return DESCRIPTIONS[scheme](groups, plain)


def _compressed(groups: Groups, plain: list[str]) -> dict[str, Any]:
    every = [module for modules in groups.values() for module in modules]
    described = {
        f"group_{i}": group.to_json(["Linear"] if len(groups) == 1 else _patterns(modules, every))
        for i, (group, modules) in enumerate(groups.items())
    }
    formats = {group.format.name for group in groups}
    return {
        "quant_method": IN_COMPRESSED,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": described,
        "ignore": _patterns(plain, [*plain, *every]),
        "kv_cache_scheme": None,
    }


def _fp8(groups: Groups, plain: list[str]) -> dict[str, Any]:
    _check_names(IN_FP8, groups, plain, lambda name, module: module.startswith(f"{name}."))
    sizes = [{group.block[axis] for group in groups} - {None} for axis in (0, 1)]
    if any(len(found) != 1 for found in sizes):
        found = " and ".join(
            sorted({f"{rows or 'all'}x{columns or 'all'}" for rows, columns in (g.block for g in groups)})
        )
        raise UsageError(
            f"weights have FP8 scales for blocks of {found}, and fp8 has one size of blocks for all",
            hint="give all rules the same tile_size, or export with --scheme compressed-tensors",
        )
    return {
        "quant_method": IN_FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [found.pop() for found in sizes],
        "modules_to_not_convert": plain,
    }


def _awq(groups: Groups, plain: list[str]) -> dict[str, Any]:
    _check_names(IN_AWQ, groups, plain, lambda name, module: name in module)
    if len(sizes := {group.group_size for group in groups}) > 1:
        found = " and ".join(sorted(str(size or "all") for size in sizes))
        raise UsageError(
            f"weights have scales for groups of {found} inputs, and awq has one size of groups for all",
            hint="give all rules the same tile_size, or export with --scheme compressed-tensors",
        )
    return {
        "quant_method": IN_AWQ,
        "version": "gemm",
        "bits": 4,
        "group_size": sizes.pop() or -1,
        "zero_point": True,
        "modules_to_not_convert": plain,
    }


def _mxfp4(groups: Groups, plain: list[str]) -> dict[str, Any]:
    return {"quant_method": IN_MXFP4, "modules_to_not_convert": list(PLAIN_IN_MXFP4)}


PLAIN_IN_MXFP4 = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", HEAD)
"""As config.json of gpt-oss has it: only experts are in MXFP4."""

DESCRIPTIONS: Mapping[str, Callable[[Groups, list[str]], dict[str, Any]]] = {
    IN_COMPRESSED: _compressed,
    IN_FP8: _fp8,
    IN_AWQ: _awq,
    IN_MXFP4: _mxfp4,
}


def _check_names(scheme: str, groups: Groups, plain: list[str], takes: Callable[[str, str], bool]) -> None:
    """Raises UsageError if a server would take a quantized module for a plain one, by the name of that, or never
    quantizes it."""
    for module in (module for modules in groups.values() for module in modules):
        if module.endswith(HEAD):
            raise UsageError(
                f"{module} is quantized, and servers read a plain head with {scheme}",
                hint="leave the head out of the quantization config, or export with --scheme compressed-tensors",
            )
        if name := next((name for name in plain if takes(name, module)), None):
            raise UsageError(
                f"{module} is quantized and {name} is not, which {scheme} cannot tell apart by name",
                hint="quantize both or none of them, or export with --scheme compressed-tensors",
            )


def _patterns(modules: list[str], everything: list[str]) -> list[str]:
    """The modules as patterns that fit no other one, numbers left out where all have them; else names."""
    chosen, out = set(modules), []
    forms: dict[str, list[str]] = {}
    for module in everything:
        forms.setdefault(_form(module), []).append(module)
    for form in dict.fromkeys(map(_form, modules)):
        alike = forms[form]
        if len(alike) == 1:
            out.append(alike[0])
        elif chosen.issuperset(alike):
            out.append(f"re:{form}$")
        else:
            out += [module for module in alike if module in chosen]
    return out


def _form(module: str) -> str:
    return re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(module))


def _check_fused(group_of: Mapping[str, WeightGroup], plain: list[str]) -> None:
    known = set(plain)
    for module, group in group_of.items():
        front, _, last = module.rpartition(".")
        for names in FUSED:
            if last not in names:
                continue
            for other in (f"{front}.{name}" for name in names if name != last):
                if other in known or group_of.get(other, group) != group:
                    raise UsageError(
                        f"{module} and {other} are not quantized alike, and servers join them into one matrix",
                        hint="give them the same rule in the quantization config",
                    )
