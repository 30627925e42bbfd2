"""The `quantization_config` of config.json, which tells servers how weights are stored."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from tpuconv.convert.export.serving.caches import cache_scheme
from tpuconv.convert.export.serving.formats import IN_AWQ, IN_COMPRESSED, IN_FP8, IN_MXFP4, WeightGroup
from tpuconv.encodings.scheme import is_head
from tpuconv.errors import UsageError

HEAD = "lm_head"
SCORE_LAYERS = "score."
"""How the names of the linear layers of scores begin, where there are several."""
NAMELESS = "re:^$"
"""The pattern of modules without a name: vLLM 0.32 gives `SCORE_LAYERS` none, and quantizes what is not excluded."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("c_fc_0", "c_fc_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"),
)
"""Modules that servers join into one matrix, which has one format: `packed_modules_mapping` of vLLM 0.32's models."""
EXPERTS_MODULE = "experts"
"""The module that holds the routed experts of a layer. Servers join all their matrices."""
EXPERT = re.compile(rf"(.*\.{EXPERTS_MODULE})\.\d+\..*")
"""A module of one expert."""
IN_LIST = re.compile(r"(?:(.*?)\.)?([^.]+\.\d+\..*)")
"""A module with a number: what stands before the list of modules, and the rest."""
NUMBER = re.compile(r"(?<=\\\.)\d+(?=\\\.)")
"""A number in an escaped name."""
NUMBERED = re.compile(r"\.\d+\.")
"""A number in a name."""
REGEX = "re:"
"""The begin of a pattern."""
INNER = re.compile(r"((model|thinker)\.)*")
"""Modules that have all parts of a model but the head."""
Groups = Mapping[WeightGroup, list[str]]
"""The modules of each group."""


