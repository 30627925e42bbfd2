"""A plan as data: which slabs of the source become which boxes of which arrays, and what is skipped."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.checkpoint.shards import ShardedArraySpec
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.quantization import Encoder, Quantization
from tpuconv.convert.plan.units import Buffers, Slab, WorkUnit, gather, stored_bytes
from tpuconv.encodings.adapted import ONE_MATRIX
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.passthrough_rows import KEEP_FAULT, Passthrough
from tpuconv.errors import MappingError, shorten
from tpuconv.location import to_location
from tpuconv.models.common.heads import headless_name, is_of_head
from tpuconv.models.common.ignored import IgnoredKey
from tpuconv.names import collapse
from tpuconv.notation.layout import parse_axes
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import Binding, MappingTable
from tpuconv.sources.companions import AN_ADAPTER, LeftOut
from tpuconv.sources.source import Source
from tpuconv.storage.local_file import READ_BYTES, room_for
from tpuconv.storage.places import real
from tpuconv.storage.sealed import MANIFEST_FORMAT
from tpuconv.targets.target import Target

ZEROS = ""
"""In `Plan.copies` the original of a tensor whose values must all be 0."""
IS_MISSING = "  is missing"
"""In a fault, after the pattern of the tensors' names."""
OTHER_DTYPE = "has another dtype than the tensors it is joined with"
FIT_WITHOUT = "all of them fit without it"
"""In the faults of a tensor, and of a segment before all names."""
OF_ADAPTERS = (
    (r"^(\w+\.)*(score|classifier)\.\S*  is changed by the adapter .*, and not in the model",
     "the adapter belongs to a classifier: load the base model by `AutoModelForSequenceClassification` of transformers "
     "with its `num_labels`, save it, and convert that"),
    (r"^(\w+\.)*(lm_head|embed_tokens|embed_in|embed_out|wte|word_embeddings)\.weight  has the shape .*, its change",
     "the adapter has another vocabulary: call `resize_token_embeddings` of the base model with its number of rows, "
     "save the model with its config.json, and convert that"),
)  # fmt: skip
"""The hints for plans all of whose faults match a pattern, of plans with adapters."""

