"""The plan: from headers alone, everything that a conversion will do, and proof that it covers both sides.

Every tensor of the source is used or skipped exactly once, every parameter of the table is produced once, shapes and
dtypes fit. Faults are collected and raised together before a weight byte is read.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import lcm, prod
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from tpuconv.convert.codecs import Tensor, decode_names, why_unread
from tpuconv.convert.keep import Kept, keep
from tpuconv.convert.names import collapse
from tpuconv.convert.sealed import FORMAT
from tpuconv.convert.shards import Cut
from tpuconv.convert.source import Source
from tpuconv.convert.table import EXPERTS, LAYER_INDICES, LAYERS, MTP, Binding, HasAxes, MappingTable
from tpuconv.errors import MappingError, ResourceError, UnsupportedConfig, UsageError, shorten
from tpuconv.layout import Ranges, Shape, cut_sizes, format_axes, lead, runs, sliceable
from tpuconv.layout import Tensor as Axes
from tpuconv.sharding import MESH_AXES

MIB = 1 << 20
CHUNK_BYTES = 2 * MIB
"""Chunks are what a device reads: larger ones are cut further, so that it reads little that it does not need."""
PIECE_BYTES = 32 * MIB
UNIT_BYTES = 256 * MIB
BASE_MEMORY = 212 * MIB
"""Of the interpreter, libraries and the compiler of kernels, measured; without the pages of library files, which the
system takes back where memory is short."""

TENSORS_TO_LIST = 100_000
"""That may be missing and are listed by name: as many as the largest models have."""

REPORT = "quantization.html"

ENCODINGS = ("dequantize", "keep")

FLOATS = {np.dtype(t).name: np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Options:
    """What changes the output. `dtype` is "auto" (as the source has it), "bfloat16" or "float32"; `layers` the part of
    the layers that is converted, all where None; `include_mtp` brings the layers that predict further tokens;
    `encoding` is one of ENCODINGS: what becomes of encoded tensors; `allow_nonfinite` lets values pass that are NaN or
    infinite."""

    dtype: str = "auto"
    scan_layers: bool = False
    layers: range | None = None
    include_mtp: bool = False
    encoding: str = "dequantize"
    allow_nonfinite: bool = False

    def to_json(self) -> dict[str, Any]:
        layers = None if self.layers is None else [self.layers.start, self.layers.stop - 1]
        return {
            "dtype": self.dtype,
            "scan_layers": self.scan_layers,
            "layers": layers,
            "include_mtp": self.include_mtp,
            "encoding": self.encoding,
            **({"allow_nonfinite": True} if self.allow_nonfinite else {}),
        }


@dataclass(frozen=True)
class Part:
    """One of the arrays that hold an encoded parameter: `blocks` says for each axis how many elements of the parameter
    an element of it stands for. `own` values are the parameter's; others, scales, count as no parameters."""

    suffix: str
    dtype: np.dtype[Any]
    blocks: Shape
    own: bool = False


class Encoder(Protocol):
    """Makes of a parameter's values the arrays that hold it, such as quantized values and their scales."""

    @property
    def blocks(self) -> Shape:
        """For each axis how many elements must be encoded together: 1 where it does not matter."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The arrays, named after the parameter by their suffixes."""

    def __call__(self, values: np.ndarray) -> tuple[list[np.ndarray], dict[str, float]]:
        """The parts of a box of whole blocks, which need not be contiguous, and figures about it that add up.

        Raises:
            FloatingPointError: a value is infinite or not a number.
        """

    def check(self) -> None:
        """Raises GateError if what was made is wrong; called before it counts as done."""

    def to_json(self) -> dict[str, Any]:
        """All that decides about the result."""