def describe_encoding(scheme: str, groups: Groups, plain: Iterable[str], kv_cache: str | None = None) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json.

    Args:
        scheme: the `quant_method`.
        groups: the modules of each group.
        plain: linear layers that are not quantized.
        kv_cache: the static scales of KV caches, of `tpuconv.options.KV_CACHES`; None for none.

    Raises:
        UsageError: servers join modules of different formats, the scheme cannot tell the groups apart, or it has no
            scales of KV caches.
    """
    if kv_cache is not None and scheme != IN_COMPRESSED:
        raise UsageError(
            f"the checkpoint has static scales of KV caches, which {scheme} does not describe",
            hint='export with `scheme="compressed-tensors"`',
        )
    module_group = {module: group for group, modules in groups.items() for module in modules}
    plain = list(plain)
    if not any(map(is_head, module_group)) and not any(map(_is_named_head, plain)):
        plain.append(HEAD)  # to servers it is a linear layer of this name, tied or under another name in the release
    _check_fused(module_group, plain)
    if _has_score_layers(plain) and scheme != IN_COMPRESSED:
        raise UsageError(
            f"the scores of this model have layers to which servers give no name, and {scheme} cannot exclude them",
            hint='export with `scheme="compressed-tensors"`',
        )
    described = DESCRIPTIONS[scheme](groups, list(dict.fromkeys(map(_in_server, plain))))
    return described if kv_cache is None else described | {"kv_cache_scheme": cache_scheme(kv_cache)}


def _has_score_layers(modules: Iterable[str]) -> bool:
    return any(module.startswith(SCORE_LAYERS) for module in modules)


def _compressed(groups: Groups, plain: list[str]) -> dict[str, Any]:
    every = [module for modules in groups.values() for module in modules]
    fronts = {match[1] for match in map(IN_LIST.fullmatch, [*plain, *every]) if match}
    patterns = partial(_patterns, is_wrapped=not fronts <= {"model"})
    heads = patterns(list(filter(is_head, every)), every)  # to servers no linear layer, unless it is named
    described = {
        f"group_{i}": group.to_json(["Linear", *heads] if len(groups) == 1 else patterns(modules, every))
        for i, (group, modules) in enumerate(groups.items())
    }
    formats = {group.format.name for group in groups}
    return {
        "quant_method": IN_COMPRESSED,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": described,
        "ignore": [*patterns(plain, [*plain, *every]), *([NAMELESS] if _has_score_layers(plain) else [])],
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
            f"weights have FP8 scales for blocks of {found}, and fp8 has one size of blocks for all weights",
            hint='give all rules the same tile_size, or export with `scheme="compressed-tensors"`',
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
            f"weights have scales for groups of {found} inputs, and awq has one size of groups for all weights",
            hint='give all rules the same tile_size, or export with `scheme="compressed-tensors"`',
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
        if is_head(module):
            raise UsageError(
                f"{module} is quantized, and servers expect an unquantized head with {scheme}",
                hint='leave the head out of the quantization config, or export with `scheme="compressed-tensors"`',
            )
        if name := next((name for name in plain if takes(name, module)), None):
            raise UsageError(
                f"{module} is quantized and {name} is not, which {scheme} cannot tell apart by name",
                hint='quantize both or none of them, or export with `scheme="compressed-tensors"`',
            )


def _patterns(modules: list[str], everything: list[str], *, is_wrapped: bool) -> list[str]:
    """Returns the modules as patterns that fit no other one, numbers left out where all have them; else names, and
    patterns beside. `is_wrapped`: True if the layers are a part of the model."""
    chosen, out = set(modules), []
    pattern = partial(_pattern, is_wrapped=is_wrapped)
    forms: dict[str, list[str]] = {}
    for module in everything:
        forms.setdefault(NUMBER.sub(r"\\d+", pattern(module)), []).append(module)
    for form in dict.fromkeys(NUMBER.sub(r"\\d+", pattern(module)) for module in modules):
        alike = forms[form]
        if len(alike) > 1 and chosen.issuperset(alike):
            out.append(form)
        else:
            is_head_alone = len(alike) == 1 and _is_named_head(alike[0])
            has_name = not _is_experts(alike[0]) and not (is_wrapped and ("." not in alike[0] or is_head_alone))
            found = [module for module in alike if module in chosen]
            out += found if has_name else map(pattern, found)
            if has_name and is_wrapped:
                out += _in_parts(found, [module for module in everything if module not in chosen])
    return out


def _in_parts(modules: list[str], others: list[str]) -> Iterator[str]:
    """Yields patterns of modules within their part of the model, such as `vision_tower`, that fit no other one:
    transformers, which translates no names, may have the part within another one, or fewer or more modules between.
    Modules with numbers have one pattern, which names their layers if others would fit."""
    forms: dict[str, list[str]] = {}
    for module in modules:
        if pattern := _in_part(module):
            forms.setdefault(NUMBER.sub(r"\\d+", pattern), []).append(pattern)
    kinds = {NUMBERED.sub(".0.", other) for other in others}
    for form, patterns in forms.items():
        if not _fits_any(form, kinds):
            yield form
        elif form.count(r"\d+") == 1:
            numbers = "|".join(number for pattern in patterns for number in NUMBER.findall(pattern))
            if not _fits_any(of_layers := form.replace(r"\d+", f"({numbers})"), others):
                yield of_layers


def _fits_any(pattern: str, modules: Iterable[str]) -> bool:
    fits = re.compile(pattern.removeprefix(REGEX)).match
    return any(map(fits, modules))


def _in_part(module: str) -> str:
    """Returns the pattern of a module within its part; empty if it is in none."""
    front, _, rest = INNER.sub("", module, count=1).partition(".")
    if not rest or rest[0].isdigit():
        return ""
    match = IN_LIST.fullmatch(rest)
    return rf"{REGEX}(.*\.)?{re.escape(front)}\.(.*\.)?{re.escape(match[2] if match else rest)}$"


def _pattern(module: str, *, is_wrapped: bool) -> str:
    """Returns the pattern of a module.

    To servers experts are modules of this one. A part of a model has another name in servers: they translate names
    with a dot, but not patterns.
    """
    match = IN_LIST.fullmatch(module) if is_wrapped else None
    name = re.escape(HEAD if is_wrapped and _is_named_head(module) else match[2] if match else module)
    return REGEX + (r"(.*\.)?" if is_wrapped else "") + name + (r"(\.|$)" if _is_experts(module) else "$")


def _is_named_head(module: str) -> bool:
    return module.rpartition(".")[2] == HEAD


def _in_server(module: str) -> str:
    """Returns the module that servers have in place of an expert."""
    match = EXPERT.fullmatch(module)
    return match[1] if match else module


def _is_experts(module: str) -> bool:
    return module.endswith(f".{EXPERTS_MODULE}")


def _check_fused(group_of: Mapping[str, WeightGroup], plain: Iterable[str]) -> None:
    """Raises UsageError if modules that servers join are not quantized alike."""
    joined: dict[tuple[str, int], tuple[str, WeightGroup | None]] = {}
    for module in (*group_of, *plain):
        for matrix in _matrices_with(module):
            first, group = joined.setdefault(matrix, (module, group_of.get(module)))
            if group_of.get(module) != group:
                raise UsageError(
                    f"{first} and {module} are not quantized alike, and servers join them into one matrix",
                    hint="give them the same rule in the quantization config; auto:BITS does so if it quantizes the "
                    'release by `target="huggingface"`',
                )


def _matrices_with(module: str) -> Iterator[tuple[str, int]]:
    """Returns the keys of the matrices of a server that contain the matrix of this module."""
    if _is_experts(experts := _in_server(module)):
        yield experts, len(FUSED)
        return
    for number, names in enumerate(FUSED):
        for name in names:
            if f".{module}".endswith(f".{name}"):
                yield module.removesuffix(name), number
