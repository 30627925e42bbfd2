"""The formats in which servers read quantized weights, by scheme and type.

A scheme is a `quant_method` of config.json: compressed-tensors 0.20, of FP8 in blocks (DeepSeek-V3's technical
report, arXiv:2412.19437, section 3.3), of AWQ (arXiv:2306.00978, the layout `gemm`) and of gpt-oss' experts in MXFP4
(OCP Microscaling Formats v1.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from tpuconv.encodings.scheme import MX_GROUP, MX_TYPES, POWERS_OF_TWO

IN_COMPRESSED, IN_FP8, IN_AWQ, IN_MXFP4 = "compressed-tensors", "fp8", "awq", "mxfp4"


class Packing(Enum):
    """The arrangement of quantized values in stored elements."""

    ONE_EACH = "one each"
    WORDS = "integers with an offset, in int32, along the rows of [out, in]"
    PAIRS = "two floats in a byte"
    AWQ_WORDS = "integers with an offset, in int32, along the rows of [in, out], in AWQ's order"
    GROUPS_APART = "two floats in a byte, the groups of a row on an axis of their own"


@dataclass(frozen=True)
class Format:
    """A format of weights.

    Attributes:
        scheme: the `quant_method` that has it.
        name: as config.json has it.
        kind: "int" or "float".
        bits: of one value.
        packing: how values lie in stored elements.
        group_size: the only one that the format has; None if it has any.
        scales: suffix of the stored scales.
        scale_dtype: safetensors' name of the dtype of stored scales; empty for the checkpoint's own. U8 are exponents
            of two.
        has_rows: whether a scale may belong to a complete row.
        has_groups: whether a scale may belong to a part of a row.
        has_blocks: whether a scale may belong to a part of several rows.
        has_zero_points: whether values may have zero points.
        tensor_scale: whether there is one more scale, of the tensor.
        has_input_scale: whether inputs may have a static scale.
    """

    scheme: str
    name: str
    kind: str
    bits: int
    packing: Packing = Packing.ONE_EACH
    group_size: int | None = None
    scales: str = ".weight_scale"
    scale_dtype: str = ""
    has_rows: bool = True
    has_groups: bool = True
    has_blocks: bool = False
    has_zero_points: bool = False
    tensor_scale: bool = False
    has_input_scale: bool = False

    @property
    def input_first(self) -> bool:
        """True if matrices are stored as [in, out]."""
        return self.packing is Packing.AWQ_WORDS

    @property
    def is_of_experts(self) -> bool:
        """True if the format is for experts that are stacked in one tensor."""
        return self.packing is Packing.GROUPS_APART


def _packed(bits: int) -> Format:
    return Format(IN_COMPRESSED, "pack-quantized", "int", bits, Packing.WORDS, has_zero_points=True)


_FLOAT8 = Format(IN_COMPRESSED, "float-quantized", "float", 8, has_groups=False, has_blocks=True, has_input_scale=True)
_FP8 = Format(IN_FP8, "", "float", 8, scales=".weight_scale_inv", scale_dtype="F32", has_rows=False, has_blocks=True)
_MX: Mapping[str, Any] = {"group_size": MX_GROUP, "scale_dtype": "U8"}
FORMATS: Mapping[str, Mapping[tuple[str, bool], Format]] = {
    IN_COMPRESSED: {
        # Servers have no int8 in bytes without quantized activations, and no packed int8 with them.
        ("int8", True): Format(IN_COMPRESSED, "int-quantized", "int", 8, has_groups=False, has_input_scale=True),
        ("int8", False): _packed(8),
        ("int4", False): _packed(4),
        ("float8_e4m3fn", True): _FLOAT8,
        ("float8_e4m3fn", False): _FLOAT8,
        ("mxfp4", False): Format(IN_COMPRESSED, "mxfp4-pack-quantized", "float", 4, Packing.PAIRS, **_MX),
        ("mxfp8", False): Format(IN_COMPRESSED, "mxfp8-quantized", "float", 8, **_MX),
        ("nvfp4", False): Format(
            *(IN_COMPRESSED, "nvfp4-pack-quantized", "float", 4, Packing.PAIRS),
            group_size=16,
            scale_dtype="F8_E4M3",
            tensor_scale=True,
        ),
    },
    IN_FP8: {("float8_e4m3fn", True): _FP8, ("float8_e4m3fn", False): _FP8},
    IN_AWQ: {
        ("int4", False): Format(
            IN_AWQ, "", "int", 4, Packing.AWQ_WORDS, scales=".scales", scale_dtype="F16", has_zero_points=True
        )
    },
    IN_MXFP4: {("mxfp4", False): Format(IN_MXFP4, "", "float", 4, Packing.GROUPS_APART, scales="_scales", **_MX)},
}
"""By scheme; then by type, and whether activations are quantized to it too."""


def type_of(facts: Mapping[str, Any]) -> str:
    """Returns the type of a quantized parameter of a manifest, by Qwix's name: a release's values in `mxfp4` are
    stored there as the numbers that they are, with scales in powers of two."""
    qtype: str = facts["qtype"]
    stored = facts.get("stored", [])
    is_mx = stored and prod(facts["tiles"]) == MX_GROUP and all(each["dtype"] in POWERS_OF_TWO for each in stored)
    return MX_TYPES.get(qtype, qtype) if is_mx else qtype


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one format.

    Attributes:
        block: how many outputs and inputs share a scale; None along an axis for all of them.
        activations: whether these are quantized too.
        asymmetric: whether there are zero points.
        static: whether activations have a static scale.
    """

    format: Format
    block: tuple[int | None, int | None]
    activations: bool
    asymmetric: bool
    static: bool = False

    @property
    def group_size(self) -> int | None:
        """The number of inputs that share a scale; None for all."""
        return self.block[1]

    def to_json(self, targets: list[str]) -> dict[str, Any]:
        """Returns the entry in config.json of compressed-tensors."""
        weights: dict[str, Any] = {
            "num_bits": self.format.bits,
            "type": self.format.kind,
            "symmetric": not self.asymmetric,
            "dynamic": False,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
        }
        inputs = {key: weights[key] for key in ("num_bits", "type")} | {"symmetric": True, "dynamic": True}
        inputs |= {"strategy": "token", "group_size": None}
        if self.static:
            inputs |= {"strategy": "tensor", "dynamic": False}
        in_blocks = self.block[0] != 1 and self.group_size
        if in_blocks:
            weights |= {"strategy": "block", "group_size": None, "block_structure": list(self.block)}
            inputs |= {"strategy": "group", "group_size": self.group_size}
        if self.format.tensor_scale:
            weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        if self.format.scale_dtype == "U8":
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return {
            "targets": targets,
            "format": self.format.name,
            "weights": weights,
            # Kernels for blocks quantize activations too, in groups as wide as a block: without them no server of TPUs
            # reads blocks, and llm-compressor writes them so.
            "input_activations": inputs if self.activations or in_blocks else None,
            "output_activations": None,
        }
