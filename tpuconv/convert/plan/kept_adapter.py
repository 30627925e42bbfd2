"""Plans the LoRA tree of a trainer from an adapter of PEFT, which is not merged but kept to be trained further.

The source is the adapter. Its pairs, which are small, are moved to the target's parameters while the conversion is
planned. The model is needed for its config and the names of its tensors alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.convert.plan.coverage import make_plan
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.types import Plan
from tpuconv.errors import LayoutError, MappingError, UnsupportedConfig, UsageError, shorten
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.saved import is_transposed_by_peft, release_of_modules
from tpuconv.models.registry import Family
from tpuconv.names import collapse
from tpuconv.notation.layout import format_axes
from tpuconv.notation.pairs import PAIR_ENDS, RANK, Pair, PairRow, StoredMatrix
from tpuconv.notation.release import AS_TABLED
from tpuconv.notation.sizes import HasSizes, WithSizes, configs_by_part
from tpuconv.notation.table import EXPERTS, Map, MappingTable
from tpuconv.sources.adapter import Adapter
from tpuconv.sources.adapter_changes import LowRank
from tpuconv.sources.headers import CODES, TensorInfo
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import UNVERIFIED, Source
from tpuconv.storage.hashes import hash_bytes
from tpuconv.targets.compose import target_table
from tpuconv.targets.registry import get_target
from tpuconv.targets.target import Target
from tpuconv.targets.trees import placed_parts


def plan_kept_adapter(source: Source, family: Family, options: Options) -> Plan:
    """Returns the plan for the pairs of the adapter of `options`, in the tree of the target.

    Args:
        source: the model that the adapter belongs to.
        family: of the model.
        options: with one adapter, which was read.

    Raises:
        UsageError: there is not one adapter, or an option is for weights; the target has no arrays.
        MappingError: it changes what is no matrix of the model, or in another way than by pairs. They are named.
    """
    adapter, target = _one(options), get_target(options.target)
    if target.is_safetensors:
        raise UsageError(
            f"the target {target.name} has no LoRA tree",
            hint="leave out `keep_adapter=`, or give a trainer's `target=`",
        )
    returns = family.returns(source.config, source.tensors)
    kind = family.in_targets(source.config["model_type"])
    read = partial(family.read_config, source.config, options.allow_config, source.tensors, returns)
    config = read(_changed_parts(adapter, family, target, kind, read))
    released, pairs = _released(adapter, source, family, config, returns)
    table, sizes = target_table(target, *kind, released, config, scan_layers=options.scan_layers)
    changed: dict[str, tuple[PairRow, Pair]] = {}
    found: set[str] = set()
    faults = []
    for binding in table.bind(sizes):
        own = {name: pairs[name] for stack in binding.src for name in stack.names if name in pairs}
        if not own:
            continue
        found |= own.keys()
        try:
            row = PairRow(binding)
            if is_transposed_by_peft(family.name, row):
                own = {name: pair.transposed for name, pair in own.items()}
            changed |= {name: (row, pair) for name, pair in row.of_parameters(own).items()}
        except LayoutError as error:
            faults.append(f"{', '.join(own)}: {error}")
    faults += [f"{name}: {target.name} has no such matrix" for name in collapse(sorted(pairs.keys() - found))]
    if faults:
        raise MappingError(
            f"the adapter {adapter.name} cannot be kept for {target.name}",
            details=shorten(faults),
            hint="leave out `keep_adapter=` to merge it",
        )
    arrays, metadata = _stored(changed, target, adapter.alpha or 1.0)  # a change of scale 0 is 0 by any alpha
    parts = {
        target.pair_name(name, end): row.binding.row.part for name, (row, _) in changed.items() for end in PAIR_ENDS
    }
    rows = [Map(name, name, format_axes(matrix.axes), part=parts[name]) for name, matrix in arrays.items()]
    plain = replace(options, adapter=())
    plan = make_plan(
        _pair_source(source, arrays),
        family.name,
        MappingTable(rows, returns=returns),
        _with_ranks(sizes, arrays),
        plain,
    )
    return replace(plan, pair_metadata=metadata)


def _one(options: Options) -> Adapter:
    if len(options.adapters) != 1:
        raise UsageError("`keep_adapter=` keeps one adapter", hint="give one `adapter=`")
    for name in ("quantize", "layers", "include_mtp", "compress"):
        if getattr(options, name):
            raise UsageError(
                f"`{name}=` is for the weights of a model, and `keep_adapter=` writes LoRA alone", hint="leave it out"
            )
    return options.adapters[0]


def _changed_parts(
    adapter: Adapter, family: Family, target: Target, kind: tuple[str, str], read: Callable[[Collection[str]], Any]
) -> tuple[str, ...]:
    """Returns the parts beside the text model that the adapter changes.

    Raises:
        UnsupportedConfig: the target has no place for one of them.
    """
    parts = family.parts_among(adapter.changes)
    if lacking := set(parts) - set(placed_parts(target, *kind, parts, read)):
        config = read(parts)
        encoders = [
            f"{part} encoder ({config.parts[part].modality.tower.summary})" for part in parts if part in lacking
        ]
        raise UnsupportedConfig(
            f"{target.name} has no place for the {' and the '.join(encoders)} of {family.name}, which the adapter "
            f"{adapter.name} changes",
            hint="give another `target=`, or leave out `keep_adapter=` to merge it",
        )
    return parts


def _released(
    adapter: Adapter, source: Source, family: Family, config: DecoderConfig, returns: str
) -> tuple[MappingTable, dict[str, Pair]]:
    """The first table that names all that the adapter changes, and the pairs by its names: PEFT names modules as
    transformers has them, and other programs as releases do."""
    changes = _changes(adapter, config)
    reader = family.release_reader(returns, config.parts)
    tables = [
        family.table_of(release_of_modules(family.name), config, returns),
        family.table_for(source.tensors, config, returns),
        family.table_of(AS_TABLED, config, returns),
    ]
    fewest: list[str] | None = None
    for table in tables:
        known = {name for binding in table.bind(config) for stack in binding.src for name in stack.names}
        names = {name: name if name in known else reader.speller.spelled(name) or name for name in changes}
        missing = [name for name, own in names.items() if own not in known]
        if not missing:
            return table, {names[name]: pair for name, pair in changes.items()}
        fewest = missing if fewest is None or len(missing) < len(fewest) else fewest
    raise MappingError(
        f"the adapter {adapter.name} changes tensors that {family.name} does not have",
        details=shorten(list(collapse(fewest or ()))),
        hint="give the model that the adapter belongs to",
    )


def _changes(adapter: Adapter, config: DecoderConfig) -> dict[str, Pair]:
    found: dict[str, LowRank] = {}
    others = []
    for name, change in adapter.changes.items():
        if isinstance(change, LowRank) and change.magnitude is None and not change.rounded:
            found[name] = change
        else:
            others.append(name)
    if others:
        raise MappingError(
            f"the adapter {adapter.name} changes tensors in another way than by pairs of low-rank matrices",
            details=shorten(list(collapse(others))),
            hint="leave out `keep_adapter=` to merge it",
        )
    count = config.sizes.get(EXPERTS, 0)
    for experts in adapter.experts:
        found[experts.name] = (
            experts.stacked(count, input_first=False) if ".experts" in experts.name else experts.alone()
        )
    return {
        name: Pair(change.file.values(change.right), change.file.values(change.left), change.scaling)
        for name, change in found.items()
    }


def _stored(
    changed: Mapping[str, tuple[PairRow, Pair]], target: Target, alpha: float
) -> tuple[dict[str, StoredMatrix], dict[str, Any]]:
    """The arrays of the pairs of parameters as the target has them, by name, and Orbax's metadata about them."""
    metadata = {}
    if target.pairs.metadata is not None:
        rank = max(pair.a.shape[-1] for _, pair in changed.values())
        changed = {name: (row, row.padded(pair, rank)) for name, (row, pair) in changed.items()}
        metadata = target.pairs.metadata(rank, alpha)
    arrays: dict[str, StoredMatrix] = {}
    for name, (row, pair) in changed.items():
        stored = row.stored(name, pair, alpha, flat=target.pairs.is_flat)
        arrays |= {target.pair_name(name, end): x for end, x in zip(PAIR_ENDS, stored, strict=True)}
    return arrays, metadata


