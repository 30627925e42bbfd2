"""One parameter while it is rounded: as matrices [I, O], of all inputs and outputs of its product, one for each
expert."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from tpuconv.quantize.calibrate.descent import descended
from tpuconv.quantize.calibrate.gptq import (
    INPUTS_AT_ONCE,
    Factor,
    Grid,
    KernelScales,
    Rounded,
    adjusted,
    fitted,
    input_order,
    output_errors,
)
from tpuconv.quantize.calibrate.threads import side_by_side
from tpuconv.quantize.clipping import SCALE_FACTORS
from tpuconv.quantize.config import MSE
from tpuconv.quantize.encode import QwixEncoder, symmetric_bound

COLUMN_BYTES = 8 << 20
"""Bytes of the columns of a matrix, in float32, that a thread rounds at once: columns do not depend on each other."""


class Rounding:
    """A parameter with its quantized values, at first rounded to nearest.

    Args:
        encoder: the encoder of the parameter, or of the parameter of stacked layers.
        values: the parameter, of one layer, in float32.
        summed: the axes that its product sums over.
        has_experts: whether the first axis is the axis of experts.
        is_stacked: whether the encoder's parameter has an axis of layers.

    Attributes:
        nearest, calibrated: squared errors of the outputs, summed over tokens and matrices, of rounding to nearest and
            of what it holds now.
        left: why matrices were left at the nearest, one reason for each.
    """

    def __init__(
        self, encoder: QwixEncoder, values: np.ndarray, summed: Sequence[int], *, has_experts: bool, is_stacked: bool
    ):
        self.encoder, self.values, self.summed = encoder, values, tuple(summed)
        stored = values.astype(encoder.dtype)
        parts, _ = encoder(stored[None] if is_stacked else stored)
        qvalues, self.scale, *self.zero_points = (part[0] if is_stacked else part for part in parts)
        self.scale = np.array(self.scale)
        self.qbytes = np.ascontiguousarray(qvalues).view(np.uint8)
        self.grid = Grid.of(encoder.quant.qtype)
        self.matrices = len(values) if has_experts else 1
        self.nearest = self.calibrated = 0.0
        self.left: list[str] = []
        first = 1 if has_experts else 0
        self._lead = tuple(range(first))
        self._outputs = tuple(axis for axis in range(first, values.ndim) if axis not in self.summed)

    @property
    def is_channelwise(self) -> bool:
        """True if each output has scales of its own, as GPTQ needs it."""
        return all(self.scale.shape[axis] == self.values.shape[axis] for axis in (*self._lead, *self._outputs))

    @property
    def fits_scales(self) -> bool:
        """True if GPTQ chooses the scales too: by the method `mse`, in groups of few inputs."""
        groups = prod(self.scale.shape[axis] for axis in self.summed)
        inputs = prod(self.values.shape[axis] for axis in self.summed)
        return self.encoder.method == MSE and inputs <= groups * INPUTS_AT_ONCE

    def order(self, hessian: np.ndarray, act_order: bool) -> np.ndarray:
        """Returns the order [I] in which the inputs are rounded, given their Hessian."""
        rows = self._scales(0).row_of_I if self.fits_scales else None
        return input_order(np.diag(hessian), act_order, rows)

    @property
    def decoded(self) -> np.ndarray:
        """The weights that the quantized values stand for, in float32."""
        return self.encoder.decoded([self.qbytes, self.scale, *(part.view(np.uint8) for part in self.zero_points)])

    def leave(self, why: str) -> None:
        """Leaves a matrix at the nearest values."""
        self.left.append(why)

    def adjust(
        self,
        matrix: int,
        hessian: np.ndarray,
        factor: Factor,
        refine: int,
        corrected: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """Rounds a matrix by GPTQ. A column whose output would have a larger error keeps the nearest values.

        Args:
            matrix: its number.
            hessian: of its inputs [I, I].
            factor: of the Hessian, in the order of `order`.
            refine: rounds of descent after GPTQ.
            corrected: makes of the matrix [I, O] the one that is rounded, where errors are propagated.
        """
        view = self._matrices(self.qbytes)[matrix]
        kernel, qbytes = self._flat(self._matrices(self.values)[matrix]), self._flat(view)
        scales, scale_view = self._scales(matrix), self._matrices(self.scale)[matrix]
        dtype = self.scale.dtype if self.fits_scales else None
        tried = SCALE_FACTORS[::-1] / np.float32(symmetric_bound(self.encoder.quant.qtype))
        if self.grid.is_integer:
            tried = np.concatenate([tried, -tried])
        byte_values = np.zeros(256, np.float32)
        byte_values[self.grid.qbytes] = self.grid.values
        step = max(1, COLUMN_BYTES // (4 * len(kernel)))

        def round_columns(start: int) -> tuple[float, float]:
            columns = slice(start, start + step)
            part, of_part = np.ascontiguousarray(kernel[:, columns]), scales.outputs(start, start + step)
            if corrected is not None:
                part = corrected(part)
            nearest = output_errors(hessian, of_part.weights(byte_values[qbytes[:, columns]]) - part)
            if dtype is not None:
                rounded = fitted(part, factor, of_part, self.grid, tried, dtype)
            else:
                rounded = Rounded(adjusted(part, factor, of_part, self.grid), of_part)
            rounded, errors = descended(part, hessian, rounded, self.grid, factor.order, refine, dtype)
            better = errors < nearest
            qbytes[:, columns] = np.where(better, self.grid.qbytes[rounded.chosen], qbytes[:, columns])
            scales.scale[:, columns] = np.where(better, rounded.scales.scale, of_part.scale)
            return float(nearest.sum()), float(np.where(better, errors, nearest).sum())

        for nearest, calibrated in side_by_side(round_columns, range(0, kernel.shape[1], step)):
            self.nearest += nearest
            self.calibrated += calibrated
        view[...] = qbytes.reshape(view.shape)
        if dtype is not None:
            scale_view[...] = scales.scale.reshape(scale_view.shape).astype(dtype)

    def _matrices(self, x: np.ndarray) -> np.ndarray:
        """Returns a view [E, summed axes, outputs] of an array of the parameter's axes."""
        ordered = x.transpose(*self._lead, *self.summed, *self._outputs)
        return ordered if self._lead else ordered[None]

    def _flat(self, x: np.ndarray) -> np.ndarray:
        """[I, O] of [summed axes, outputs]."""
        return x.reshape(prod(x.shape[: len(self.summed)]), -1)

    def _scales(self, matrix: int) -> KernelScales:
        scale = self._matrices(np.asarray(self.scale, np.float32))[matrix]
        groups = scale.shape[: len(self.summed)]
        sizes = [self.values.shape[axis] for axis in self.summed]
        rows = np.zeros(1, np.int64)
        for n, count in zip(sizes, groups, strict=True):
            rows = (rows[:, None] * count + np.arange(n) // (n // count)).reshape(-1)
        flat = self._flat(scale)
        byte_values = dict(zip(self.grid.qbytes.tolist(), self.grid.values.tolist(), strict=True))
        zero_points = [np.vectorize(byte_values.get, otypes=[np.float32])(p.view(np.uint8)) for p in self.zero_points]
        zero = self._flat(self._matrices(zero_points[0])[matrix]) if zero_points else np.zeros_like(flat)
        return KernelScales(np.ascontiguousarray(flat), np.ascontiguousarray(zero), rows)
