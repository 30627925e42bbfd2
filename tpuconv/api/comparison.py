"""Two checkpoints of ours, compared without transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location, to_location
from tpuconv.progress import Listener, Progress, ignore

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.models.logits import Window
    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.pairs import TensorDifference
    from tpuconv.verify.tasks import TaskDifference

WINDOW_LENGTH = 512
"""Tokens of a window of a text by default. The stride is half of it by default."""


@dataclass(frozen=True)
class CheckpointComparison:
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
                hint="the parameters that differ most are in the table above, and in `tensors` of --json",
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


def compare_checkpoints(
    reference: str | Location,
    checkpoint: str | Location,
    *,
    prompts: Sequence[str] = (),
    text: str | Path | None = None,
    length: int = WINDOW_LENGTH,
    stride: int | None = None,
    dtype: str = "auto",
    cache_dtype: str | None = None,
    gates: Mapping[str, float] | None = None,
    tasks: Sequence[str] = (),
    task_folder: str | Path | None = None,
    task_limit: int | None = None,
    chat_template: bool = False,
    progress: Listener = ignore,
) -> CheckpointComparison:
    """Runs the models of two checkpoints on the same tokens, and compares their parameters. One model is in memory at a
    time.

    Args:
        reference: a checkpoint of ours; divergences are KL(reference || checkpoint).
        checkpoint: another one of the same model, quantized or not.
        prompts: texts; a built-in set by default.
        text: a text file in UTF-8 to run on instead, in windows that overlap; each token is predicted once.
        length, stride: tokens of a window, and from one window to the next (half of `length` by default).
        dtype: to compute in: "auto" (the reference's), "bfloat16" or "float32".
        cache_dtype: "int8" or "float8_e4m3fn": the second model writes its keys and values to a cache of this dtype,
            and reads them from it, as in decoding.
        gates: bounds by the name of a statistic. They default to the gates of the checkpoint's quantization config,
            which may be measured by another rounding. An unquantized checkpoint without a quantized cache has the gates
            of its dtype.
        tasks: names of tasks or groups of lm-evaluation-harness (extra `eval`), which both models do too.
        task_folder: a folder with further tasks, YAML files as lm-evaluation-harness has them.
        task_limit: examples of each task at most; all by default.
        chat_template: write each request of a task as a conversation, by the tokenizer's chat template; examples of
            answers are its earlier turns.
        progress: called while it runs.

    Raises:
        UsageError: the checkpoints hold other models, or return no logits; the cache cannot have this dtype; the text
            cannot be read or is too short; a task is not known, or its data cannot be read; or there is no chat
            template.
        TpuconvError: a checkpoint cannot be read.
    """
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.verify.windows import check_stride

    chosen = stride if stride is not None else max(1, length // 2)
    if text is not None:
        check_stride(length, chosen)
    manifests = [read_manifest(to_location(folder)) for folder in (reference, checkpoint)]
    for manifest in manifests:
        manifest.check_own()
        check_logits(manifest)
    # Only now, since jax takes seconds to import.
    from tpuconv.models.stored import check_cache_dtype
    from tpuconv.verify.logits import DTYPE_GATES
    from tpuconv.verify.pairs import Side, compare_windows, tensor_differences
    from tpuconv.verify.tasks import TaskDifference, TaskList

    to_do = TaskList(tuple(tasks), None if task_folder is None else Path(task_folder), task_limit, chat_template)
    if tasks:
        to_do.check()
        for manifest in manifests:
            to_do.check_tokenizer(manifest)
    first, second = manifests
    check_cache_dtype(second, cache_dtype)
    tensors = tensor_differences(first, second)
    windows = _windows(first, prompts, None if text is None else Path(text), length, chosen)
    compute = first.dtype if dtype == "auto" else dtype
    is_rounded = bool(second.is_rounded and second.quantization)
    if gates is None and is_rounded:
        gates = second.quantization["gates"]  # type: ignore[index]
    elif gates is None:
        gates = {} if cache_dtype or first.is_rounded else DTYPE_GATES[compute]
    names = {"reference": first.folder, "other": second.folder}
    statistics = compare_windows(
        Side(first, compute),
        Side(second, compute, cache_dtype),
        windows,
        next(array.shape[0] for array in first.arrays.values() if array.axes.startswith("V")),
        gates,
        lambda name: progress(Progress(f"running {names.get(name, name)}")),
    )
    done: list[TaskDifference] = []
    if tasks:
        scores = [
            to_do.run(
                manifest,
                compute,
                cache_dtype if manifest is second else None,
                lambda n, of, name=manifest.folder: progress(Progress(f"tasks of {name}", n, of)),  # type: ignore[misc]
            )
            for manifest in manifests
        ]
        done = [TaskDifference(before, after) for before, after in zip(*scores, strict=True)]
    progress(Progress("comparing parameters"))
    return CheckpointComparison(
        reference=first.folder,
        checkpoint=second.folder,
        statistics=statistics,
        text="" if text is None else Path(text).name,
        length=None if text is None else length,
        stride=None if text is None else chosen,
        cache_dtype=cache_dtype,
        tensors=sorted(tensors, key=lambda tensor: tensor.snr_db),
        tasks=done,
        chat_template=chat_template,
    )


def _windows(
    manifest: "Manifest", prompts: Sequence[str], text: Path | None, length: int, stride: int
) -> "Sequence[Window]":
    """Returns the windows of a text, or a window for each prompt, all of whose predictions but the last count.

    Raises:
        UsageError: the text cannot be read, or is too short; there is no tokenizer, or a window is too long.
    """
    from tpuconv.api.evaluation import model_context, tokenized
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.models.logits import Window
    from tpuconv.models.tokenizer import load_tokenizer, text_ids
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
                f"a window has {length} tokens, and the model was made for {context}", hint="give a smaller --length"
            )
        begin, ids = text_ids(load_tokenizer(folder), content)
        return windows(ids, length, stride, begin)
