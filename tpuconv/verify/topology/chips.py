"""The kinds of TPUs, and the slices that are offered of each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tpuconv.errors import UsageError
from tpuconv.jsonfile import short

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One kind of TPU. Numbers are per jax device: a chip, or on v4 and TPU7x one of its two cores. They come from
    Google's specifications (cloud.google.com/tpu/docs), halved if a device is half a chip.

    Attributes:
        kind: jax's `device_kind`.
        hbm: bytes of HBM that libtpu's compiler gives a program, which is less than the specification.
        bandwidth: of the HBM in bytes/s.
        peak: FLOP/s of products in bfloat16.
        ici: bandwidth of one link in one direction in bytes/s.
        clock: in Hz.
        devices: jax devices of a chip.
        dims: dimensions of a slice.
        slices: the slices that are offered, smallest first.
    """

    kind: str
    hbm: int
    bandwidth: float
    peak: float
    ici: float
    clock: float
    devices: int = 1
    dims: int = 2
    slices: tuple[str, ...] = ()


SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SLICES_3D = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

CHIPS: Mapping[str, Chip] = {
    "v4": Chip("TPU v4", int(15.25 * GIB), 615e9, 137.5e12, 45e9, 1.05e9, devices=2, dims=3, slices=SLICES_3D),
    "v5e": Chip("TPU v5 lite", int(15.75 * GIB), 819e9, 197e12, 45e9, 1.5e9, slices=SLICES_2D),
    "v5p": Chip("TPU v5", int(95.74 * GIB), 2765e9, 459e12, 90e9, 1.75e9, dims=3, slices=SLICES_3D),
    "v6e": Chip("TPU v6 lite", int(31.25 * GIB), 1638e9, 918e12, 90e9, 1.75e9, slices=SLICES_2D),
    "tpu7x": Chip("TPU7x", int(94.75 * GIB), 3690e9, 1153.5e12, 90e9, 2.2e9, devices=2, dims=3, slices=SLICES_3D),
}

CORES_OF_CLOUD_NAMES: Mapping[str, int] = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 2}
"""By the beginning of an accelerator type of Cloud TPU, how many its number counts for each chip: v5p-8 has 4 chips."""
CHIP_NAMES: Mapping[str, str] = {"v5litepod": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e"}
"""Other names of chips, and the names that we have."""
CLOUD_NAME = re.compile(r"(\w+)-([1-9]\d{0,5})")
"""An accelerator type: the name of the chip, and a number of chips or cores."""


def slice_of_cloud(text: str) -> str:
    """Returns the slice of an accelerator type of Cloud TPU: `v5e:2x4` for `v5e-8` or `v5litepod-8`. Other texts, and
    numbers that no offered slice has, are returned as they are."""
    found = CLOUD_NAME.fullmatch(text)
    if found is None or (kind := kind_of_cloud(found[1])) is None:
        return text
    return next((f"{kind}:{shape}" for shape, name in cloud_names(kind).items() if name == f"{kind}-{found[2]}"), text)


def kind_of_cloud(name: str) -> str | None:
    """Returns the chip of the beginning of an accelerator type; None for an unknown one."""
    name = CHIP_NAMES.get(name, name)
    return name if name in CORES_OF_CLOUD_NAMES else None


def cloud_names(kind: str) -> Mapping[str, str]:
    """Returns the accelerator types of the slices of a chip, by their shapes."""
    cores = CORES_OF_CLOUD_NAMES[kind]
    return {shape: f"{kind}-{prod(map(int, shape.split('x'))) * cores}" for shape in CHIPS[kind].slices}


@dataclass(frozen=True)
class Slice:
    """A slice of TPUs, by its name in jax's notation, such as `v5e:4x4`."""

    name: str

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """Returns the slice that a text names. Raises UsageError for an unknown chip or a wrong number of sizes."""
        chip, _, shape = slice_of_cloud(text.strip().lower()).partition(":")
        if (counted := CLOUD_NAME.fullmatch(chip)) and (kind := kind_of_cloud(counted[1])):
            names, example = ", ".join(cloud_names(kind).values()), f"{kind}:{CHIPS[kind].slices[2]}"
            raise UsageError(
                f"{short(text)} is no topology: {kind} has no slice of {counted[2]} "
                f"{'chips' if CORES_OF_CLOUD_NAMES[kind] == 1 else 'cores'}",
                hint=f"its slices are {names}; or write the shape, {example}",
            )
        chip = CHIP_NAMES.get(chip, chip)
        if chip not in CHIPS:
            raise UsageError(
                f"{short(text)} is no topology: there is no chip {short(chip)}",
                hint=f"chips are {', '.join(CHIPS)}; write v5e:4x4 or v5e-16",
            )
        dims = CHIPS[chip].dims
        if not re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*", shape) or shape.count("x") != dims - 1:
            example = f"{chip}:{CHIPS[chip].slices[2]}"
            raise UsageError(
                f"{short(text)} is no topology: a slice of {chip} has {dims} sizes, each of 1 or more",
                hint=f"write {example}",
            )
        return cls(f"{chip}:{shape}")

    @property
    def kind(self) -> str:
        """The chip's key in `CHIPS`."""
        return self.name.partition(":")[0]

    @property
    def chip(self) -> Chip:
        """The kind of chip."""
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        """The number of chips."""
        return prod(map(int, self.name.partition(":")[2].split("x")))

    @property
    def devices(self) -> int:
        """The number of jax devices."""
        return self.chips * self.chip.devices

    @property
    def bounds(self) -> list[int] | None:
        """Chips of a host along each dimension, if libtpu's default is wrong: for a single chip."""
        return [1, 1, 1] if self.chips == 1 else None

    @property
    def next(self) -> "Slice | None":
        """The next larger slice of the same chip; None for the largest."""
        return next((other for other in self._offered if other.chips > self.chips), None)

    @property
    def previous(self) -> "Slice | None":
        """The next smaller slice of the same chip; None for the smallest."""
        return next((other for other in reversed(self._offered) if other.chips < self.chips), None)

    @property
    def _offered(self) -> "list[Slice]":
        return [Slice(f"{self.kind}:{shape}") for shape in self.chip.slices]


def parse_topologies(texts: Sequence[str]) -> list[list[Slice]]:
    """Returns groups of slices: `v5e:4x4` is a group of one slice, `v5e` the group of all slices of that chip, smallest
    first. A text may list several, separated by commas.

    Raises:
        UsageError: a slice does not exist, or none is named.
    """
    given = [name.strip().lower() for text in texts for name in text.split(",") if name.strip()]
    names = [CHIP_NAMES.get(name, name) for name in given]
    if not names:
        raise UsageError("`topologies=` names no slice", hint=f"chips are {', '.join(CHIPS)}; write v5e:4x4")
    return [
        [Slice(f"{name}:{shape}") for shape in CHIPS[name].slices] if name in CHIPS else [Slice.parse(name)]
        for name in names
    ]
