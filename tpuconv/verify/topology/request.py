"""Know before renting: what a model needs of a slice of TPUs, by the TPU's own compiler, with no TPU and no weights.

libtpu compiles for any topology on a plain host. It wants an environment of its own, set before jax is imported, and
aborts the process where it fails badly: so the compilation runs in a child (`tpuconv.verify.topology.compile`), and
this side imports no jax.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv.checkpoint.device_layouts import DeviceLayout
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.jsonfile import short
from tpuconv.sizes import format_size
from tpuconv.verify.topology.chips import CHIPS, Chip

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_LOG_DIR": "disabled",
}
"""Of the child: no metadata server is asked, no lock file taken, and no chip looked for."""

ESTIMATE_ERROR = "0.8 to 1.25 of published times of others' programs, twice at batch 1; nothing ran on hardware here"
"""What is known of the estimated times: two constants are fitted to eleven published steps of three programs on v5e and
v6e, compiled alike (benchmarks/published.py). At batch 1 those compute element by element, for which the compiler's
cycles are twice the time. Collectives are charged as if nothing ran beside them."""


@dataclass(frozen=True)
class Slice:
    """A topology: `v5e:4x4`."""

    name: str

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """Raises UsageError for what no TPU has."""
        chip, _, shape = text.strip().lower().partition(":")
        if chip not in CHIPS:
            raise UsageError(
                f"{short(text)} is no topology: there is no chip {short(chip)}",
                hint=f"known are {', '.join(CHIPS)}; write v5e:4x4",
            )
        dims = CHIPS[chip].dims
        if not re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5})*", shape) or shape.count("x") != dims - 1:
            example = f"{chip}:{CHIPS[chip].slices[2]}"
            raise UsageError(
                f"{short(text)} is no topology: a slice of {chip} has {dims} sizes", hint=f"write {example}"
            )
        return cls(f"{chip}:{shape}")

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        return prod(map(int, self.name.partition(":")[2].split("x")))

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def bounds(self) -> list[int] | None:
        """Chips of a host, where they are fewer than libtpu takes them to be."""
        return [1, 1, 1] if self.chips == 1 else None

    @property
    def next(self) -> "Slice | None":
        """The next larger slice of the same chip."""
        return next((other for other in self._others if other.chips > self.chips), None)

    @property
    def previous(self) -> "Slice | None":
        """The next smaller slice of the same chip."""
        return next((other for other in reversed(self._others) if other.chips < self.chips), None)

    @property
    def _others(self) -> "list[Slice]":
        return [Slice(f"{self.kind}:{shape}") for shape in self.chip.slices]


def parse_topologies(texts: Sequence[str]) -> list[list[Slice]]:
    """Groups of slices: `v5e:4x4` is a group of its own, `v5e` alone is all slices of that chip, the smallest first.
    Each text may be a list with commas.

    Raises:
        UsageError: there is no such slice, or none is named.
    """
    names = [name.strip().lower() for text in texts for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--topology names no slice", hint=f"known are {', '.join(CHIPS)}; write v5e:4x4")
    return [
        [Slice(f"{name}:{shape}") for shape in CHIPS[name].slices] if name in CHIPS else [Slice.parse(name)]
        for name in names
    ]


@dataclass(frozen=True)
class CompileRequest:
    """What to compile. `config` is a parsed config.json; `quantize` what `QuantConfig.to_json` or `as_released` gives.
    `checkpoint` is the folder of one that was converted: its arrays are taken as they are stored, `quantize` is that of
    its manifest. `cache_dtype` is that of keys and values where it is not `dtype`. `programs` are those to compile.
    """

    config: Mapping[str, Any]
    batch: int = 1
    context: int = 2048
    dtype: str = "bfloat16"
    mesh: Mapping[str, int] | None = None
    quantize: Mapping[str, Any] | None = None
    checkpoint: str | None = None
    cache_dtype: str | None = None
    programs: Sequence[str] = ("decode", "prefill")

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 1:
            raise UsageError(f"batch {self.batch} and context {self.context} must be 1 or more")


def as_released(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantize` of a request about the release that a parsed config.json describes, codes and scales as they are:
    what the manifest would say after `convert --encoding keep`.

    Raises:
        UsageError: it is not encoded.
        UnsupportedConfig: its encoding is not implemented.
        MappingError: it cannot be kept.
    """
    from tpuconv.checkpoint import manifest
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.convert.plan.types import Options
    from tpuconv.convert.source_from_config import released
    from tpuconv.models.registry import find_family

    family = find_family(config)
    parsed = family.config.from_hf(config)
    described = released(source, config, family.table, parsed)
    plan = make_plan(described, family.name, family.table, parsed, Options(encoding="keep"))
    plan.check()
    return manifest.as_released(plan.kept)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at most in use, and what it has."""

    available: int
    weights: int
    cache: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.temporaries + self.code

    @property
    def headroom(self) -> int:
        return self.available - self.peak


@dataclass(frozen=True)
class Program:
    """One compiled program. Bytes and times are of one device and one step. `peak` is what XLA counts in use at once,
    code aside; `floor` the time in seconds that its HBM needs at full bandwidth, `expected_floor` where tokens choose
    their experts evenly and kernels read no others; `estimate` comes from a simulation of the schedule (see
    `ESTIMATE_ERROR`), and `communication` is its part that is waited for other devices."""

    name: str
    tokens: int
    compile_seconds: float
    temporaries: int
    code: int
    peak: int
    hbm_read: int
    hbm_written: int
    floor: float
    expected_floor: float
    estimate: float
    collectives: Sequence[Mapping[str, Any]]
    products: Sequence[Mapping[str, Any]]
    copies: Sequence[Mapping[str, Any]]
    custom_calls: Sequence[Mapping[str, Any]]
    communication: float = 0.0


@dataclass(frozen=True)
class FitReport:
    """What the compiler says of one slice. `why` is empty where the model fits; `programs` are those that compiled.
    `layouts` are those that the compiler chooses for each parameter of a model that fits. `batch` is that of the
    request: how many sequences are decoded at once."""

    topology: str
    devices: int
    mesh: Mapping[str, int]
    memory: Memory
    why: str = ""
    programs: Sequence[Program] = ()
    layouts: Mapping[str, DeviceLayout] = field(default_factory=dict, repr=False)
    batch: int = 1

    @property
    def fits(self) -> bool:
        return not self.why

    @property
    def device(self) -> str:
        """What jax calls such a device."""
        return Slice(self.topology).chip.kind

    def program(self, name: str) -> Program | None:
        return next((program for program in self.programs if program.name == name), None)

    @property
    def tokens_per_second(self) -> float | None:
        """Of one sequence while it is decoded, by the estimate; None where decoding was not compiled."""
        decode = self.program("decode")
        return 1 / decode.estimate if decode and decode.estimate > 0 else None

    @property
    def limit(self) -> str | None:
        """What takes most of a decode step: "memory bandwidth", "compute" or "communication"; None where decoding was
        not compiled."""
        decode = self.program("decode")
        if decode is None:
            return None
        parts = {"memory bandwidth": decode.expected_floor, "communication": decode.communication}
        parts["compute"] = decode.estimate - sum(parts.values())
        return max(parts, key=lambda name: parts[name])

    @property
    def smaller(self) -> Slice | None:
        """The next smaller slice, if weights and cache divided by its devices leave room for the rest; None where they
        do not, or the model does not fit."""
        own, memory = Slice(self.topology), self.memory
        less = own.previous
        if less is None or not self.fits:
            return None
        held = (memory.weights + memory.cache) * own.devices / less.devices
        return less if held + memory.temporaries + memory.code <= memory.available else None

    def verdict(self) -> str:
        """In words: whether the model fits and how much memory is left; how fast it decodes, by the estimate, and what
        limits it; and a smaller slice that may do."""
        if not self.fits:
            return f"{self.topology}: does not fit: {self.why}."
        left, all_of_it = format_size(self.memory.headroom), format_size(self.memory.available)
        text = f"{self.topology}: fits, with {left} of {all_of_it} left on each device"
        if self.smaller:
            text += f" (the smaller {self.smaller.name} may do)"
        if (speed := self.tokens_per_second) is None:
            return text + "."
        return (
            f"{text}. Decoding makes about {speed:.3g} tokens/s for each sequence, {speed * self.batch:.3g} in all, "
            f"limited by {self.limit}."
        )

    def to_json(self) -> dict[str, Any]:
        memory = {**vars(self.memory), "peak": self.memory.peak, "headroom": self.memory.headroom}
        facts = {key: value for key, value in vars(self).items() if key not in ("programs", "layouts")}
        programs = {program.name: vars(program) for program in self.programs}
        speed = self.tokens_per_second
        return {
            **facts,
            "fits": self.fits,
            "verdict": self.verdict(),
            "tokens_per_second_per_sequence": speed,
            "tokens_per_second": speed and speed * self.batch,
            "limit": self.limit,
            "memory": memory,
            "programs": programs,
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "FitReport":
        memory, programs = Memory(**facts["memory"]), [Program(**program) for program in facts["programs"]]
        layouts = {name: DeviceLayout.of(*layout) for name, layout in facts["layouts"].items()}
        return cls(**{**facts, "memory": memory, "programs": programs, "layouts": layouts})


def ask(request: CompileRequest, groups: Sequence[Sequence[Slice]]) -> Iterator[FitReport]:
    """The answers, each from a child of its own: what a child compiled would stay in its memory. Of each group of
    slices, the smallest first, those up to the first that fits.

    Raises:
        UsageError: libtpu is not installed, or the mesh does not fit the slice.
        ConfigError: a pattern of the rules is none or takes for ever.
        TpuconvError: the compiler failed for another reason than memory.
    """
    if find_spec("libtpu") is None:
        raise UsageError(
            "--topology asks the TPU compiler, which is not installed", hint="install it: pip install 'tpuconv[tpu]'"
        )
    _check_rules(request)
    for slices in groups:
        for one in slices:
            report = _ask_child(request, one)
            yield report
            if report.fits:
                break


def _check_rules(request: CompileRequest) -> None:
    """That the rules of a config can be matched, before a child imports jax for them."""
    from tpuconv.models.registry import find_family
    from tpuconv.quantize.config import QuantConfig, check_rules, modules_of

    if request.quantize is None or "rules" not in request.quantize or request.checkpoint:
        return
    family = find_family(request.config)
    modules = modules_of(family.table, family.config.from_hf(request.config))
    check_rules(QuantConfig.from_json(request.quantize), modules)


def advice(request: CompileRequest, report: FitReport) -> str:
    """What would make it fit: a larger slice, fewer sequences, narrower weights."""
    memory, one = report.memory, Slice(report.topology)
    ways = []
    # What the compiler gave up on is not known: an eighth is left for temporaries.
    spare = memory.temporaries + memory.code or memory.available // 8
    larger = one.next
    while larger and (memory.weights + memory.cache) * one.devices / larger.devices + spare > memory.available:
        larger = larger.next
    if larger:
        ways.append(f"--topology {larger.name}")
    batch = (memory.available - memory.weights - spare) * request.batch // max(memory.cache, 1)
    if 1 <= batch < request.batch:
        ways.append(f"--batch {batch}")
    if request.quantize is None and memory.weights // 2 + memory.cache + spare <= memory.available:
        ways.append("--quantize int8_weight_only")
    return (
        "it may fit with " + " or ".join(ways) if ways else f"no slice of {one.kind} is large enough: take another chip"
    )


CHILD = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tpuconv.verify.topology.compile import main
main(*map(Path, sys.argv[2:]))
"""
"""Other than `-m` it does not import from the current folder. This package is found wherever it is here."""

PACKAGES = Path(__file__).parents[3]


def _child_environment() -> dict[str, str]:
    """With what libtpu wants, and without empty entries of PYTHONPATH: they mean the current folder."""
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(own)}


def _ask_child(request: CompileRequest, one: Slice) -> FitReport:
    with TemporaryDirectory(prefix="tpuconv-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "report.json")
        asked.write_text(json.dumps({**vars(request), "topology": one.name}))
        command = [sys.executable, "-P", "-c", CHILD, str(PACKAGES), str(asked), str(answered)]
        done = subprocess.run(
            command, env=_child_environment(), capture_output=True, text=True, check=False, errors="replace"
        )
        facts = json.loads(answered.read_text()) if answered.exists() else {}
    if "error" in facts:
        error = facts["error"]
        kinds = {kind.__name__: kind for kind in _errors(TpuconvError)}
        raise kinds[error["type"]](error["message"], details=error["details"], hint=error["hint"])
    if not facts:
        raise TpuconvError(
            f"the TPU compiler ended with {done.returncode} for {one.name}",
            details=[line[:300] for line in done.stderr.strip().splitlines()[-8:]],
        )
    return FitReport.from_json(facts)


def _errors(kind: type[TpuconvError]) -> Iterator[type[TpuconvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)