@dataclass(frozen=True)
class Quantization:
    """Which parameters are encoded, and what the manifest is to say of why. `report` makes, of the whole manifest, the
    text of the file `REPORT`. `kept` are the parameters that the source has in the very type that is asked for, with
    the number of the rule that asks."""

    encoders: Mapping[str, Encoder]
    config: Mapping[str, Any]
    report: Callable[[Mapping[str, Any]], str]
    kept: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Array(Cut):
    """One array of the output: a parameter, or a part of one that is encoded. `axes` are its axes in letters. A
    `buffer` counts as no parameter."""

    name: str
    axes: str
    sources: tuple[str, ...]
    buffer: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """What is read, transformed and written in one go: a box of every target of a binding, whole chunks. `dtype` is
    that of the values, before a target is encoded."""

    binding: Binding
    ranges: Ranges
    dtype: np.dtype[Any]

    @property
    def sizes(self) -> dict[str, int]:
        return cut_sizes(self.binding.sizes, self.ranges)

    @property
    def elements(self) -> int:
        return sum(map(prod, self.binding.layout.src_shapes(self.sizes)))

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.elements * self.dtype.itemsize

    def reads(self) -> Iterator[list[tuple[str, int, int]]]:
        """For every source tensor of the layout the parts to read: name, first element, number of elements."""
        layout, sizes = self.binding.layout, self.binding.sizes
        for stack, axes, shape in zip(self.binding.src, layout.src, layout.src_shapes(sizes), strict=True):
            each = prod(shape[stack.depth :])
            parts = []
            for at, stop in runs(axes, sizes, self.ranges):
                while at < stop:
                    index, first = divmod(at, each)
                    count = min(stop - at, each - first)
                    parts.append((stack.names[index], first, count))
                    at += count
            yield parts

    def names(self) -> Iterator[str]:
        """The source tensors of the layout of which something is read."""
        for stack, axes in zip(self.binding.src, self.binding.layout.src, strict=True):
            for at, stop in runs(axes[: stack.depth], self.binding.sizes, self.ranges):
                yield from stack.names[at:stop]

    def begins(self) -> tuple[str, int]:
        """The source tensor that is read first, and the number of its first element: what `reads` says first."""
        stack, axes = self.binding.src[0], self.binding.layout.src[0]
        sizes = self.binding.sizes
        corner = {letter: (start, start + 1) for letter in sizes for start, _ in [self.ranges.get(letter, (0, 0))]}
        at, _ = runs(axes, sizes, corner)[0]
        index, first = divmod(at, prod(self.binding.layout.src_shapes(sizes)[0][stack.depth :]))
        return stack.names[index], first

    def boxes(self) -> list[tuple[slice, ...]]:
        """Where the piece lies in each target of the layout."""
        layout, sizes = self.binding.layout, self.binding.sizes
        return [
            tuple(self._range(lead(axis), n) for axis, n in zip(axes, shape, strict=True))
            for axes, shape in zip(layout.dst, layout.dst_shapes(sizes), strict=True)
        ]

    def _range(self, letter: str, size: int) -> slice:
        if letter not in self.ranges:
            return slice(0, size)
        start, stop = self.ranges[letter]
        inner = size // self.binding.sizes[letter]
        return slice(start * inner, stop * inner)


@dataclass(frozen=True)
class Unit:
    """A part of the work that is done or not: any process that sees the output folder could run it."""

    uid: str
    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True)
