"""Tensors that an adapter changes: each is read, decoded, and changed before a row of the table is applied to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tpuconv.encodings.decode import Tensor
from tpuconv.errors import shorten
from tpuconv.names import collapse
from tpuconv.sources.adapter import Adapter, LowRank
from tpuconv.sources.reader import Reader


@dataclass(frozen=True)
class Adapted(Tensor):
    """A tensor plus products of low rank."""

    base: Tensor = field(kw_only=True)
    changes: tuple[LowRank, ...] = field(kw_only=True)

    def is_stored_as(self, dtype: np.dtype[np.generic]) -> bool:
        """Never: the stored bytes are changed."""
        return False

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Reads the tensor's values and adds each product in float32, rounded to the dtype of `out`; see
        `Tensor.read`."""
        from tpuconv.encodings.low_rank import multiply

        self.base.read(reader, start, raw, out)
        columns = self.shape[-1]
        first, last = start // columns, -(-(start + out.size) // columns)
        for change in self.changes:
            dtype = self.dtype if change.rounded else np.dtype(np.float32)
            product = np.empty((last - first, columns), np.float32)
            multiply(_float32(change.left[first:last]), _float32(change.right), product)
            change.file.check_unchanged()
            product *= np.float32(change.scaling)
            part = product.astype(dtype).astype(np.float32).reshape(-1)[start - first * columns :][: out.size]
            np.copyto(out, part + out, casting="unsafe")


def _float32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32)


def adapt(tensors: Mapping[str, Tensor], adapters: Sequence[Adapter]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors with the changes of all adapters, in their order, and what does not fit."""
    out, faults = dict(tensors), []
    for adapter in adapters:
        missing = [name for name in adapter.changes if name not in out]
        faults += [f"{p}  is changed by the adapter {adapter.name}, and not in the model" for p in collapse(missing)]
        for name, change in adapter.changes.items():
            tensor = out.get(name)
            if tensor is None:
                continue
            if tensor.shape != change.shape:
                shapes = f"{list(tensor.shape)}, its change in the adapter {adapter.name} {list(change.shape)}"
                faults.append(f"{name}  has the shape {shapes}")
            elif isinstance(tensor, Adapted):
                out[name] = replace(tensor, changes=(*tensor.changes, change))
            else:
                out[name] = Adapted(
                    tensor.name,
                    tensor.shape,
                    tensor.values,
                    tensor.scales,
                    tensor.extra,
                    tensor.scheme,
                    tensor.tensor_scale,
                    any_scales=tensor.any_scales,
                    base=tensor,
                    changes=(change,),
                )
    return out, list(shorten(faults))
