"""The arrays and slabs of a plan, of which the rows of each tensor are known: parameters that stay encoded, that are
quantized, and others."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from tpuconv.convert.plan.cutting import cut_binding
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.quantization import Quantization
from tpuconv.convert.plan.types import OutputArray, Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.encodings.passthrough_rows import Passthrough, pass_through
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.names import collapse
from tpuconv.notation.table import EXPERTS, PERIODS, PLACES, Binding
from tpuconv.targets.target import Target


def with_quantization(plan: Plan, quantization: Quantization) -> Plan:
    """Returns the plan with parameters that are quantized. Before, none may stay encoded.

    Raises:
        UsageError, UnsupportedConfig: the target has no parameters of this form.
    """
    assert not plan.passthrough
    return with_arrays(plan, quantization)


def with_arrays(plan: Plan, quantization: Quantization | None = None) -> Plan:
    """Returns a plan, which knows its tensors and bindings, with its arrays and slabs.

    Raises:
        UsageError, UnsupportedConfig: as `with_quantization` does.
    """
    options, target, config = plan.options, plan.target, plan.config
    keeps = options.encoding == "keep"
    if target.quantized is None and (keeps or quantization):
        raise UsageError(
            f"the target {target.name} has no quantized parameters", hint='leave out `encoding="keep"` and `quantize=`'
        )
    wanted = [b for b in plan.bindings if keeps or _is_passthrough(b, quantization)]
    if wanted and target.squeezes_scales:
        raise UnsupportedConfig(
            f"{target.name} has scales of whole channels, not the scales of a release",
            hint='decode by `encoding="dequantize"`, or quantize to another type than the release has',
        )
    if plan.faults:
        return replace(plan, quantization=quantization)
    tensors, bindings, passthrough, faults = pass_through(plan.tensors, plan.bindings, wanted, target.part)
    arrays: dict[str, OutputArray] = {}
    slabs: list[Slab] = []
    encoders = quantization.encoders if quantization else {}
    for binding in bindings if not faults else ():
        new_arrays, new_slabs = cut_binding(tensors, binding, options, encoders, target)
        faults += [f"{array.name}  is made by two rows of the table" for array in new_arrays if array.name in arrays]
        arrays |= {array.name: array for array in new_arrays}
        slabs += new_slabs
    for name, found in quantization.found.items() if quantization and not faults else ():
        shape = found.shape
        arrays[name] = OutputArray(shape, np.dtype(np.float32), shape, shape, name, found.axes, (), buffer=True)
    if not faults:
        _check_forms(target, options, passthrough, arrays, {EXPERTS, PLACES, PERIODS, *config.layer_sets})
    return replace(
        plan,
        tensors=tensors,
        quantization=quantization,
        passthrough=passthrough,
        bindings=tuple(bindings),
        arrays=arrays,
        slabs=tuple(slabs),
        faults=tuple(faults),
    )


def _check_forms(
    target: Target,
    options: Options,
    passthrough: Mapping[str, Passthrough],
    arrays: Mapping[str, OutputArray],
    stacked: Collection[str],
) -> None:
    """Raises UsageError or UnsupportedConfig if the target does not read arrays in the form that they will have;
    `stacked`: as `_check_fp8` takes them."""
    if options.pathways:
        target.check_pathways({name: array.dtype.name for name, array in arrays.items()})
    if target.fp8_block:
        _check_fp8(target, passthrough, arrays, stacked)


def _check_fp8(
    target: Target, passthrough: Mapping[str, Passthrough], arrays: Mapping[str, OutputArray], stacked: Collection[str]
) -> None:
    """Raises UnsupportedConfig if a parameter that stays encoded has another form than the target's FP8 in blocks,
    besides the axes `stacked`."""
    wrong: dict[str, list[str]] = {}
    for name, kept in passthrough.items():
        array, block = arrays[name], target.fp8_block
        own = (
            [
                (size // group, size if size < block else size // block)
                for axis, size, group in zip(array.axes.split(), array.shape, kept.group_shape, strict=True)
                if axis not in stacked
            ]
            if "(" not in array.axes
            else []
        )
        if kept.scheme.qtype != "float8_e4m3fn" or not own or any(has != wants for has, wants in own):
            wrong.setdefault(f"{kept.scheme.qtype} in groups of {list(kept.group_shape)}", []).append(name)
    if wrong:
        raise UnsupportedConfig(
            f"{target.name} has FP8 with a scale for each block of {target.fp8_block} values along each axis",
            details=[f"{pattern}: {form}" for form, names in wrong.items() for pattern in collapse(names)],
            hint='decode by `encoding="dequantize"`',
        )


def _is_passthrough(binding: Binding, quantization: Quantization | None) -> bool:
    return quantization is not None and all(name in quantization.passthrough for s in binding.dst for name in s.names)
