"""Asks the TPU compiler what a model needs on a slice of TPUs. Needs no TPU and no weights.

libtpu compiles for any topology on a host without TPUs. It needs environment variables that are set before jax is
imported, and some of its failures abort the process. So the compilation runs in a child process
(`tpuconv.verify.topology.compile`), and this module does not import jax.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv import libtpu
from tpuconv.checkpoint.device_layouts import DeviceLayout
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.extras import install_command
from tpuconv.text import format_rate, format_size
from tpuconv.verify.topology.chips import Slice

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_LOG_DIR": "disabled",
}
"""Environment variables of the child process: libtpu asks no metadata server, takes no lock file, looks for no chip."""

ESTIMATE_ERROR = "of eleven published times 0.8 to 1.25, at batch 1 twice; none was measured here"
"""The accuracy of estimated times. Two constants of the estimate are fitted to eleven published decode steps of three
programs on v5e and v6e (benchmarks/published.py). At batch 1 these programs compute products element by element, for
which the compiler's cycles give twice the measured time. Collectives use the links as on a ring, and an asynchronous
one does not slow the work beside it (`tpuconv.verify.topology.hlo.Schedule.estimate`)."""


@dataclass(frozen=True)
class CompileRequest:
    """The request of a compilation.

    Attributes:
        config: a parsed config.json.
        batch: sequences at once.
        context: slots of the cache: tokens of a sequence.
        dtype: of parameters and activations.
        mesh: sizes of mesh axes; None for `tpuconv.notation.sharding.decoding_mesh`.
        quantize: the quantization, as `QuantConfig.to_json` or `source_passthrough` returns it; None for none.
        checkpoint: the folder of a converted checkpoint, whose arrays keep their stored dtypes; `quantize` then comes
            from its manifest. None to make the model from `config`.
        cache_dtype: of keys and values; None for `dtype`.
        programs: the programs to compile.
        images: images of the batch, which the encoder reads before the prefill.
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
    images: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 1:
            raise UsageError(f"batch {self.batch} and context {self.context} must be 1 or more")


