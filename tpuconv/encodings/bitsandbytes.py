"""Schemes of bitsandbytes: NF4 and FP4 (QLoRA, arXiv:2305.14314), and LLM.int8 (arXiv:2208.07339)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuconv.encodings.groups import FLAG, NAMES, TEXT, UNQUANTIZED, SchemeGroup, unless_named
from tpuconv.encodings.scheme import BY_SCALES, INT8, NESTED_SCALES, Flat, Scheme, is_head
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Exactly, Optional
from tpuconv.sources.headers import DTYPES

BITSANDBYTES = Exactly(
    {
        "quant_method": TEXT,
        **dict.fromkeys(("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"), FLAG),
        **dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"), TEXT),
        "bnb_4bit_use_double_quant": FLAG,
        "llm_int8_skip_modules": NAMES,
        "llm_int8_threshold": Optional((float, None)),
        **dict.fromkeys(("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"), FLAG),
    }
)
"""The keys of a description, and their types: there are no others."""
METHOD = "bitsandbytes"

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""QLoRA, appendix E."""
FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3)
"""The positive half of the values; the table is divided by its largest. Its other zero is negative."""
TABLES: Mapping[Any, np.ndarray] = {
    "nf4": np.array(NF4_VALUES, np.float32),
    "fp4": np.array([*FP4_TWELFTHS, *(-1.0 * value for value in FP4_TWELFTHS)], np.float32) / np.float32(12),
}
"""The tables by `bnb_4bit_quant_type`."""
TABLE_QTYPES = {"nf4": "nf4"}
"""Qwix's types with the same table."""
STORAGE = {None: "U8", "uint8": "U8", "int8": "I8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""By `bnb_4bit_quant_storage`, the dtype whose bytes hold the values."""
FLAT_BLOCK = 64
"""The size of blocks of tensors that only config.json describes; it does not name the size."""
ROW_BY_ROW = 0
"""The only order of LLM.int8's values that is not made for one GPU."""

LLM_INT8 = Scheme(
    title="LLM.int8",
    values=".weight",
    scales=".SCB",
    name=".weight",
    dtype="I8",
    qtype="int8",
    table=INT8,
    per_element=1,
    blocks=BY_SCALES,
    extra=(".weight_format",),
    factor=np.float32(1 / 127),
    any_sign=True,
    constants={".weight_format": np.array(ROW_BY_ROW, np.uint8)},
    by_row=True,
)


def is_bitsandbytes(quantization: Mapping[str, Any]) -> bool:
    """Returns True if a description belongs to bitsandbytes. Its first versions do not name it."""
    flags = quantization.get("load_in_4bit"), quantization.get("load_in_8bit")
    return quantization.get("quant_method") in (METHOD, None) and any(flags)


def bitsandbytes_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the group of a bitsandbytes description.

    Raises:
        UnsupportedConfig: neither 4 nor 8 bits, or both; weights that are stored in half precision; or a type or
            storage that is not known.
    """
    by_bits = bool(quantization.get("load_in_4bit")), bool(quantization.get("load_in_8bit"))
    if by_bits[0] == by_bits[1]:
        raise UnsupportedConfig(
            f"bitsandbytes with load_in_4bit={by_bits[0]} and load_in_8bit={by_bits[1]} is not implemented",
            hint="one of them must be true",
        )
    if by_bits[1] and quantization.get("llm_int8_has_fp16_weight"):
        raise UnsupportedConfig("bitsandbytes with llm_int8_has_fp16_weight=True is not implemented", hint=UNQUANTIZED)
    scheme = _four_bits(quantization) if by_bits[0] else LLM_INT8
    names = quantization.get("llm_int8_skip_modules")
    group = unless_named((scheme,), names or (), "llm_int8_skip_modules")

    def takes(module: str) -> bool:  # a list takes the place of the head
        return group.takes(module) and not (names is None and is_head(module))

    return (SchemeGroup(group.schemes, takes, group.patterns),)


def _four_bits(quantization: Mapping[str, Any]) -> Scheme:
    kind, storage = quantization.get("bnb_4bit_quant_type") or "fp4", quantization.get("bnb_4bit_quant_storage")
    if kind not in TABLES or storage not in STORAGE:
        raise UnsupportedConfig(
            f"bitsandbytes with bnb_4bit_quant_type={kind!r} and bnb_4bit_quant_storage={storage!r} is not implemented",
            hint="known are nf4 and fp4, in uint8, int8, float16, bfloat16 and float32",
        )
    nested = bool(quantization.get("bnb_4bit_use_double_quant"))
    state = f".weight.quant_state.bitsandbytes__{kind}"
    flat = Flat(state, ".weight.nested_absmax", ".weight.nested_quant_map")
    dtype, table = STORAGE[storage], TABLES[kind]
    return Scheme(
        title=f"bitsandbytes {kind.upper()}",
        values=".weight",
        scales=".weight.absmax",
        name=".weight",
        dtype=dtype,
        qtype=TABLE_QTYPES.get(kind, ""),
        table=table,
        per_element=2 * DTYPES[dtype].itemsize,
        blocks=(1, FLAT_BLOCK),
        extra=(".weight.quant_map", state, flat.nested_scales, flat.nested_table),
        any_sign=True,
        constants={".weight.quant_map": table},
        flat=flat,
        unwritten="neither its text nor the scales of its scales",
        high_first=True,
        scale_dtype=NESTED_SCALES if nested else "F32",
    )
