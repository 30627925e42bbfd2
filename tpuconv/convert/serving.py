"""Quantized parameters as servers read them: in the formats of compressed-tensors 0.20, which vLLM, SGLang and
transformers load. Quantized values and scales are those of the checkpoint, bit for bit.

A scale of the checkpoint that stands for several groups of the format is repeated. What a format cannot hold is an
error that names the rule to change.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import SAFETENSORS_DTYPES
from tpuconv.convert.export_tensor import ExportTensor
from tpuconv.encodings.passthrough import exponents, pack_halves
from tpuconv.errors import UsageError
from tpuconv.layout import Shape, scale_layout
from tpuconv.mapping.table import Binding, Stack
from tpuconv.names import QVALUE, SCALE

WEIGHT, HEAD = ".weight", "lm_head"
PACK_WORD = 32
"""Bits of a word of packed integers."""


@dataclass(frozen=True)
class Format:
    """A format of compressed-tensors.

    Attributes:
        name: as config.json has it.
        kind: "int" or "float".
        bits: of one value.
        packed: how values lie in stored elements: "" for one each, "words" for integers with an offset in int32,
            "pairs" for two floats in a byte.
        group_size: the only one that the format has; None if it has any.
        exponents: whether scales are stored as exponents of two.
        in_groups: whether a group may be smaller than a row.
    """

    name: str
    kind: str
    bits: int
    packed: str = ""
    group_size: int | None = None
    exponents: bool = False
    in_groups: bool = True


FORMATS: Mapping[tuple[str, bool], Format] = {
    # Servers have no int8 in bytes without quantized activations, and no packed int8 with them.
    ("int8", True): Format("int-quantized", "int", 8, in_groups=False),
    ("int8", False): Format("pack-quantized", "int", 8, "words"),
    ("int4", False): Format("pack-quantized", "int", 4, "words"),
    ("float8_e4m3fn", True): Format("float-quantized", "float", 8, in_groups=False),
    ("float8_e4m3fn", False): Format("float-quantized", "float", 8, in_groups=False),
    ("mxfp4", False): Format("mxfp4-pack-quantized", "float", 4, "pairs", 32, exponents=True),
    ("mxfp8", False): Format("mxfp8-quantized", "float", 8, "", 32, exponents=True),
}
"""By type, and whether activations are quantized to it too."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Projections that servers join into one matrix, which has one format."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one format: a group of config.json. `group_size` is None where a scale is that of a row."""

    format: Format
    group_size: int | None
    activations: bool

    def to_json(self, targets: list[str]) -> dict[str, Any]:
        """The entry in config.json."""
        weights: dict[str, Any] = {
            "num_bits": self.format.bits,
            "type": self.format.kind,
            "symmetric": True,
            "dynamic": False,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
        }
        if self.format.exponents:
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        inputs = {key: weights[key] for key in ("num_bits", "type", "symmetric")} | {
            "dynamic": True,
            "strategy": "token",
            "group_size": None,
        }
        return {
            "targets": targets,
            "format": self.format.name,
            "weights": weights,
            "input_activations": inputs if self.activations else None,
            "output_activations": None,
        }


@dataclass(frozen=True)
class QuantizedRow:
    """A row whose parameters are quantized.

    Attributes:
        qvalues, scales: the row's inverse, from quantized values and from scales.
        repeats: how often each scale is repeated along every axis before that, by name of the array.
        of_qvalues, of_scales: the tensors that are made of the results.
        group: their format.
        modules: the names of the modules that have them.
    """

    qvalues: Binding
    scales: Binding
    repeats: Mapping[str, Shape]
    of_qvalues: tuple[ExportTensor, ...]
    of_scales: tuple[ExportTensor, ...]
    group: WeightGroup
    modules: tuple[str, ...]


def quantized_row(manifest: Manifest, binding: Binding, part: Callable[[str, str], str]) -> QuantizedRow:
    """How a row whose parameters are quantized by rules is written.

    Args:
        manifest: of the checkpoint.
        binding: the row, from released tensors to parameters.
        part: names the arrays of a parameter.

    Raises:
        UsageError: no format of servers holds it.
    """
    assert manifest.quantization is not None
    names = [stack.names[0] for stack in binding.dst]
    facts = [manifest.quantization["parameters"].get(name) for name in names]
    if any(each is None for each in facts) or len({(each["qtype"], each["rule"]) for each in facts}) > 1:
        raise _refused(names, "are joined in one tensor, and not quantized alike", facts)
    rule = manifest.quantization["rules"][facts[0]["rule"]]
    qtype, act = facts[0]["qtype"], rule.get("act_qtype")
    if str(facts[0].get("method", "absmax")).startswith("minmax"):
        raise _refused(names, "have zero points", facts)
    form = FORMATS.get((qtype, act is not None))
    if form is None or act not in (None, qtype):
        how = f"{qtype} with activations in {act}" if act else qtype
        raise _refused(names, f"are {how}: no format of servers has this", facts)
    if any(not name.endswith(WEIGHT) for stack in binding.src for name in stack.names):
        raise _refused(names, f"come from {binding.src[0].names[0]}, which is not a linear layer's weight", facts)

    inverse = binding.inverse
    follow = scale_layout(inverse.layout, binding.sizes, [each["tiles"] for each in facts])
    qvalues = replace(inverse, src=_parts(inverse.src, QVALUE, part))
    scales = replace(inverse, sizes=follow.sizes, src=_parts(inverse.src, SCALE, part))
    repeats = {stack.names[0]: refine[stack.depth :] for stack, refine in zip(scales.src, follow.refine, strict=True)}
    of_qvalues: list[ExportTensor] = []
    of_scales: list[ExportTensor] = []
    modules: list[str] = []
    groups: set[WeightGroup] = set()
    shapes = inverse.dst_shapes()
    scale_dtype = manifest.arrays[scales.src[0].names[0]].dtype
    for stack, blocks in zip(inverse.dst, follow.dst_blocks, strict=True):
        rows_block, columns_block = blocks[stack.depth :][-2:] if len(blocks) - stack.depth > 1 else (1, blocks[-1])
        for name in stack.names:
            shape, base = shapes[name], name.removesuffix(WEIGHT)
            size = _group_size(form, rule.get("tile_size"), columns_block, shape, names, facts)
            groups.add(WeightGroup(form, size, act is not None))
            of_qvalues += _values(form, base, shape, name)
            step = size or shape[-1]
            scale_shape = (shape[0], -(-shape[1] // step))
            of_scales.append(
                ExportTensor(
                    f"{base}{WEIGHT}_scale",
                    "U8" if form.exponents else SAFETENSORS_DTYPES[scale_dtype],
                    scale_shape,
                    name,
                    partial(_scales, form, rows_block, columns_block // step, scale_shape),
                )
            )
            modules.append(base)
    if len(groups) > 1:
        raise _refused(names, "have groups of several sizes", facts)
    return QuantizedRow(qvalues, scales, repeats, tuple(of_qvalues), tuple(of_scales), groups.pop(), tuple(modules))


def _refused(names: list[str], why: str, facts: list[Any]) -> UsageError:
    rule = next((each["rule"] for each in facts if each is not None), None)
    return UsageError(
        f"{' and '.join(names)} cannot be exported as quantized safetensors: they {why}",
        hint="export the checkpoint that this one was quantized from"
        + (f"; or change rule {rule + 1} of the quantization config" if rule is not None else ""),
    )


def _parts(stacks: tuple[Stack, ...], suffix: str, part: Callable[[str, str], str]) -> tuple[Stack, ...]:
    return tuple(Stack(tuple(part(name, suffix[1:]) for name in stack.names), stack.depth) for stack in stacks)


def _group_size(form: Format, tile: Any, block: int, shape: Shape, names: list[str], facts: list[Any]) -> int | None:
    """The size of a group along a row; None for one scale a row."""
    columns = shape[-1]
    size = form.group_size or (tile if isinstance(tile, int) and block % tile == 0 else block)
    if size >= columns and form.group_size is None:
        return None
    if not form.in_groups:
        raise _refused(names, f"have scales for groups of {size} inputs, which {form.name} does not have", facts)
    if block % size or columns % size:
        raise _refused(names, f"have scales for {block} of {columns} inputs, no whole number of groups", facts)
    return size


def _values(form: Format, base: str, shape: Shape, of: str) -> list[ExportTensor]:
    if form.packed == "words":
        words = -(-shape[1] // (PACK_WORD // form.bits))
        size = np.array(shape, np.int64)
        return [
            ExportTensor(f"{base}{WEIGHT}_packed", "I32", (shape[0], words), of, partial(pack_words, form.bits)),
            ExportTensor(f"{base}{WEIGHT}_shape", "I64", size.shape, of, lambda values: size),
        ]
    if form.packed == "pairs":
        return [ExportTensor(f"{base}{WEIGHT}_packed", "U8", (shape[0], shape[1] // 2), of, pack_halves)]
    dtype = "I8" if form.kind == "int" else "F8_E4M3"
    return [ExportTensor(base + WEIGHT, dtype, shape, of, lambda values: values)]


def pack_words(bits: int, values: np.ndarray) -> np.ndarray:
    """int32 [O, words] of integers [O, I], each with the offset 2^(bits - 1), the first in the lowest bits."""
    per_word = PACK_WORD // bits
    offset = np.uint32(1 << (bits - 1))
    unsigned = (values.astype(np.int8).astype(np.int32) + np.int32(offset)).astype(np.uint32)
    padded = np.pad(unsigned, ((0, 0), (0, -values.shape[1] % per_word)), constant_values=offset)
    words = np.zeros((values.shape[0], padded.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        words |= padded[:, i::per_word] << np.uint32(bits * i)
    return words.view(np.int32)


def _scales(form: Format, rows: int, columns: int, shape: Shape, scales: np.ndarray) -> np.ndarray:
    """The stored scales of the shape `shape`: each repeated over `rows` rows and `columns` groups."""
    repeated = scales if rows == 1 else np.repeat(scales, rows, axis=0)[: shape[0]]
    repeated = repeated if columns == 1 else np.repeat(repeated, columns, axis=1)[:, : shape[1]]
    return exponents(repeated) if form.exponents else repeated


def encoding(groups: Mapping[WeightGroup, list[str]], plain: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        groups: the modules of each group.
        plain: linear layers that are not quantized.

    Raises:
        UsageError: servers join modules of different formats.
    """
    module_group = {module: group for group, modules in groups.items() for module in modules}
    plain = list(plain)
    if HEAD not in module_group and not any(name.endswith(HEAD) for name in plain):
        plain.append(HEAD)  # tied to the embedding, it is a linear layer to servers
    _check_fused(module_group, plain)
    described = {
        f"group_{i}": group.to_json(["Linear"] if len(groups) == 1 else _patterns(modules, list(module_group)))
        for i, (group, modules) in enumerate(groups.items())
    }
    formats = {group.format.name for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": described,
        "ignore": _patterns(plain, [*plain, *module_group]),
        "kv_cache_scheme": None,
    }


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
