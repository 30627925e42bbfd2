"""The private memory that a calibration needs, from shapes alone."""

from collections.abc import Mapping
from math import prod

from tpuconv.checkpoint.manifest import Manifest, element_bytes
from tpuconv.notation.table import LAYERS_APART
from tpuconv.quantize.calibrate.rounding import COLUMN_BYTES
from tpuconv.quantize.calibrate.threads import MOST_WORKERS
from tpuconv.quantize.encode import QwixEncoder

HESSIAN_BYTES = 2 << 30
"""Bytes of Hessians that are held at once, if one does not need more. For more of them the inputs are kept in files."""
KEPT_ACTIVATIONS, KEPT_LOGITS = 4, 8
"""Activations of a layer, and arrays of logits, that are in memory at once for gradients."""
BASE_BYTES = 900 << 20
"""Private memory of the interpreter with jax and the compiled layer, without arrays."""


def hessian_bytes(width: int) -> int:
    """Returns the bytes of the Hessian of an input with so many elements."""
    return 4 * width * width


def sums_bytes(width: int, propagates: bool) -> int:
    """Returns the bytes of what is added up over the tokens of such an input: the Hessian, and where errors are
    propagated the product of the input and its change."""
    return hessian_bytes(width) * (2 if propagates else 1)


def scale_bytes(encoder: QwixEncoder, shape: tuple[int, ...]) -> int:
    """Returns the bytes of the scales of a parameter of this shape, or of a layer of it."""
    return encoder.scale_dtype.itemsize * prod(shape) // prod(encoder.quant.group_shape)


def widest_input(manifest: Manifest, encoders: Mapping[str, QwixEncoder]) -> int:
    """Returns the most inputs that a product with one of these parameters of a checkpoint sums over, of one layer; 0
    without any."""
    return max((_width(manifest, name, encoder) for name, encoder in encoders.items()), default=0)


def _width(manifest: Manifest, name: str, encoder: QwixEncoder) -> int:
    shape = _shape_of_layer(manifest, name)
    return prod(shape[axis] for axis in encoder.quant.summed)


def _shape_of_layer(manifest: Manifest, name: str) -> tuple[int, ...]:
    """Returns the shape of a parameter, of one layer where layers are stacked."""
    shape = manifest.arrays[name].shape
    return shape[1:] if manifest.scan_layers and name.startswith("layers.") else shape


def calibration_memory(
    manifest: Manifest,
    encoders: Mapping[str, QwixEncoder],
    heads: int,
    length: int,
    propagates: bool = False,
    distills: bool = False,
) -> int:
    """Returns the private memory in bytes that a calibration needs at most. Of the stage with most: its weights in
    float32, their quantized values and scales; the Hessians, and two copies of the largest while it is factorized; a
    parameter while it is rounded; the activations of one sample.

    Args:
        manifest: the checkpoint.
        encoders: of the parameters that are quantized.
        heads: of attention.
        length: tokens of a sample.
        propagates: whether the errors of earlier layers are made up for, which takes a matrix besides each Hessian, and
            a factor of its own.
        distills: whether scales are distilled, which takes the gradients of a layer's weights and of its activations,
            and of logits.
    """
    weights: dict[str, int] = {}
    hessians: dict[str, int] = {}
    widths: dict[str, int] = {}
    largest = widest = 0
    for name, array in manifest.arrays.items():
        top, *rest = name.split(".")
        shape = _shape_of_layer(manifest, name)
        is_apart = top in ("layers", LAYERS_APART) and rest[0].isdigit()
        stage = f"{top}.{rest[0]}" if is_apart else top
        if (
            top not in ("layers", LAYERS_APART) and name not in encoders
        ):  # the norm and the head run only to be calibrated
            continue
        weights[stage] = weights.get(stage, 0) + 5 * prod(shape)
        if (encoder := encoders.get(name)) is not None:
            weights[stage] += scale_bytes(encoder, shape)
            width = _width(manifest, name, encoder)
            axes = array.axes.split()
            matrices = array.shape[axes.index("E")] if "E" in axes else 1
            hessians[stage] = hessians.get(stage, 0) + matrices * sums_bytes(width, propagates and matrices == 1)
            widths[stage] = widths.get(stage, 0) + width
            largest, widest = max(largest, prod(shape)), max(widest, width)
    held = max(min(HESSIAN_BYTES, max(hessians.values(), default=0)), sums_bytes(widest, propagates))
    rounding = 12 * largest + 8 * min(MOST_WORKERS * COLUMN_BYTES, 4 * largest)
    activations = 4 * length * (3 * heads * length + 4 * max(widths.values(), default=0))
    others = {"layers", LAYERS_APART, "norm", "lm_head", "mtp"}
    embeddings = [array for name, array in manifest.arrays.items() if name.partition(".")[0] not in others]
    first = 2 * sum(prod(array.shape) * element_bytes(array.dtype) for array in embeddings)
    factors = (3 if propagates else 2) * hessian_bytes(widest)
    layer = max(weights.values()) + held + factors + rounding + activations
    distilled = _distilled_bytes(manifest, weights, activations, length) if distills else 0
    return BASE_BYTES + max(first, layer, distilled)


def _distilled_bytes(manifest: Manifest, weights: Mapping[str, int], activations: int, length: int) -> int:
    """Returns the bytes of a layer or of the head while scales are distilled: weights and their gradients, what a layer
    keeps on the way forward, and logits."""
    vocabulary, width = manifest.arrays["embed.embedding"].shape[-2:]
    head = 12 * vocabulary * width + KEPT_LOGITS * 4 * length * vocabulary
    return max(2 * max(weights.values()) + KEPT_ACTIVATIONS * activations, head)