def source_passthrough(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `quantize` of a request for a quantized source, whose quantized values and scales pass through: what
    the manifest holds after `convert --encoding keep`.

    Args:
        source: a name for messages.
        config: the parsed config.json of the source.

    Raises:
        UsageError: the source is not quantized.
        UnsupportedConfig: its encoding is not implemented.
        MappingError: its encoding cannot pass through.
    """
    from tpuconv.checkpoint import manifest
    from tpuconv.convert.plan.coverage import make_plan
    from tpuconv.convert.plan.options import Options
    from tpuconv.convert.plan.source_from_config import source_from_config
    from tpuconv.models.registry import find_family

    family = find_family(config)
    parsed = family.config.from_hf(config)
    described = source_from_config(source, config, family.table, parsed)
    plan = make_plan(described, family.name, family.table, parsed, Options(encoding="keep"))
    plan.check()
    return manifest.passthrough_facts(plan.passthrough)


@dataclass(frozen=True)
class Memory:
    """The memory of one device in bytes: what a program may use (`available`), and what is used."""

    available: int
    weights: int
    cache: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The bytes used by all programs, which share weights, cache and space for temporaries."""
        return self.weights + self.cache + self.temporaries + self.code

    @property
    def headroom(self) -> int:
        """The bytes that are left; negative if there are too few."""
        return self.available - self.peak


@dataclass(frozen=True)
class Program:
    """One compiled program. Bytes and seconds count one step on one device.

    Attributes:
        name: "decode", "prefill" or "see".
        tokens: tokens of each sequence in one step; of "see" the features of all images.
        compile_seconds: time of the compilation.
        temporaries, code: bytes of temporary arrays and of the program.
        peak: peak memory by XLA's count, without code.
        hbm_read, hbm_written: bytes.
        floor: seconds that reading and writing HBM takes at full bandwidth.
        expected_floor: the same, if tokens choose experts uniformly and kernels read only the chosen ones.
        estimate: seconds, by a simulation of the schedule (see `ESTIMATE_ERROR`).
        collectives, products, copies, custom_calls: see the functions of `tpuconv.verify.topology.hlo.Schedule`.
        communication: the seconds of `estimate` in which the core waits for collectives.
        steps: how many steps the tokens take at most: more than one of a canvas alone.
    """

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
    steps: int = 1


@dataclass(frozen=True)
class FitReport:
    """The compiler's result for one slice.

    Attributes:
        topology: name of the slice.
        devices: its jax devices.
        mesh: sizes of mesh axes.
        memory: memory of one device.
        why: why the model does not fit; empty if it fits.
        programs: the programs that compiled.
        layouts: the compiler's device layout for each parameter; empty if the model does not fit.
        batch: sequences at once.
    """

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
        """True if the model fits."""
        return not self.why

    @property
    def device(self) -> str:
        """Jax's `device_kind` of the slice."""
        return Slice(self.topology).chip.kind

    def program(self, name: str) -> Program | None:
        """Returns the program of that name; None if it was not compiled."""
        return next((program for program in self.programs if program.name == name), None)

    @property
    def tokens_per_second(self) -> float | None:
        """The estimated decoding speed of one sequence, of canvases with the most steps; None if decoding was not
        compiled."""
        decode = self.program("decode")
        return decode.tokens / (decode.steps * decode.estimate) if decode and decode.estimate > 0 else None

    @property
    def limit(self) -> str | None:
        """The limit of the estimated decode step: "memory bandwidth", "compute" or "communication"; None if decoding
        was not compiled."""
        decode = self.program("decode")
        if decode is None:
            return None
        parts = {"memory bandwidth": decode.expected_floor, "communication": decode.communication}
        parts["compute"] = decode.estimate - sum(parts.values())
        return max(parts, key=lambda name: parts[name])

    @property
    def smaller(self) -> Slice | None:
        """The next smaller slice, if the model may fit it: its devices have enough memory for weights and cache, and
        for temporaries and code as large as here. Otherwise None."""
        this, memory = Slice(self.topology), self.memory
        smaller = this.previous
        if smaller is None or not self.fits:
            return None
        sharded = (memory.weights + memory.cache) * this.devices / smaller.devices
        return smaller if sharded + memory.temporaries + memory.code <= memory.available else None

    def verdict(self) -> str:
        """Returns one or two sentences: whether the model fits, the memory that is left, a smaller slice that may do,
        the estimated decoding speed and what limits it, the time of the encoder."""
        if not self.fits:
            return f"{self.topology}: does not fit: {self.why}."
        left, available = format_size(self.memory.headroom), format_size(self.memory.available)
        text = f"{self.topology}: fits, with {left} of {available} left on each device"
        if self.smaller:
            text += f" (the smaller {self.smaller.name} may do)"
        if (speed := self.tokens_per_second) is None:
            return text + "."
        decode = self.program("decode")
        text += (
            f". Decoding makes about {format_rate(speed, 3)} tokens/s for each sequence, "
            f"{format_rate(speed * self.batch, 3)} in all, "
            + (f"with {decode.steps} steps for each canvas, " if decode and decode.steps > 1 else "")
            + f"limited by {self.limit}."
        )
        if see := self.program("see"):
            text += f" The images take about {1e3 * see.estimate:,.1f} ms before the prefill."
        return text

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
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
        """Returns the report that a child process wrote."""
        memory, programs = Memory(**facts["memory"]), [Program(**program) for program in facts["programs"]]
        layouts = {name: DeviceLayout.of(*layout) for name, layout in facts["layouts"].items()}
        return cls(**{**facts, "memory": memory, "programs": programs, "layouts": layouts})


def ask(
    request: CompileRequest,
    groups: Sequence[Sequence[Slice]],
    on_slice: Callable[[Slice, int, int], None] = lambda topology, number, count: None,
) -> Iterator[FitReport]:
    """Compiles for each slice of each group, up to the first of the group that the model fits, and yields the reports.
    Each compilation has its own child process, since libtpu does not free the memory of earlier ones. `on_slice` is
    called before each, with the slice, its number from 1 on, and the count of slices at most.

    Raises:
        UsageError: libtpu is not installed, or the mesh does not match the slice.
        ConfigError: a pattern of the quantization rules is invalid or takes too long.
        TpuconvError: the compiler failed for a reason other than memory.
    """
    if not libtpu.is_installed():
        raise UsageError(
            "`topologies=` needs the TPU compiler, which is not installed", hint=f"install it: {install_command('tpu')}"
        )
    _check_rules(request)
    number, count = 0, sum(map(len, groups))
    for slices in groups:
        for place, topology in enumerate(slices, 1):
            on_slice(topology, number + place, count)
            report = _ask_child(request, topology)
            yield report
            if report.fits:
                break
        number += len(slices)


def _check_rules(request: CompileRequest) -> None:
    """Checks the patterns of the quantization rules before a child process matches them."""
    from tpuconv.models.registry import find_family
    from tpuconv.quantize.config import QuantConfig
    from tpuconv.quantize.matches import check_rules

    if request.quantize is None or "rules" not in request.quantize or request.checkpoint:
        return
    family = find_family(request.config)
    modules = family.table.modules(family.config.from_hf(request.config))
    check_rules(QuantConfig.from_json(request.quantize), modules)


def advice(request: CompileRequest, report: FitReport) -> str:
    """Returns a hint for a model that does not fit: options for a larger slice, a smaller batch or quantized
    weights."""
    memory, this = report.memory, Slice(report.topology)
    ways = []
    # If nothing was compiled, temporaries are not known. Assume an eighth of the memory.
    spare = memory.temporaries + memory.code or memory.available // 8
    larger = this.next
    while larger and (memory.weights + memory.cache) * this.devices / larger.devices + spare > memory.available:
        larger = larger.next
    if larger:
        ways.append(f"`topologies={[larger.name]}`")
    batch = (memory.available - memory.weights - spare) * request.batch // max(memory.cache, 1)
    if 1 <= batch < request.batch:
        ways.append(f"`batch={batch}`")
    if request.quantize is None and memory.weights // 2 + memory.cache + spare <= memory.available:
        ways.append('`quantize="int8_weight_only"`')
    if not ways:
        return f"no slice of {this.kind} is large enough: use another chip"
    return "it may fit with " + " or ".join(ways)


COMPILE_PROGRAM = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tpuconv.verify.topology.compile import compile_in_child
compile_in_child(*map(Path, sys.argv[2:]))
"""
"""Run with `-c` and `-P`: unlike `-m`, Python then does not import from the current folder. Its first argument is
`INSTALL_FOLDER`."""

INSTALL_FOLDER = Path(__file__).parents[3]
"""The folder that this package is in."""


def _child_environment() -> dict[str, str]:
    """Returns the environment of this process with `ENVIRONMENT`, without the empty entries of PYTHONPATH, which mean
    the current folder."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(entries)}


def _ask_child(request: CompileRequest, topology: Slice) -> FitReport:
    with TemporaryDirectory(prefix="tpuconv-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "report.json")
        asked.write_text(json.dumps({**vars(request), "topology": topology.name}))
        command = [sys.executable, "-P", "-c", COMPILE_PROGRAM, str(INSTALL_FOLDER), str(asked), str(answered)]
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
            f"the TPU compiler ended with exit code {done.returncode} for {topology.name}",
            details=[line[:300] for line in done.stderr.strip().splitlines()[-8:]],
        )
    return FitReport.from_json(facts)


def _errors(kind: type[TpuconvError]) -> Iterator[type[TpuconvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)