class Skip:
    """Source tensors that are not converted, and why."""

    pattern: str
    count: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """See the module. `kept` are the parameters that stay encoded. `faults` is empty in a plan that can be run: `check`
    raises them."""

    source: Source
    tensors: Mapping[str, Tensor]
    family: str
    table: MappingTable
    options: Options
    quantization: Quantization | None
    kept: Mapping[str, Kept]
    bindings: tuple[Binding, ...]
    arrays: Mapping[str, Array]
    units: tuple[Unit, ...]
    skipped: tuple[Skip, ...]
    copies: Mapping[str, str]
    unmapped: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def encoders(self) -> Mapping[str, Encoder]:
        """Of the parameters that are not stored as plain values."""
        return self.quantization.encoders if self.quantization else {}

    @property
    def mapped(self) -> int:
        """Tensors of the source that are used."""
        used = {name for array in self.arrays.values() for name in array.sources}
        return sum(len(self.tensors[name].stored) for name in used)

    @property
    def parameters(self) -> int:
        """Elements that are trained; tied ones count once."""
        return sum(prod(array.shape) for array in self.arrays.values() if not array.buffer)

    @property
    def output_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def source_bytes(self) -> int:
        """Bytes that are read to be converted."""
        return sum(unit.nbytes for unit in self.units)

    @cached_property
    def buffers(self) -> tuple[int, int, int, int, int]:
        """Bytes that one job holds at most: of values as they are wanted, of values as they are stored where that is
        not the same, of a shard to be built and one that is written, and of what encoders make."""
        pieces = [piece for unit in self.units for piece in unit.pieces]
        values = max((piece.nbytes for piece in pieces), default=0)
        raw = max((self.stored_bytes(piece) for piece in pieces if not self.is_stored_as_wanted(piece)), default=0)
        encoded = max((piece.elements for piece in pieces if self.is_encoded(piece)), default=0)
        shard = max((array.shard_bytes for array in self.arrays.values()), default=0)
        return values, raw, shard, shard, 2 * encoded

    @property
    def hashes_shards(self) -> bool:
        """Whether whole shards are read, and so hashed. A trial on some layers would read all others for their hash."""
        return self.source.hashed and self.options.layers is None

    def jobs(self, wanted: int, max_memory: int) -> int:
        """As many of the wanted jobs as the memory allows.

        Raises:
            ResourceError: not even one fits.
        """
        fitting = (max_memory - BASE_MEMORY) // max(1, sum(self.buffers))
        if fitting < 1:
            need = BASE_MEMORY + sum(self.buffers)
            raise ResourceError(
                f"{max_memory / 1e6:.0f} MB of memory are too few to convert {self.source.name}",
                hint=f"--max-memory must be at least {-(-need // 1_000_000)}MB",
            )
        return max(1, min(wanted, fitting, len(self.units)))

    def peak_memory(self, jobs: int) -> int:
        """Private memory in bytes that the conversion needs at most."""
        return BASE_MEMORY + jobs * sum(self.buffers)

    def shards_of(self, unit: Unit) -> set[str]:
        """The shards of the source from which a unit is made."""
        return {i.shard for piece in unit.pieces for name in piece.names() for i in self.tensors[name].stored}

    def is_encoded(self, piece: Piece) -> bool:
        return any(name in self.encoders for stack in piece.binding.dst for name in stack.names)

    def is_stored_as_wanted(self, piece: Piece) -> bool:
        """Whether the bytes of the source are those of the values."""
        tensor = self.tensors[piece.binding.src[0].names[0]]
        return tensor.is_stored_as(piece.dtype)

    def stored_bytes(self, piece: Piece) -> int:
        """Bytes read for the values of a piece, scales aside."""
        return _stored_bytes(self.tensors, piece)

    def written_bytes(self, piece: Piece) -> int:
        """About as many as the piece adds to the output."""
        own = sum(map(prod, piece.binding.layout.src_shapes(piece.binding.sizes)))
        names = [part for stack in piece.binding.dst for name in stack.names for part in self.stored_names(name)]
        return sum(self.arrays[name].nbytes for name in names) * piece.elements // max(1, own)

    def stored_names(self, parameter: str) -> tuple[str, ...]:
        """The names of the arrays that hold a parameter."""
        encoder = self.encoders.get(parameter)
        return tuple(f"{parameter}.{part.suffix}" for part in encoder.parts) if encoder else (parameter,)

    @property
    def facts(self) -> dict[str, Any]:
        """All that decides about what is written. Of a shard for which a sha256 is promised that alone counts, of
        others its size and digest."""
        shards = [[s.name, s.sha256 or [s.size, s.digest]] for s in self.source.shards]
        return {
            "format": FORMAT,
            "source": {
                "repo": self.source.repo,
                "commit": self.source.commit,
                "files of weights": _digest(shards),
                "files beside them": _digest(self.source.companions),
                "config.json": _digest(self.source.config),
            },
            "family": self.family,
            "table": self.table.fingerprint,
            "options": self.options.to_json(),
            "quantization": self.quantization
            and {"config": self.quantization.config["name"], "rules": _digest(self.quantization.config)},
            "sizes": [CHUNK_BYTES, PIECE_BYTES, UNIT_BYTES],
        }

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two plans that write the same."""
        return _digest(self.facts)

    def to_json(self, peak_memory: int) -> dict[str, Any]:
        """What `convert --dry-run --json` prints."""
        return {
            "family": self.family,
            "source": {"name": self.source.name, "tensors": len(self.source.tensors), "bytes": self.source.nbytes},
            "mapped": self.mapped,
            "skipped": [vars(skip) for skip in self.skipped],
            "unmapped": list(self.unmapped),
            "faults": list(self.faults),
            "parameters": self.parameters,
            "output_bytes": self.output_bytes,
            "peak_memory_bytes": peak_memory,
            "arrays": {
                pattern: {
                    "count": len(names),
                    "shape": self.arrays[names[0]].shape,
                    "dtype": self.arrays[names[0]].dtype.name,
                    "axes": self.arrays[names[0]].axes,
                }
                for pattern, names in collapse(self.arrays).items()
            },
        }

    def check(self) -> None:
        """Raises MappingError with every fault if there is one."""
        if self.faults:
            count = len(self.faults)
            raise MappingError(
                f"{count} {'patterns' if count > 1 else 'pattern'} of {self.source.name} and the table of "
                f"{self.family} do not fit each other",
                details=shorten(self.faults),
                hint=f"see `tpuconv families {self.family} --table`; add a Map(...), or name what is not needed in "
                "ignore=",
            )


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def make_plan(
    source: Source,
    family: str,
    table: MappingTable,
    config: HasAxes,
    options: Options,
    quantization: Quantization | None = None,
) -> Plan:
    """Plans a conversion from headers alone. Nothing is raised for what does not fit: see `Plan.check`.

    Raises:
        UsageError: `options.layers` lies outside the model, it has not the layers of `include_mtp`, or nothing is
            encoded that could be kept.
        UnsupportedConfig: an encoding that is not implemented, or layers that cannot be stacked.
        MappingError: the config asks for so many more tensors than there are that they are not listed.
    """
    if options.scan_layers:
        if why := getattr(config, "unscannable", ""):
            raise UnsupportedConfig(
                f"--scan-layers cannot stack the layers of {source.name}: {why}", hint="leave it out"
            )
        table = table.stack_layers()
    mtp = options.include_mtp
    if mtp and not config.axes.get(MTP):
        raise UsageError(f"{source.name} has no layers that predict further tokens", hint="leave out --include-mtp")
    if mtp and options.layers is not None:
        raise UsageError("--include-mtp does not go with --layers", hint="leave out one of them")
    if (asked := table.count(config, mtp)) > TENSORS_TO_LIST + 4 * len(source.tensors):
        raise MappingError(
            f"config.json asks for {asked} tensors, and {source.name} has {len(source.tensors)}",
            hint="num_hidden_layers and the number of experts are not those of these weights",
        )
    bindings = table.bind(_cut_layers(config, options.layers), mtp)
    expected = {name: shape for b in bindings for name, shape in b.src_shapes().items()}
    everywhere = {name for b in table.bind(config) for name in b.src_shapes()} if options.layers else set(expected)
    tensors, faults = decode_names(source.tensors, source.encoding, any_scales=options.allow_nonfinite)
    skipped: dict[str, list[str]] = {}
    why_ignored, known_copies = table.ignored(config, mtp), table.copies_of(config, mtp)
    copies, unmapped = {}, []
    for name, tensor in tensors.items():
        if name in expected:
            continue
        if name in everywhere:
            assert options.layers is not None
            reason = f"outside --layers {options.layers.start}-{options.layers.stop - 1}"
        elif original := _original(name, known_copies, expected):
            copies[name] = original
            reason = f"a copy of {original}"
        elif (why := why_ignored(name) or (why_unread(name) if source.encoding else None)) is not None:
            reason = why
        else:
            unmapped.append(name)
            continue
        skipped.setdefault(reason, []).extend(info.name for info in tensor.stored)

    faults += [_describe(tensors, pattern, names, "has no row") for pattern, names in collapse(unmapped).items()]
    # What has a fault already is not missing too.
    missing = [name for name in expected if name not in tensors and name not in source.tensors]
    faults += [f"{pattern}  is missing ({len(names)} tensors)" for pattern, names in collapse(missing).items()]
    wrong = [n for n, shape in expected.items() if n in tensors and tensors[n].shape != shape]
    for pattern, names in collapse(wrong).items():
        faults.append(_describe(tensors, pattern, names, f"should be {list(expected[names[0]])} by config.json"))
    for copy, original in copies.items():
        if original in tensors and _kind(tensors[copy]) != _kind(tensors[original]):
            faults.append(f"{copy}  should be a copy of {original}, but has another shape or dtype")
    faults += _dtype_faults(tensors, bindings)

    kept: dict[str, Kept] = {}
    if options.encoding == "keep" and not any(tensor.scheme for tensor in tensors.values()):
        raise UsageError(
            f"{source.name} is not encoded: there are no codes and scales to keep", hint="leave --encoding out"
        )
    wanted = [b for b in bindings if options.encoding == "keep" or _all_kept(b, quantization)]
    if wanted and not faults:
        tensors, bindings, kept, faults = keep(tensors, bindings, wanted)

    arrays: dict[str, Array] = {}
    units: tuple[Unit, ...] = ()
    if not faults:
        pieces = []
        for binding in bindings:
            own, cut = _cut(tensors, binding, options.dtype, quantization.encoders if quantization else {})
            faults += [f"{array.name}  is made by two rows of the table" for array in own if array.name in arrays]
            arrays |= {array.name: array for array in own}
            pieces += cut
        units = _units(source, tensors, pieces)
    skips = [Skip(p, len(names), why) for why, all_names in skipped.items() for p, names in collapse(all_names).items()]
    return Plan(
        source=source,
        tensors=tensors,
        family=family,
        table=table,
        options=options,
        quantization=quantization,
        kept=kept,
        bindings=tuple(bindings),
        arrays=arrays,
        units=units,
        skipped=tuple(skips),
        copies=copies,
        unmapped=tuple(unmapped),
        faults=tuple(faults),
    )


def _original(name: str, copies: Mapping[str, str], expected: Mapping[str, Shape]) -> str | None:
    """What a tensor is a copy of: perhaps of one that is a copy itself, as the head of a tied model is."""
    original = copies.get(name)
    while original is not None and original not in expected:
        original = copies.get(original)
    return original


def _all_kept(binding: Binding, quantization: Quantization | None) -> bool:
    return quantization is not None and all(name in quantization.kept for s in binding.dst for name in s.names)


@dataclass(frozen=True)
class _CutConfig:
    """A config of which only a part of the layers is asked for."""

    config: HasAxes
    axes: Mapping[str, int | Sequence[int]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _cut_layers(config: HasAxes, layers: range | None) -> HasAxes:
    if layers is None:
        return config
    axes = dict(config.axes)
    have = _values(axes[LAYERS])
    if not layers or layers[0] not in have or layers[-1] not in have:
        wanted = f"{layers.start}-{layers.stop - 1}"
        raise UsageError(f"--layers {wanted} is no part of the model's layers {have[0]}-{have[-1]}")
    cut = {x: [i for i in _values(axes[x]) if i in layers] for x in LAYER_INDICES if x in axes}
    return _CutConfig(config, axes | cut)


def _values(axis: int | Sequence[int]) -> Sequence[int]:
    return range(axis) if isinstance(axis, int) else axis


def _kind(tensor: Tensor) -> tuple[str, Shape, bool]:
    return tensor.values.dtype, tensor.shape, tensor.scheme is None


def _describe(tensors: Mapping[str, Tensor], pattern: str, names: list[str], fault: str) -> str:
    tensor = tensors[names[0]]
    count = f"{len(names)} tensors" if len(names) > 1 else "1 tensor"
    return f"{pattern}  {tensor.values.dtype} {list(tensor.shape)} ({count}) {fault}"


def _dtype_faults(tensors: Mapping[str, Tensor], bindings: list[Binding]) -> list[str]:
    odd, mixed = [], []
    for binding in bindings:
        own = [tensors[n] for stack in binding.src for n in stack.names if n in tensors]
        odd += [tensor.name for tensor in own if tensor.dtype.name not in FLOATS]
        if len({(tensor.values.dtype, tensor.scheme is None) for tensor in own}) > 1:
            mixed.append(own[0].name)
    return [
        _describe(tensors, pattern, names, "is no plain float, and config.json does not say how it is encoded")
        for pattern, names in collapse(odd).items()
    ] + [f"{pattern}  has not the dtype of the tensors it is joined with" for pattern in collapse(mixed)]


# -- cutting: chunks, pieces, units -----------------------------------------------------------------------------------


def _cut(
    tensors: Mapping[str, Tensor], binding: Binding, dtype: str, encoders: Mapping[str, Encoder]
) -> tuple[list[Array], list[Piece]]:
    """The arrays of a binding, and the pieces in which it is converted: boxes of at most about PIECE_BYTES, cut along
    letters that are outermost in the source first, so that reading goes on in long runs. What is encoded together stays
    together."""
    layout, sizes = binding.layout, binding.sizes
    letters = list(
        dict.fromkeys(x for axes in layout.src for axis in axes for x in axis.letters() if sliceable(layout, x))
    )
    first = tensors[binding.src[0].names[0]]
    values = first.dtype if dtype == "auto" or binding.row.buffer or first.kept else FLOATS[dtype]
    itemsize = max(values.itemsize, first.dtype.itemsize)
    targets = [
        _Target(axes, shape, encoders.get(stack.names[0]), values, letters)
        for axes, shape, stack in zip(layout.dst, layout.dst_shapes(sizes), binding.dst, strict=True)
    ]
    steps: dict[str, int] = {}

    def nbytes() -> int:
        return sum(map(prod, layout.src_shapes({**sizes, **steps}))) * itemsize

    for letter in letters:
        if nbytes() <= PIECE_BYTES:
            break
        # The smallest range of the letter that is whole chunks and blocks in every target, and as many as fit.
        least = lcm(*(target.least(letter, sizes[letter]) for target in targets))
        if least < sizes[letter]:
            steps[letter] = least
            steps[letter] = min(-(-sizes[letter] // least), max(1, PIECE_BYTES // nbytes())) * least

    sources = tuple(name for stack in binding.src for name in stack.names)
    arrays = [
        array
        for target, stack in zip(targets, binding.dst, strict=True)
        for array in target.arrays(stack.names[0], sizes, steps, sources, binding.row.buffer)
    ]
    ranges = [[(x, (a, min(a + step, sizes[x]))) for a in range(0, sizes[x], step)] for x, step in steps.items()]
    return arrays, [Piece(binding, dict(box), values) for box in product(*ranges)]


class _Target:
    """One parameter while it is cut: the letters that lead its axes, the shape of its chunks, the blocks in which it
    is encoded."""

    def __init__(
        self, axes: Axes, shape: Shape, encoder: Encoder | None, dtype: np.dtype[Any], letters: list[str]
    ) -> None:
        self.axes, self.shape = format_axes(axes), shape
        self.leads = [lead(axis) for axis in axes]
        ones = (1,) * len(shape)
        self.parts = encoder.parts if encoder else (Part("", dtype, ones, own=True),)
        self.blocks = encoder.blocks if encoder else ones
        itemsize = next(part.dtype.itemsize for part in self.parts if part.own)
        self.chunks = _chunks(shape, self.leads, letters, itemsize)

    def least(self, letter: str, size: int) -> int:
        """The smallest range of a letter that is whole chunks and blocks."""
        at = self.leads.index(letter)
        inner = self.shape[at] // size
        return lcm(self.chunks[at], self.blocks[at], inner) // inner

    def arrays(
        self, name: str, sizes: Mapping[str, int], steps: Mapping[str, int], sources: tuple[str, ...], buffer: bool
    ) -> Iterator[Array]:
        pieces = tuple(
            n // sizes[x] * steps[x] if x in steps else n for x, n in zip(self.leads, self.shape, strict=True)
        )
        for part in self.parts:
            shape = tuple(n // b for n, b in zip(self.shape, part.blocks, strict=True))
            piece = tuple(n // b for n, b in zip(pieces, part.blocks, strict=True))
            chunks = self.chunks if part.own else piece
            shards = tuple(-(-n // c) * c for n, c in zip(piece, chunks, strict=True))
            full_name = f"{name}.{part.suffix}" if part.suffix else name
            is_buffer = buffer or not part.own
            yield Array(shape, part.dtype, shards, chunks, full_name, self.axes, sources, is_buffer)


def _chunks(shape: Shape, leads: list[str], letters: list[str], itemsize: int) -> Shape:
    """The shape in which an array is stored and read: stacked axes are cut first, then those that a mesh divides, eight
    ways where it does not make crumbs, then whatever is left until a chunk is small enough."""
    ranks = {letter: 2 if "tensor" in axes else 3 for letter, axes in MESH_AXES.items()} | {LAYERS: 0, EXPERTS: 1}
    order = sorted((i for i, x in enumerate(leads) if x in letters), key=lambda i: (ranks.get(leads[i], 4), i))
    counts = [1] * len(shape)

    def nbytes() -> int:
        return prod(-(-n // c) for n, c in zip(shape, counts, strict=True)) * itemsize

    for goal, enough in ((8, CHUNK_BYTES // 4), (64, CHUNK_BYTES), (max(shape, default=1), CHUNK_BYTES)):
        for i in order:
            limit = shape[i] if leads[i] in (LAYERS, EXPERTS) else min(goal, shape[i])
            while counts[i] < limit and nbytes() > enough:
                counts[i] = _divisor(shape[i], 2 * counts[i])
    return tuple(-(-n // c) for n, c in zip(shape, counts, strict=True))


def _divisor(size: int, wanted: int) -> int:
    """The smallest divisor of `size` from `wanted` to twice that; `wanted` where there is none (uneven chunks)."""
    return next((n for n in range(wanted, min(2 * wanted, size) + 1) if size % n == 0), min(wanted, size))


def _units(source: Source, tensors: Mapping[str, Tensor], pieces: list[Piece]) -> tuple[Unit, ...]:
    """Gathers pieces to units, in the order in which the source lies on disk."""
    order = {shard.name: i for i, shard in enumerate(source.shards)}

    def place(piece: Piece) -> tuple[int, int]:
        name, start = piece.begins()
        tensor = tensors[name]
        return order[tensor.values.shard], tensor.values.offset + tensor.stored_bytes(start)

    units: list[Unit] = []
    own: list[Piece] = []
    size = 0
    for piece in sorted(pieces, key=place):
        own.append(piece)
        size += _stored_bytes(tensors, piece)
        if size >= UNIT_BYTES:
            units.append(Unit(f"u{len(units):05d}", tuple(own), size))
            own, size = [], 0
    if own:
        units.append(Unit(f"u{len(units):05d}", tuple(own), size))
    return tuple(units)


def _stored_bytes(tensors: Mapping[str, Tensor], piece: Piece) -> int:
    """Bytes in which the values of a piece are stored, scales aside."""
    return tensors[piece.binding.src[0].names[0]].stored_bytes(piece.elements)
