"""Schemes of BitNet b1.58 (arXiv:2402.17764), packed as transformers packs them (`integrations/bitnet.py`): numbers -1,
0 and 1, with one scale for the matrix. Of the four numbers in a byte each is of another quarter of the rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuconv.encodings.groups import FLAG, NAMES, TEXT, UNQUANTIZED
from tpuconv.encodings.scheme import BY_SCALES, QUARTERS, Quarters, Scheme
from tpuconv.errors import UnsupportedConfig

BITNET_METHOD = "bitnet"
BITNET_KEYS: Mapping[str, Any] = {
    "modules_to_not_convert": NAMES,
    "linear_class": TEXT,
    "quantization_mode": TEXT,
    "use_rms_norm": FLAG,
}
"""Which keys of a description are read, and their types."""
DIVIDES = {"bitlinear": True, "autobitlinear": False}
"""By `linear_class`, whether products are divided by the scale."""


def bitnet_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a BitNet description.

    Raises:
        UnsupportedConfig: weights that each forward pass rounds, norms of the inputs, or another class of layers.
    """
    kind, mode = quantization.get("linear_class") or "bitlinear", quantization.get("quantization_mode") or "offline"
    if kind not in DIVIDES or mode != "offline" or quantization.get("use_rms_norm"):
        norms = " and use_rms_norm" if quantization.get("use_rms_norm") else ""
        raise UnsupportedConfig(
            f"BitNet with linear_class={kind!r}, quantization_mode={mode!r}{norms} is not implemented",
            hint="known are packed weights (quantization_mode 'offline') of the classes bitlinear and autobitlinear, "
            f"without use_rms_norm; or {UNQUANTIZED}",
        )
    return Scheme(
        title=f"BitNet, {'divided' if DIVIDES[kind] else 'multiplied'} by a scale",
        values=".weight",
        scales=".weight_scale",
        name=".weight",
        dtype="U8",
        qtype="",
        table=np.arange(-1, QUARTERS - 1, dtype=np.float32),
        per_element=QUARTERS,
        blocks=BY_SCALES,
        quarters=Quarters(divides=DIVIDES[kind]),
        rounds_inputs=True,
        scale_dtype="BF16",
    )