CAUSES = (
    (r" \[0\] \(.*should be", "the tensors were empty when they were saved, as DeepSpeed ZeRO 3 had divided them: join "
     "its shards by `python zero_to_fp32.py CHECKPOINT OUT --safe_serialization`, or save the model again with "
     "stage3_gather_16bit_weights_on_model_save"),
    (r"_flat_param", "these are the parameters of FSDP, joined: save the model again with state_dict_type "
     "FULL_STATE_DICT"),
    (r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save)\.", "there is an adapter in the model: "
     "save the model that `merge_and_unload` of peft returns; or save the adapter alone, and convert its base model "
     "with `adapter=`"),
    (OTHER_DTYPE, "save the weights again in one dtype, as `model.to(torch.bfloat16)` and `save_pretrained` do"),
    (FIT_WITHOUT, "a program around the model put it there: save the weights again with names without it"),
)  # fmt: skip
"""Patterns of faults that trainers cause, and what to do."""
INTEGER_DTYPES = ("int32", "int64", "bool")
"""Dtypes of buffers, besides floats."""
FLOAT_DTYPES = {np.dtype(t).name: np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class OutputArray(ShardedArraySpec):
    """One array of the output: a parameter, or a part of an encoded one. `axes` are its axes in letters. A `buffer`
    does not count as parameters. Its values lack the axes `dropped`, all of size 1."""

    name: str
    axes: str
    sources: tuple[str, ...]
    buffer: bool = False
    dropped: tuple[int, ...] = ()

    def squeezed(self, dropped: Sequence[int]) -> "OutputArray":
        """Returns the array without these axes, which have size 1."""

        def kept(sizes: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(size for i, size in enumerate(sizes) if i not in dropped)

        axes = " ".join(map(str, kept(parse_axes(self.axes))))
        shape, shards, chunks = kept(self.shape), kept(self.shards), kept(self.chunks)
        return replace(self, shape=shape, shards=shards, chunks=chunks, axes=axes, dropped=tuple(dropped))

    def parts(self, box: Sequence[slice]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yields for each shard of a box its part of the array, and of the box."""
        grid = (range(b.start // n, -(-b.stop // n)) for b, n in zip(box, self.shards, strict=True))
        for index in product(*grid):
            places = list(zip(index, self.shards, box, strict=True))
            part = tuple(slice(i * n, min((i + 1) * n, b.stop)) for i, n, b in places)
            yield part, tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape, dtype and axes: arrays of one kind are shown as one."""
        return self.shape, self.dtype, self.axes

    @property
    def nbytes(self) -> int:
        """The number of bytes, without checksums."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Skip:
    """Source tensors that are not converted, and why."""

    pattern: str
    count: int
    reason: str


@dataclass(frozen=True, repr=False)
class Plan:
    """See the module. `passthrough` are the parameters that stay encoded. `copies` are tensors that are not converted,
    each with the tensor whose values it must have, or with `ZEROS`. A plan with `faults` cannot be run: `check`
    raises them. `config` is the family's reading of config.json, with the letters of the table; `ignored_config` are
    the keys of config.json that are not read. The output is for `target`, whose tree has the names `empty` without
    arrays; `pair_metadata` is Orbax's metadata about LoRA for it."""

    source: Source
    tensors: Mapping[str, Tensor]
    family: str
    table: MappingTable
    options: Options
    bindings: tuple[Binding, ...]
    skipped: tuple[Skip, ...]
    copies: Mapping[str, str]
    unmapped: tuple[str, ...]
    faults: tuple[str, ...]
    ignored_config: tuple[IgnoredKey, ...]
    target: Target
    config: HasSizes
    empty: tuple[str, ...]
    quantization: Quantization | None = None
    passthrough: Mapping[str, Passthrough] = field(default_factory=dict)
    arrays: Mapping[str, OutputArray] = field(default_factory=dict)
    slabs: tuple[Slab, ...] = ()
    differs: str = ""
    pair_metadata: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: all that is in a plan of a large model takes minutes to print."""
        return f"<Plan of {self.source.folder}: {len(self.arrays)} arrays in {len(self.units)} units>"

    @cached_property
    def units(self) -> tuple[WorkUnit, ...]:
        """The slabs in units of work, in the order of the source on disk."""
        return gather(self.source, self.tensors, self.slabs)

    @cached_property
    def buffers(self) -> Buffers:
        """The memory that one job needs."""
        values = raw = changed = encoded = 0
        for slab in self.slabs:  # 100,000 of a large model: once, for all
            elements, tensors = slab.elements, [self.tensors[name] for name in slab.names]
            values = max(values, elements * slab.dtype.itemsize)
            if not all(tensor.is_stored_as(slab.dtype) for tensor in tensors):
                raw = max(raw, *(tensor.stored_bytes(elements) for tensor in tensors))
                changed = max(changed, *(tensor.work_bytes(elements) for tensor in tensors))
            if self.is_encoded(slab):
                encoded = max(encoded, 2 * elements)
            if slab.binding.arithmetic:
                encoded = max(encoded, 10 * elements)
        shard = max((array.shard_bytes for array in self.arrays.values()), default=0)
        return Buffers(room_for(values), raw, room_for(READ_BYTES), changed, shard, encoded)

    @property
    def custom_metadata(self) -> dict[str, Any]:
        """Orbax's metadata for the program that loads the output."""
        return {**self.target.custom_metadata(self.options.scan_layers), **self.pair_metadata}

    @property
    def encoders(self) -> Mapping[str, Encoder]:
        """The encoders of the parameters that are quantized."""
        return self.quantization.encoders if self.quantization else {}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The files of the source that are not copied, and why. An adapter of its folder may be merged."""
        source, places = self.source, {adapter.name for adapter in self.options.adapters}
        is_merged = source.repo in places or real(source.folder) in {real(to_location(place)) for place in places}
        return tuple(each for each in source.left_out if not (is_merged and each.reason == AN_ADAPTER))

    @property
    def mapped(self) -> int:
        """The number of source tensors that are used."""
        used = {name for array in self.arrays.values() for name in array.sources}
        return len({info.name for name in used for info in self.tensors[name].stored})

    @property
    def parameters(self) -> int:
        """The number of trained elements. Tied ones count once."""
        return sum(prod(array.shape) for array in self.arrays.values() if not array.buffer)

    @property
    def rounded(self) -> str:
        """Says which parameters the way back from the target rounds; empty if it rounds none."""
        rounding = [name for b in self.bindings for name, change in b.arithmetic.items() if change.rounds(b.sizes)]
        rounding = [name for name in rounding if name in self.arrays and self.arrays[name].dtype != np.float32]
        if not rounding:
            return ""
        return (
            f"{len(rounding)} of {len(self.arrays)} arrays have other values in {self.target.name}, such as "
            f"{rounding[0]}; in {self.arrays[rounding[0]].dtype.name} the way back rounds them "
            '(`dtype="float32"` does not)'
        )

    @property
    def output_bytes(self) -> int:
        """The number of bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def source_bytes(self) -> int:
        """The number of bytes that are read to be converted."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def hashes_shards(self) -> bool:
        """True if shards are read completely, and so hashed. A trial on some layers would read all other shards only to
        hash them."""
        return self.source.hashed and self.options.layers is None

    def shards_of(self, unit: WorkUnit) -> set[str]:
        """Returns the shards of the source that a unit is made from."""
        return {i.shard for slab in unit.slabs for name in slab.names for i in self.tensors[name].stored}

    def is_encoded(self, slab: Slab) -> bool:
        """Returns True if the slab has a target that is quantized."""
        return any(name in self.encoders for stack in slab.binding.dst for name in stack.names)

    def is_stored_as_wanted(self, slab: Slab) -> bool:
        """Returns True if the stored bytes are already the values. An adapter may change some tensors of a stack."""
        return all(self.tensors[name].is_stored_as(slab.dtype) for name in slab.names)

    def is_plain(self, slab: Slab) -> bool:
        """Returns True if the stored bytes are already the values, without an encoding."""
        tensors = (self.tensors[name] for name in slab.names)
        return all(tensor.scheme is None and tensor.is_stored_as(slab.dtype) for tensor in tensors)

    def is_box(self, slab: Slab) -> bool:
        """Returns True if the slab is a box of a single tensor of the source, stored as plain values of the same
        dtype."""
        layout, stack = slab.binding.layout, slab.binding.src[0]
        return layout.src == layout.dst and len(layout.src) == 1 and not stack.depth and self.is_plain(slab)

    def stored_bytes(self, slab: Slab) -> int:
        """Returns the bytes that are read for the values of a slab, without scales."""
        return stored_bytes(self.tensors, slab)

    def written_bytes(self, slab: Slab) -> int:
        """About how many bytes the slab adds to the output."""
        all_elements = sum(map(prod, slab.binding.layout.src_shapes(slab.binding.sizes)))
        names = [part for stack in slab.binding.dst for name in stack.names for part in self.stored_names(name)]
        return sum(self.arrays[name].nbytes for name in names) * slab.elements // max(1, all_elements)

    def stored_names(self, parameter: str) -> tuple[str, ...]:
        """Returns the names of the arrays that hold a parameter."""
        encoder = self.encoders.get(parameter)
        return tuple(self.target.part(parameter, part.suffix) for part in encoder.parts) if encoder else (parameter,)

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that determines what is written, by name. Of a shard with a promised sha256 only that counts; of
        others the size and the digest."""
        shards = [[s.name, s.sha256 or [s.size, s.digest]] for s in self.source.shards]
        headers = [[t.name, t.dtype, t.shape, t.shard, t.offset] for t in self.source.tensors.values()]
        return {
            "format": MANIFEST_FORMAT,
            "source": {
                "repo": self.source.repo,
                "commit": self.source.commit,
                "files of weights": _digest(shards),
                "headers": _digest(headers),
                "files beside them": _digest(self.source.companions),
                "config.json": _digest(self.source.config),
            },
            "family": self.family,
            "table": self.table.fingerprint,
            "options": self.options.to_json(),
            "quantization": self.quantization
            and {"config": self.quantization.config["name"], "rules": _digest(self.quantization.config)},
            "sizes": [sizes.CHUNK_BYTES, sizes.SLAB_BYTES, sizes.UNIT_BYTES],
            **({"pairs": self.pair_metadata} if self.pair_metadata else {}),
        }

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two plans that write the same."""
        return _digest(self.facts)

    def to_json(self, peak_memory: int) -> dict[str, Any]:
        """Returns the keys of `convert --dry-run --json`."""
        return {
            "family": self.family,
            "source": {"name": self.source.name, "tensors": len(self.source.tensors), "bytes": self.source.nbytes},
            "mapped": self.mapped,
            "adapters": [adapter.to_summary() for adapter in self.options.adapters],
            "skipped": [vars(skip) for skip in self.skipped],
            "ignored_config": [key.to_json() for key in self.ignored_config],
            "left_out": [file._asdict() for file in self.left_out],
            "unmapped": list(self.unmapped),
            "faults": list(self.faults),
            "parameters": self.parameters,
            "output_bytes": self.output_bytes,
            "peak_memory_bytes": peak_memory,
            "arrays": {
                pattern: _described([self.arrays[name] for name in names])
                for pattern, names in collapse(self.arrays, lambda name: self.arrays[name].kind).items()
            },
        }

    def check(self) -> None:
        """Checks that the plan can be run.

        Raises:
            MappingError: it has faults; all are listed.
        """
        count = len(self.faults)
        if self.faults and all(KEEP_FAULT in fault for fault in self.faults):
            raise MappingError(
                f"{self.source.name} has weights that {KEEP_FAULT}",
                details=shorten(self.faults),
                hint='`encoding="dequantize"` decodes them',
            )
        if self.faults and all(ONE_MATRIX in fault for fault in self.faults):
            raise MappingError(
                f"an adapter changes the head and the embedding of {self.source.name} apart, which are one matrix",
                details=shorten(self.faults),
                hint="save the model untied first: load it with tie_word_embeddings=False, and copy the embedding into "
                "its head",
            )
        if self.faults and not self.source.tensors:
            raise MappingError(
                f"the safetensors of {self.source.name} hold no tensors",
                hint="a trainer with divided weights (FSDP, DeepSpeed ZeRO 3) wrote them: join the shards beside them",
            )
        lost = [fault.partition(IS_MISSING)[0] for fault in self.faults if IS_MISSING in fault]
        if len(lost) == count > 0 and all(map(is_of_head, lost)):
            named = ", ".join(f'"{name}"' for name in map(headless_name, self.source.config.get("architectures") or ()))
            raise MappingError(
                f"{self.source.name} has no head, and config.json does not say that it is tied to the embedding",
                details=self.faults,
                hint="if it is an embedding model without a head, set architectures in config.json to "
                f"[{named or '...Model'}]; if it is a language model, the head is lost or tie_word_embeddings is wrong",
            )
        if self.faults:
            adapters = "that each adapter was trained on this model, " if self.options.adapters else ""
            causes, kind = (OF_ADAPTERS, all) if self.options.adapters else (CAUSES, any)
            known = (hint for pattern, hint in causes if kind(re.search(pattern, fault) for fault in self.faults))
            raise MappingError(
                f"{count} tensor {'patterns' if count > 1 else 'pattern'} of {self.source.name} "
                f"{'do' if count > 1 else 'does'} not match the {self.family} table",
                details=shorten(self.faults),
                hint=next(
                    known,
                    f"check {adapters}that config.json belongs to these files, with the same numbers of layers and "
                    f"sizes, and that no file is missing; `tpuconv families {self.family} --table` shows what the "
                    "family reads",
                ),
            )


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _described(arrays: Sequence[OutputArray]) -> dict[str, Any]:
    """Arrays whose names have one pattern, as JSON."""
    first = arrays[0]
    return {
        "count": len(arrays),
        "shape": first.shape,
        "dtype": first.dtype.name,
        "axes": first.axes,
        "bytes": sum(array.nbytes for array in arrays),
        "sources": list(collapse(name for array in arrays for name in array.sources)),
    }