def _with_ranks(config: HasSizes, arrays: Mapping[str, StoredMatrix]) -> HasSizes:
    """The config with the sizes of the words for ranks, in each part."""
    ranks = {
        axis.letter: size
        for matrix in arrays.values()
        for axis, size in zip(matrix.axes, matrix.values.shape, strict=True)
        if axis.letter.startswith(RANK)
    }
    by_part = {
        part: WithSizes(own, {**own.sizes, **ranks}, own.layer_sets) for part, own in configs_by_part(config).items()
    }
    text = by_part.pop("")
    return _WithParts(text.config, text.sizes, text.layer_sets, by_part)


@dataclass(frozen=True)
class _WithParts(WithSizes):
    parts: Mapping[str, HasSizes]


def _pair_source(model: Source, arrays: Mapping[str, StoredMatrix]) -> "PairSource":
    values = {name: np.ascontiguousarray(matrix.values) for name, matrix in arrays.items()}
    infos = {name: TensorInfo(name, CODES[x.dtype.name], x.shape, name, 0, x.nbytes) for name, x in values.items()}
    shards = tuple(
        SourceShard(name, x.nbytes, digest=str(hash_bytes(x.tobytes())["xxh3_128"])) for name, x in values.items()
    )
    return PairSource(
        model.folder, model.config, infos, shards, model.repo, model.commit, model.companions, arrays=values
    )


@dataclass(frozen=True)
class PairSource(Source):
    """Pairs in memory, each array a shard of its own whose hash is known."""

    arrays: Mapping[str, np.ndarray] = field(kw_only=True)

    hashed = False

    @property
    def encoding(self) -> None:
        """None: config.json describes the encoding of the model."""

    def origin(self, hashes: Mapping[str, str | None]) -> dict[str, Any]:
        """See `Source`."""
        return {
            **super().origin(dict.fromkeys(shard.name for shard in self.shards)),
            "shards": {},
            "verified": UNVERIFIED,
        }

    def open(
        self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: Collection[str] | None = None
    ) -> Reader:
        """See `Source`."""
        return _PairReader(self.arrays)

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """See `Source`: none."""
        return []


class _PairReader(Reader):
    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        out[:] = self._arrays[info.name].reshape(-1).view(np.uint8)[start : start + len(out)].data

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        out[...] = self._arrays[info.name][tuple(box)].view(out.dtype)

    def hash_of(self, shard: str) -> None:
        """None: the hash of each array is known."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Nothing: arrays in memory do not change."""

    def close(self) -> None:
        """Nothing is open."""
