"""The source that a config.json describes: the headers that its tensors must have, before any file exists.

The family's table says which tensors there are; config.json says which of them are encoded, and how. So everything that
is planned from headers can be planned from this.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from tpuconv.encodings.groups import SchemeGroup, within
from tpuconv.encodings.scheme import Scheme
from tpuconv.encodings.schemes import groups
from tpuconv.errors import ConfigError
from tpuconv.notation.layout import Shape
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import Binding, MappingTable
from tpuconv.patterns import check_patterns
from tpuconv.sources.config import encoding_of, stated_dtype
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source

WEIGHT_DTYPES, BUFFER_DTYPE = {"bfloat16": "BF16", "float32": "F32"}, "F32"
"""Dtypes of parameters, and of buffers, that are not encoded."""

SHARD = "model.safetensors"

MAX_MODEL_BYTES = 4 << 40
"""Twice the bytes of the largest model: a plan holds all slabs of the conversion."""

NEVER_ENCODED = ("embed", "router")
"""The beginnings of the names of modules whose matrix is looked up, or in which small differences decide."""


def source_from_config(name: str, raw: Mapping[str, Any], table: MappingTable, config: HasSizes) -> Source:
    """Returns a source without bytes.

    Args:
        name: of the model.
        raw: the parsed config.json.
        table: of the family.
        config: the family's reading of `raw`.

    Raises:
        UnsupportedConfig: an encoding that is not implemented.
        ConfigError: an invalid or slow pattern, or a model with too many tensors or bytes.
    """
    tensors, offset = {}, 0
    for tensor, dtype, shape in _stored(raw, table, config):
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        tensors[tensor] = TensorInfo(tensor, dtype, shape, SHARD, offset, nbytes)
        offset += nbytes
    if offset > MAX_MODEL_BYTES:
        raise ConfigError(
            f"config.json describes a model of {offset} bytes, more than the {MAX_MODEL_BYTES} that are planned"
        )
    return Source(Path(name), raw, tensors, (SourceShard(SHARD, offset),))


def _stored(raw: Mapping[str, Any], table: MappingTable, config: HasSizes) -> Iterator[tuple[str, str, Shape]]:
    known, bindings = groups(encoding_of(raw)), table.bind(config)
    weight_dtype = WEIGHT_DTYPES[stated_dtype(raw)]
    modules = (name.removesuffix(".weight") for b in bindings if _is_multiplied(b) for s in b.src for name in s.names)
    check_patterns(
        list(dict.fromkeys(pattern for group in known for pattern in group.patterns)),
        (outer for module in modules for outer in within(module)),
        ConfigError,
        method="match",
    )
    looked_up = [group for group in known if group.looked_up]
    for binding in bindings:
        own, stacked = known if _is_multiplied(binding) else looked_up, _has_stacked_experts(binding)
        for name, shape in binding.src_shapes().items():
            scheme = _scheme(own, name, shape, stacked)
            plain = {name: (BUFFER_DTYPE if binding.row.buffer else weight_dtype, shape)}
            stored = scheme.stored(name, shape) if scheme else plain
            yield from ((part, dtype, part_shape) for part, (dtype, part_shape) in stored.items())


def _is_multiplied(binding: Binding) -> bool:
    return not any(part.startswith(NEVER_ENCODED) for stack in binding.dst for part in stack.names[0].split("."))


def _has_stacked_experts(binding: Binding) -> bool:
    """Returns True if each tensor of the source holds the matrices of all experts. Kernels of convolutions have three
    axes too."""
    sources = zip(binding.layout.src, binding.src, strict=True)
    return all(len(axes) == stack.depth + 3 and axes[stack.depth].letter == "E" for axes, stack in sources)


def _scheme(known: Sequence[SchemeGroup], name: str, shape: Shape, stacked: bool) -> Scheme | None:
    """Returns the scheme of a matrix, or of the matrices of all experts if they are `stacked`; None if it is not
    encoded. Stacks have blocks of a fixed size: a scale for each row or tensor belongs to one matrix."""
    for group in known:
        scheme = group.schemes[0]
        is_stack = scheme.groups_apart or (stacked and not scheme.affine and None not in scheme.blocks)
        is_one = len(shape) == (3 if is_stack else 2) and name.endswith(scheme.name)
        if group.looked_up and shape[-1:] != () and shape[-1] % (scheme.blocks[1] or 1):
            continue
        if is_one and group.takes(name.removesuffix(".weight")):
            return scheme
    return None
