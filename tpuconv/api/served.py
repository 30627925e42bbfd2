"""Compare a running server with a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tpuconv.api.opened import OpenedModel, opened_model, runs_to_json
from tpuconv.api.running import downloading_again
from tpuconv.convert.plan.options import Options
from tpuconv.errors import GateError
from tpuconv.location import Location
from tpuconv.options import (
    DTYPE_CHOICES,
    MESH_OPTION,
    PROGRESS_ARGUMENT,
    PROMPTS_OPTION,
    READ_ARGUMENT,
    TRAINED_CONFIG_OPTION,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.verify.server import ServerStatistics

MOST_LIKELY = 20
"""The tokens that a server is asked for at each position: the most that vLLM gives by default."""


@dataclass(frozen=True, repr=False)
class ServerComparison(OneLine):
    """A server's log-probabilities of prompts, compared with a checkpoint's.

    Attributes:
        checkpoint: the folder of the checkpoint.
        url: of the server.
        program: vLLM or SGLang.
        model: its name there.
        statistics: differences, divergences, the gate, and where the two differ.
        runs: the facts of a trainer's checkpoint.
        is_decoded: True if the weights of a quantized release were decoded to compare.
    """

    checkpoint: Location
    url: str
    program: str
    model: str
    statistics: "ServerStatistics"
    runs: "Sequence[TrainedRun]" = ()
    is_decoded: bool = False

    def check(self) -> None:
        """Raises GateError if the gate failed."""
        if self.statistics.failures:
            rounds = "; the server may also round activations, which this model with decoded weights does not"
            raise GateError(
                f"{self.program} at {self.url} computes other outputs than {self.checkpoint}",
                details=self.statistics.failures,
                hint="check that it serves an export of this checkpoint, and in which dtype it computes (`dtype=`)"
                + (rounds if self.is_decoded else ""),
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        statistics = self.statistics
        return {
            "passed": not statistics.failures,
            "checkpoint": str(self.checkpoint),
            "server": {"url": self.url, "program": self.program, "model": self.model},
            **statistics.to_json(),
            **runs_to_json(self.runs),
            "failures": statistics.failures,
        }


@dataclass(eq=False, repr=False)
class CompareServerRequest:
    """The arguments of `compare_server`."""

    ckpt: str | Location = field(metadata=READ_ARGUMENT)
    server: str = field(metadata=argument("The address of vLLM, vLLM TPU or SGLang: `http://localhost:8000`."))
    _: KW_ONLY
    served: str | None = option(None, "The name of the model on the server.  [default: the one that it has]")
    prompts: Sequence[str] = field(default=(), metadata=PROMPTS_OPTION)
    dtype: str = option(
        "auto", "The dtype that the server computes in.  [default: the checkpoint's]", choices=DTYPE_CHOICES
    )
    mesh: Mapping[str, int] | None = field(default=None, metadata=MESH_OPTION)
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(CompareServerRequest)
def compare_server(asked: CompareServerRequest) -> ServerComparison:
    """Compares a running server's log-probabilities of prompts with a checkpoint's.

    The checkpoint's model computes in float32, and in the dtype of the server, which shows how much rounding changes.
    If it quantizes activations, which servers round in other ways, it then also has another rounding of its weights.

    Raises:
        TpuconvError: the server cannot be reached or lacks the model, or the checkpoint is damaged or has no logits.
    """

    def compared() -> ServerComparison:
        with opened_model(asked.ckpt, Options(), config=asked.config) as opened:
            return _compared_server(asked, opened)

    return downloading_again(compared, asked.progress)


def _compared_server(asked: CompareServerRequest, opened: OpenedModel) -> ServerComparison:
    """Returns the comparison with an opened model."""
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.models.logits import whole_texts
    from tpuconv.quantize.rerounding import SEEDS
    from tpuconv.verify import logits
    from tpuconv.verify.preparation import tokenized
    from tpuconv.verify.server import compare_log_probs, find_server

    manifest = opened.manifest
    manifest.check_complete()
    check_logits(manifest)
    server = find_server(asked.server, asked.served)
    with tokenizer_folder(manifest) as folder:
        ids = tokenized(manifest, folder, asked.prompts)
    found = []
    for done, prompt in enumerate(ids):
        asked.progress(Progress(f"asking {server.program}", done, len(ids)))
        found.append(server.log_probs(prompt, MOST_LIKELY))
    stored = manifest.dtype if manifest.dtype in logits.DTYPE_GATES else "bfloat16"
    dtype = stored if asked.dtype == "auto" else asked.dtype
    devices = logits.device_mesh(asked.mesh) if asked.mesh else None
    asked.progress(Progress("running the model"))
    run = partial(logits.each_logits, opened.load, whole_texts(ids), mesh=devices)
    exact = list(run("float32"))
    seed = SEEDS[0] if logits.rounds_activations(manifest.quantization) else None
    rounded = exact if dtype == "float32" and seed is None else list(run(dtype, rounding=seed))
    statistics = compare_log_probs(ids, found, exact, rounded, dtype)
    served = (server.url, server.program, server.model)
    return ServerComparison(opened.folder, *served, statistics, opened.runs, opened.is_decoded)
