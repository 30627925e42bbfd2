"""Schemes of AWQ (arXiv:2306.00978) and GPTQ (arXiv:2210.17323) as AutoAWQ, AutoGPTQ, GPTQModel and auto-round store
them: integers with zero points, packed in words of 32 bits. Matrices are [in, out], the groups along the inputs.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.groups import FLAG, NAMES, TEXT, SchemeGroup, compiled_pattern, pattern_to_check
from tpuconv.encodings.scheme import Scheme, is_head
from tpuconv.encodings.words import WORD_BITS, Words
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional

AWQ: Mapping[str, Any] = {
    "bits": Optional((int, None)),
    "group_size": Optional((int, None)),
    **dict.fromkeys(("checkpoint_format", "version", "format", "backend"), TEXT),
    "zero_point": FLAG,
    "modules_to_not_convert": NAMES,
}
OVERRIDE: Mapping[str, Any] = {
    "bits": Optional((int, None)),
    "group_size": Optional((int, None)),
    "sym": FLAG,
    "desc_act": FLAG,
}
GPTQ: Mapping[str, Any] = {
    **OVERRIDE,
    **dict.fromkeys(("checkpoint_format", "format"), TEXT),
    "is_marlin_format": FLAG,
    "lm_head": FLAG,
    "modules_in_block_to_quantize": Optional(([[str]], [str], None)),
    "dynamic": Optional((Each(OVERRIDE), None)),
}
"""Which keys of a description are read, and their types."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The place of each nibble of a word, from the lowest, among eight outputs (AutoAWQ's `pack_intweight`)."""
LLM_AWQ = "llm-awq"
GPTQ_BITS = (2, 3, 4, 8)
ZERO_SHIFTS = {None: 1, "gptq": 1, "gptq_v2": 0}
"""By `checkpoint_format`, how much less than the zero point is stored."""


def awq_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the group of an AWQ description.

    Raises:
        UnsupportedConfig: another packing than "gemm", or another number of bits than 4.
    """
    stored_as = _stored_as(quantization, "checkpoint_format", "version", "format") or "gemm"
    if quantization.get("backend") == LLM_AWQ:  # its kernels have a packing of their own
        stored_as = LLM_AWQ
    bits = quantization.get("bits", 4)
    if stored_as != "gemm" or bits != 4:
        raise UnsupportedConfig(
            f"AWQ with version={stored_as!r} and bits={bits!r} is not implemented",
            hint="known is version 'gemm' with 4 bits",
        )
    size, symmetric = quantization.get("group_size", 128), quantization.get("zero_point", True) is False
    words = Words(bits, 1, AWQ_ORDER)
    scheme = _scheme("AWQ", size, Affine(words, ".qzeros", words, symmetric=symmetric))
    left_out = quantization.get("modules_to_not_convert") or ()

    def takes(module: str) -> bool:
        return not is_head(module) and not any(name in module for name in left_out)

    return (SchemeGroup((scheme,), takes),)


def _stored_as(quantization: Mapping[str, Any], *keys: str) -> str | None:
    """Returns the format of the stored tensors in lower case: the value of the first of these keys that has one, in
    the order of transformers. Releases differ in the key by the version of the program that wrote them."""
    return next((str(quantization[key]).lower() for key in keys if quantization.get(key)), None)


def gptq_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a GPTQ description: the groups of `dynamic`, and all other modules.

    Raises:
        UnsupportedConfig: another `checkpoint_format`, or number of bits.
    """
    dynamic = quantization.get("dynamic") or {}
    patterns = {name: name.removeprefix("+:").removeprefix("-:") for name in dynamic}
    left_out = [pattern for name, pattern in patterns.items() if name.startswith("-:")]
    inside = quantization.get("modules_in_block_to_quantize")
    ends = tuple(chain.from_iterable([each] if isinstance(each, str) else each for each in inside or ()))

    def is_quantized(module: str) -> bool:
        if any(compiled_pattern(pattern).match(module) for pattern in left_out):
            return False
        if is_head(module):
            return bool(quantization.get("lm_head"))
        return not ends or module.endswith(ends)

    def takes(only: str, module: str) -> bool:
        return is_quantized(module) and bool(compiled_pattern(only).match(module))

    checked = tuple(chain.from_iterable(pattern_to_check("dynamic", name, p) for name, p in patterns.items()))
    groups = [
        SchemeGroup(_gptq({**quantization, **dynamic[name]}), partial(takes, pattern), checked)
        for name, pattern in patterns.items()
        if pattern not in left_out
    ]
    return (*groups, SchemeGroup(_gptq(quantization), is_quantized, checked))


def _gptq(description: Mapping[str, Any]) -> tuple[Scheme, ...]:
    bits, stored_as = description.get("bits", 4), _stored_as(description, "checkpoint_format", "format")
    if description.get("is_marlin_format"):
        stored_as = "marlin"
    if bits not in GPTQ_BITS or stored_as not in ZERO_SHIFTS:
        raise UnsupportedConfig(
            f"GPTQ with bits={bits!r} and checkpoint_format={stored_as!r} is not implemented",
            hint=f"known are {', '.join(map(str, GPTQ_BITS))} bits in the formats 'gptq' and 'gptq_v2'",
        )
    size = description.get("group_size", 128)
    affine = Affine(
        Words(bits, 0),
        ".qzeros",
        Words(bits, 1),
        ZERO_SHIFTS[stored_as],
        symmetric=description.get("sym", True) is not False,
        group_index=".g_idx",
        any_order=bool(description.get("desc_act")) and size != -1,
    )
    return (_scheme(f"GPTQ {bits} bits", size, affine),)


def _scheme(title: str, size: Any, affine: Affine) -> Scheme:
    """Returns a scheme of matrices [in, out] in groups of `size` inputs; -1 or None is one group of all."""
    if size is not None and size != -1 and not size > 0:
        raise UnsupportedConfig(f"{title} with group_size={size!r} is not implemented", hint="known are -1 and numbers")
    how = f"in groups of {size}" if size and size > 0 else "by channel"
    kind = ("" if affine.symmetric else ", asymmetric") + (", in any order" if affine.any_order else "")
    return Scheme(
        title=f"{title} {how}{kind}",
        values=".qweight",
        scales=".scales",
        name=".weight",
        dtype="I32",
        qtype="int8" if affine.words.bits == 8 else "int4",
        table=np.arange(-affine.middle, affine.middle, dtype=np.float32),
        per_element=WORD_BITS // affine.words.bits,
        blocks=(size if size and size > 0 else None, 1),
        affine=affine,
        any_sign=True,
        input_first=True,
        scale_dtype="F16",
    )
