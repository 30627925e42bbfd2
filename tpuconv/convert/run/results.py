"""The results of units of work, and the entries of the journal that record them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tpuconv.checkpoint import manifest
from tpuconv.checkpoint.schema import STATISTICS
from tpuconv.jsonfile import Each, Optional, Range, Size

HASH_ENTRY = {"hash": str}
SUM = Range(0, (1 << 64) - 1)
UNIT_ENTRY = {
    "checksums": Each({"values": SUM, "crcs": SUM}),
    "figures": Each(STATISTICS),
    "shard_bytes": Optional(Each(Each(Size))),
    "tensor_scales": Optional(Each(float)),
}
"""Schemas of the journal's entries for the hash of a shard and for a unit of work."""


Checksums = dict[str, tuple[int, int]]
"""By array: the sums over chunks and over their crc32c, as a manifest has them."""


def add_sums(checksums: Checksums, name: str, parts: tuple[int, int]) -> None:
    """Adds parts to the checksums of an array."""
    values, crcs = checksums.get(name, (0, 0))
    checksums[name] = manifest.add_checksums((values, parts[0])), manifest.add_checksums((crcs, parts[1]))


@dataclass
class UnitResult:
    """The results of a unit of work.

    Attributes:
        checksums: the checksums of each array that it wrote to.
        statistics: the statistics of each quantized parameter, from its encoder.
        shard_bytes: for each compressed array, the sizes of the files that it wrote, by name.
        tensor_scales: the scales of tensors that it multiplied with scales of blocks, by the names of the source.
    """

    checksums: Checksums = field(default_factory=dict)
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)
    shard_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    tensor_scales: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the journal's entry."""
        sums = {name: dict(zip(("values", "crcs"), parts, strict=True)) for name, parts in self.checksums.items()}
        return {
            "checksums": sums,
            "figures": self.statistics,
            **({"shard_bytes": self.shard_bytes} if self.shard_bytes else {}),
            **({"tensor_scales": self.tensor_scales} if self.tensor_scales else {}),
        }

    def add(self, other: "UnitResult") -> None:
        """Adds what another part of the work found."""
        for name, sums in other.checksums.items():
            add_sums(self.checksums, name, sums)
        for name, found in other.statistics.items():
            manifest.add_statistics(self.statistics.setdefault(name, {}), found)
        for name, files in other.shard_bytes.items():
            self.shard_bytes.setdefault(name, {}).update(files)
        self.tensor_scales |= other.tensor_scales

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Returns the contents of the journal's entry of a unit."""
        checksums = {name: (sums["values"], sums["crcs"]) for name, sums in entry["checksums"].items()}
        return cls(checksums, entry["figures"], entry.get("shard_bytes", {}), entry.get("tensor_scales", {}))
