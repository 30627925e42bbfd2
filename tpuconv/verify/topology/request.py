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
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv import libtpu
from tpuconv.checkpoint.device_layouts import DeviceLayout
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.jsonfile import short
from tpuconv.sharding import AXES

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One kind of TPU, by device: what jax calls a device is a chip, or on v4 and TPU7x one of its two cores.

    `hbm` is what libtpu's compiler gives a program in bytes, less than is sold. `bandwidth` of the HBM and `ici`, of
    one link in one direction, are in bytes a second, `clock` in Hz. Figures are those of Google's published
    specifications (cloud.google.com/tpu/docs), halved where a device is half a chip. `kind` is jax's `device_kind`,
    `peak` the FLOP/s of products in bfloat16.
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


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SOLID = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

CHIPS: Mapping[str, Chip] = {
    "v4": Chip("TPU v4", int(15.25 * GIB), 615e9, 137.5e12, 45e9, 1.05e9, devices=2, dims=3, slices=SOLID),
    "v5e": Chip("TPU v5 lite", int(15.75 * GIB), 819e9, 197e12, 45e9, 1.5e9, slices=FLAT),
    "v5p": Chip("TPU v5", int(95.74 * GIB), 2765e9, 459e12, 90e9, 1.75e9, dims=3, slices=SOLID),
    "v6e": Chip("TPU v6 lite", int(31.25 * GIB), 1638e9, 918e12, 90e9, 1.75e9, slices=FLAT),
    "tpu7x": Chip("TPU7x", int(94.75 * GIB), 3690e9, 1153.5e12, 90e9, 2.2e9, devices=2, dims=3, slices=SOLID),
}

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
        larger = (Slice(f"{self.kind}:{shape}") for shape in self.chip.slices)
        return next((other for other in larger if other.chips > self.chips), None)


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


def parse_mesh(text: str) -> dict[str, int]:
    """`tensor=8,expert=2` as sizes by axis."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or name in mesh or not re.fullmatch(r"0*[1-9][0-9]{0,8}", size):
            raise UsageError(
                f"{short(part)} of the mesh {short(text)} is no axis with a size",
                hint=f"axes are {', '.join(AXES)}; write tensor=8,expert=2",
            )
        mesh[name] = int(size)
    return mesh


def format_mesh(mesh: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


@dataclass(frozen=True)
class Question:
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
    """The `quantize` of a question about the release that a parsed config.json describes, codes and scales as they are:
    what the manifest would say after `convert --encoding keep`.

    Raises:
        UsageError: it is not encoded.
        UnsupportedConfig: its encoding is not implemented.
        MappingError: it cannot be kept.
    """
    from tpuconv.checkpoint import manifest
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.convert.plan.types import Options
    from tpuconv.convert.source_from_config import source_from_config
    from tpuconv.models.registry import find_family

    family = find_family(config)
    parsed = family.config.from_hf(config)
    described = source_from_config(source, config, family.table, parsed)
    plan = make_plan(described, family.name, family.table, parsed, Options(encoding="keep"))
    plan.check()
    return manifest.passthrough_facts(plan.passthrough)


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
    `ESTIMATE_ERROR`)."""

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


@dataclass(frozen=True)
class Answer:
    """What the compiler says of one slice. `why` is empty where the model fits; `programs` are those that compiled.
    `layouts` says how decoding would have each parameter of a model that fits lie."""

    topology: str
    devices: int
    mesh: Mapping[str, int]
    memory: Memory
    why: str = ""
    programs: Sequence[Program] = ()
    layouts: Mapping[str, DeviceLayout] = field(default_factory=dict, repr=False)

    @property
    def fits(self) -> bool:
        return not self.why

    @property
    def device(self) -> str:
        """What jax calls such a device."""
        return Slice(self.topology).chip.kind

    def program(self, name: str) -> Program | None:
        return next((program for program in self.programs if program.name == name), None)

    def to_json(self) -> dict[str, Any]:
        memory = {**vars(self.memory), "peak": self.memory.peak, "headroom": self.memory.headroom}
        facts = {key: value for key, value in vars(self).items() if key not in ("programs", "layouts")}
        programs = {program.name: vars(program) for program in self.programs}
        return {**facts, "fits": self.fits, "memory": memory, "programs": programs}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Answer":
        memory, programs = Memory(**facts["memory"]), [Program(**program) for program in facts["programs"]]
        layouts = {name: DeviceLayout.of(*layout) for name, layout in facts["layouts"].items()}
        return cls(**{**facts, "memory": memory, "programs": programs, "layouts": layouts})


def ask(question: Question, groups: Sequence[Sequence[Slice]]) -> Iterator[Answer]:
    """The answers, each from a child of its own: what a child compiled would stay in its memory. Of each group of
    slices, the smallest first, those up to the first that fits.

    Raises:
        UsageError: libtpu is not installed, or the mesh does not fit the slice.
        ConfigError: a pattern of the rules is none or takes for ever.
        TpuconvError: the compiler failed for another reason than memory.
    """
    if not libtpu.is_installed():
        raise UsageError(
            "--topology asks the TPU compiler, which is not installed", hint="install it: pip install 'tpuconv[tpu]'"
        )
    _check_rules(question)
    for slices in groups:
        for one in slices:
            answer = _ask_child(question, one)
            yield answer
            if answer.fits:
                break


def _check_rules(question: Question) -> None:
    """That the rules of a config can be matched, before a child imports jax for them."""
    from tpuconv.models.registry import find_family
    from tpuconv.quantize.config import QuantConfig, check_rules, modules_of

    if question.quantize is None or "rules" not in question.quantize or question.checkpoint:
        return
    family = find_family(question.config)
    modules = modules_of(family.table, family.config.from_hf(question.config))
    check_rules(QuantConfig.from_json(question.quantize), modules)


def advice(question: Question, answer: Answer) -> str:
    """What would make it fit: a larger slice, fewer sequences, narrower weights."""
    memory, one = answer.memory, Slice(answer.topology)
    ways = []
    # What the compiler gave up on is not known: an eighth is left for temporaries.
    spare = memory.temporaries + memory.code or memory.available // 8
    larger = one.next
    while larger and (memory.weights + memory.cache) * one.devices / larger.devices + spare > memory.available:
        larger = larger.next
    if larger:
        ways.append(f"--topology {larger.name}")
    batch = (memory.available - memory.weights - spare) * question.batch // max(memory.cache, 1)
    if 1 <= batch < question.batch:
        ways.append(f"--batch {batch}")
    if question.quantize is None and memory.weights // 2 + memory.cache + spare <= memory.available:
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


def _ask_child(question: Question, one: Slice) -> Answer:
    with TemporaryDirectory(prefix="tpuconv-") as folder:
        asked, answered = Path(folder, "question.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps({**vars(question), "topology": one.name}))
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
    return Answer.from_json(facts)


def _errors(kind: type[TpuconvError]) -> Iterator[type[TpuconvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)
