"""Two checkpoints of ours, compared without transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, to_location
from tpuconv.options import (
    CACHE_DTYPE_OPTION,
    DTYPE_OPTION,
    GATES_OPTION,
    MOST_TOKENS,
    PROGRESS_ARGUMENT,
    PROMPTS_OPTION,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.models.logits import Window
    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.tasks import TaskDifference
    from tpuconv.verify.weights.statistics import TensorDifference

WINDOW_LENGTH = 512
"""Tokens of a window of a text by default. The stride is half of it by default."""


@dataclass(frozen=True, repr=False)
class CheckpointComparison(OneLine):
    """The logits and parameters of two checkpoints.

    Attributes:
        reference, checkpoint: the folders; differences are from the first to the second.
        statistics: differences, divergences and gates.
        text: the name of the file that they ran on; empty for prompts.
        length, stride: tokens of a window of the text, and from one window to the next; None for prompts.
        cache_dtype: of the second one's cache; None if it ran without one.
        tensors: how parameters differ, worst first.
        tasks: the statistics of tasks, before and after.
        chat_template: whether their requests were conversations.
    """

    reference: Location
    checkpoint: Location
    statistics: "LogitStatistics"
    text: str
    length: int | None
    stride: int | None
    cache_dtype: str | None
    tensors: Sequence["TensorDifference"]
    tasks: Sequence["TaskDifference"] = ()
    chat_template: bool = False

    @property
    def passed(self) -> bool | None:
        """True if all gates hold; None if there are no gates."""
        return self.statistics.passed

    def check(self) -> None:
        """Raises GateError if a gate failed."""
        if failures := self.statistics.failures():
            raise GateError(
                f"{self.checkpoint} computes other outputs than {self.reference}",
                details=failures,
                hint="the parameters that differ most are in the table above, and in `tensors` of `to_json()`",
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = asdict(self.statistics)
        facts["perplexity"] = {"reference": facts.pop("perplexity_reference"), "checkpoint": facts["perplexity"]}
        return {
            "passed": self.passed,
            "reference": str(self.reference),
            "checkpoint": str(self.checkpoint),
            "text": self.text or None,
            "length": self.length,
            "stride": self.stride,
            "cache_dtype": self.cache_dtype,
            **facts,
            "failures": self.statistics.failures(),
            "tensors": [tensor.to_json() for tensor in self.tensors],
            **(
                {"tasks": [task.to_json() for task in self.tasks], "chat_template": self.chat_template}
                if self.tasks
                else {}
            ),
        }


@dataclass(eq=False, repr=False)
class CompareCheckpointsRequest:
    """The arguments of `compare_checkpoints`."""

    reference: str | Location = field(
        metadata=argument("A checkpoint of ours; divergences are KL(reference || checkpoint).")
    )
    checkpoint: str | Location = field(metadata=argument("Another one of the same model, quantized or not."))
    _: KW_ONLY
    prompts: Sequence[str] = field(default=(), metadata=PROMPTS_OPTION)
    text: str | Path | None = option(None, "A text file to use instead of prompts: perplexity in overlapping windows.")
    length: int = option(WINDOW_LENGTH, "Tokens per window of the text.", least=2, most=MOST_TOKENS)
    stride: int | None = option(
        None,
        "Tokens from the start of one window to the next, less than `length=`.  [default: half of `length=`]",
        least=1,
        most=MOST_TOKENS,
    )
    tasks: Sequence[str] = option(
        (),
        "Tasks of lm-evaluation-harness to run with both models: names, separated by commas.",
        python="Names of tasks or groups of lm-evaluation-harness (extra `eval`) to run with both models.",
    )
    task_folder: str | Path | None = option(None, "A folder with more tasks: YAML files of lm-evaluation-harness.")
    task_limit: int | None = option(None, "The largest number of examples per task.  [default: all]", least=1)
    chat_template: bool = option(False, "Write each request of a task as a conversation, by the model's chat template.")
    dtype: str = field(default="auto", metadata=DTYPE_OPTION)
    cache_dtype: str | None = field(default=None, metadata=CACHE_DTYPE_OPTION)
    gates: Mapping[str, float] | None = field(default=None, metadata=GATES_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(CompareCheckpointsRequest)
def compare_checkpoints(asked: CompareCheckpointsRequest) -> CheckpointComparison:
    """Runs the models of two checkpoints on the same tokens, and compares their parameters. One model is in memory at a
    time.

    Raises:
        UsageError: the checkpoints hold other models, or return no logits; the cache cannot have this dtype; the text
            cannot be read or is too short; a task is not known, or its data cannot be read; or there is no chat
            template.
        TpuconvError: a checkpoint cannot be read.
    """
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.verify.windows import check_stride

    chosen = asked.stride if asked.stride is not None else max(1, asked.length // 2)
    if asked.text is not None:
        check_stride(asked.length, chosen)
    manifests = [read_manifest(to_location(folder)) for folder in (asked.reference, asked.checkpoint)]
    for manifest in manifests:
        manifest.check_own()
        check_logits(manifest)
    # Only now, since jax takes seconds to import.
    from tpuconv.models.stored import check_cache_dtype, model_config
    from tpuconv.verify.logits import DTYPE_GATES
    from tpuconv.verify.pairs import Side, compare_windows, tensor_differences
    from tpuconv.verify.tasks import TaskDifference, TaskList

    to_do = TaskList(
        tuple(asked.tasks),
        None if asked.task_folder is None else Path(asked.task_folder),
        asked.task_limit,
        asked.chat_template,
    )
    if asked.tasks:
        to_do.check()
        for manifest in manifests:
            to_do.check_tokenizer(manifest)
    first, second = manifests
    check_cache_dtype(second, asked.cache_dtype)
    tensors = tensor_differences(first, second)
    windows = _windows(first, asked.prompts, None if asked.text is None else Path(asked.text), asked.length, chosen)
    compute = first.dtype if asked.dtype == "auto" else asked.dtype
    is_rounded = bool(second.is_rounded and second.quantization)
    gates = asked.gates
    if gates is None and is_rounded:
        gates = second.quantization["gates"]  # type: ignore[index]
    elif gates is None:
        gates = {} if asked.cache_dtype or first.is_rounded else DTYPE_GATES[compute]
    names = {"reference": first.folder, "other": second.folder}
    statistics = compare_windows(
        Side(first, compute),
        Side(second, compute, asked.cache_dtype),
        windows,
        model_config(first).sizes["V"],
        gates,
        lambda name: asked.progress(Progress(f"running {names.get(name, name)}")),
    )
    done: list[TaskDifference] = []
    if asked.tasks:
        scores = [
            to_do.run(
                manifest,
                compute,
                asked.cache_dtype if manifest is second else None,
                lambda n, of, name=manifest.folder: asked.progress(Progress(f"tasks of {name}", n, of)),  # type: ignore[misc]
            )
            for manifest in manifests
        ]
        done = [TaskDifference(before, after) for before, after in zip(*scores, strict=True)]
    asked.progress(Progress("comparing parameters"))
    return CheckpointComparison(
        reference=first.folder,
        checkpoint=second.folder,
        statistics=statistics,
        text="" if asked.text is None else Path(asked.text).name,
        length=None if asked.text is None else asked.length,
        stride=None if asked.text is None else chosen,
        cache_dtype=asked.cache_dtype,
        tensors=sorted(tensors, key=lambda tensor: tensor.snr_db),
        tasks=done,
        chat_template=asked.chat_template,
    )


def _windows(
    manifest: "Manifest", prompts: Sequence[str], text: Path | None, length: int, stride: int
) -> "Sequence[Window]":
    """Returns the windows of a text, or a window for each prompt, all of whose predictions but the last count.

    Raises:
        UsageError: the text cannot be read, or is too short; there is no tokenizer, or a window is too long.
    """
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.models.logits import Window
    from tpuconv.models.tokenizer import load_tokenizer, text_ids
    from tpuconv.verify.preparation import model_context, tokenized
    from tpuconv.verify.windows import windows

    with tokenizer_folder(manifest) as folder:
        if text is None:
            return [Window(ids, 0) for ids in tokenized(manifest, folder, prompts)]
        try:
            content = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"{text} is no text file: {e}") from None
        if length > (context := model_context(manifest)):
            raise UsageError(
                f"a window has {length} tokens, and the model was made for {context}", hint="give a smaller `length=`"
            )
        begin, ids = text_ids(load_tokenizer(folder), content)
        return windows(ids, length, stride, begin)
