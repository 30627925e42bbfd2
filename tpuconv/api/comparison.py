"""Two models, checkpoints or releases, compared without transformers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.api.opened import OpenedModel, checkpoint_at, opened_model, runs_to_json
from tpuconv.api.running import downloading_again
from tpuconv.convert.plan.options import Options
from tpuconv.errors import GateError, UsageError
from tpuconv.location import Location
from tpuconv.options import (
    CACHE_DTYPE_OPTION,
    DTYPE_OPTION,
    GATES_OPTION,
    MOST_TOKENS,
    PROGRESS_ARGUMENT,
    PROMPTS_OPTION,
    TRAINED_CONFIG_OPTION,
    argument,
    option,
    takes,
)
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine

if TYPE_CHECKING:
    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.convert.export.trained import TrainedRun
    from tpuconv.models.logits import Window
    from tpuconv.verify.logits import LogitStatistics
    from tpuconv.verify.tasks import TaskDifference, TaskList
    from tpuconv.verify.weights.statistics import TensorDifference

WINDOW_LENGTH = 512
"""Tokens of a window of a text by default. The stride is half of it by default."""


@dataclass(frozen=True, repr=False)
class CheckpointComparison(OneLine):
    """The logits and parameters of two checkpoints.

    Attributes:
        reference, checkpoint: the folders, or the Hub ids; differences are from the first to the second.
        statistics: differences, divergences and gates.
        text: the name of the file that they ran on; empty for prompts.
        length, stride: tokens of a window of the text, and from one window to the next; None for prompts.
        cache_dtype: of the second one's cache; None if it ran without one.
        tensors: how parameters differ, worst first.
        tasks: the statistics of tasks, before and after.
        chat_template: whether their requests were conversations.
        runs: the facts of trainers' checkpoints among the two.
    """

    reference: str | Location
    checkpoint: str | Location
    statistics: "LogitStatistics"
    text: str
    length: int | None
    stride: int | None
    cache_dtype: str | None
    tensors: Sequence["TensorDifference"]
    tasks: Sequence["TaskDifference"] = ()
    chat_template: bool = False
    runs: Sequence["TrainedRun"] = ()

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
            **runs_to_json(self.runs),
        }


@dataclass(eq=False, repr=False)
class CompareCheckpointsRequest:
    """The arguments of `compare_checkpoints`."""

    reference: str | Location = field(
        metadata=argument(
            "A checkpoint or a release, with `config` also a trainer's; divergences are KL(reference || checkpoint)."
        )
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
    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    gates: Mapping[str, float] | None = field(default=None, metadata=GATES_OPTION)
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(CompareCheckpointsRequest)
def compare_checkpoints(asked: CompareCheckpointsRequest) -> CheckpointComparison:
    """Runs the models of two checkpoints, or releases, on the same tokens, and compares their parameters. One model is
    in memory at a time. A release, a trainer's checkpoint and one for another program are read as `load` reads them,
    with their values decoded.

    Raises:
        UsageError: they are other models, or return no logits; the cache cannot have this dtype; the text cannot be
            read or is too short; a task is not known, or its data cannot be read; or there is no chat template.
        TpuconvError: one cannot be read.
    """
    from tpuconv.convert.export.trained import configs_of
    from tpuconv.verify.windows import check_stride

    chosen = asked.stride if asked.stride is not None else max(1, asked.length // 2)
    if asked.text is not None:
        check_stride(asked.length, chosen)
    places = (asked.reference, asked.checkpoint)

    def compared() -> CheckpointComparison:
        with ExitStack() as stack:
            runs = [
                stack.enter_context(opened_model(place, Options(), config=config)) if config else None
                for place, config in zip(places, configs_of(places, asked.config), strict=True)
            ]
            found = [run.manifest if run else checkpoint_at(place) for place, run in zip(places, runs, strict=True)]
            opened = [
                run or stack.enter_context(opened_model(place, _options_beside(own, other)))
                for place, run, own, other in zip(places, runs, found, reversed(found), strict=True)
            ]
            return _compared(asked, opened, chosen, stack)

    return downloading_again(compared, asked.progress)


def _options_beside(own: "Manifest | None", other: "Manifest | None") -> Options:
    """Returns the options by which a release, without a manifest of its `own`, has the parameters of the `other`."""
    if own is not None or other is None:
        return Options()
    return Options(include_mtp=other.include_mtp, text_only=not other.parts)


def _compared(
    asked: CompareCheckpointsRequest, opened: Sequence[OpenedModel], stride: int, stack: ExitStack
) -> CheckpointComparison:
    """Returns the comparison of opened models. `stack` closes what this opens."""
    from tpuconv.checkpoint.reader import check_logits
    from tpuconv.quantize.config import check_gates

    check_gates(asked.gates or {})
    for each in opened:
        check_logits(each.manifest)
    # Only now, since jax takes seconds to import.
    from tpuconv.models.stored import check_cache_dtype, model_config
    from tpuconv.verify.pairs import Side, compare_windows, tensor_differences
    from tpuconv.verify.tasks import TaskDifference
    from tpuconv.verify.weights.planned import parameters

    to_do = _tasks(asked, opened)
    first, second = (each.manifest for each in opened)
    check_cache_dtype(second, asked.cache_dtype)
    tensors = tensor_differences(*(stack.enter_context(parameters(each.manifest, each.plan)) for each in opened))
    text = None if asked.text is None else Path(asked.text)
    windows = _windows(first, asked.prompts, text, asked.length, stride)
    compute = first.dtype if asked.dtype == "auto" else asked.dtype
    places = zip((asked.reference, asked.checkpoint), opened, strict=True)
    reference, other = (place if each.stored is None else each.manifest.folder for place, each in places)
    names = {"reference": reference, "other": other}
    caches = (None, asked.cache_dtype)
    sides = [Side(each.manifest, each.load, compute, cache) for each, cache in zip(opened, caches, strict=True)]
    statistics = compare_windows(
        sides[0],
        sides[1],
        windows,
        model_config(first).sizes["V"],
        _gates(asked, opened, compute),
        lambda name: asked.progress(Progress(f"running {names.get(name, name)}")),
    )
    scores = [
        to_do.run(
            side.manifest,
            side.load,
            compute,
            side.cache_dtype,
            lambda n, of, name=name: asked.progress(Progress(f"tasks of {name}", n, of)),  # type: ignore[misc]
        )
        for side, name in zip(sides, names.values(), strict=True)
        if asked.tasks
    ]
    asked.progress(Progress("comparing parameters"))
    return CheckpointComparison(
        reference=reference,
        checkpoint=other,
        statistics=statistics,
        text="" if text is None else text.name,
        length=None if text is None else asked.length,
        stride=None if text is None else stride,
        cache_dtype=asked.cache_dtype,
        tensors=sorted(tensors, key=lambda tensor: tensor.snr_db),
        tasks=[TaskDifference(before, after) for before, after in zip(*scores, strict=True)],
        chat_template=asked.chat_template,
        runs=[run for each in opened for run in each.runs],
    )


def _tasks(asked: CompareCheckpointsRequest, opened: Sequence[OpenedModel]) -> "TaskList":
    """Returns the tasks to run. Raises UsageError if one is not known, or a model has no tokenizer for it."""
    from tpuconv.verify.tasks import TaskList

    folder = None if asked.task_folder is None else Path(asked.task_folder)
    to_do = TaskList(tuple(asked.tasks), folder, asked.task_limit, asked.chat_template)
    if asked.tasks:
        to_do.check()
        for each in opened:
            to_do.check_tokenizer(each.manifest)
    return to_do


def _gates(asked: CompareCheckpointsRequest, opened: Sequence[OpenedModel], compute: str) -> Mapping[str, float] | None:
    """Returns the gates: given ones, else the gates of the second model's quantization, else of the dtype `compute` if
    nothing was rounded."""
    from tpuconv.verify.logits import DTYPE_GATES

    first, second = (each.manifest for each in opened)
    if asked.gates is not None:
        return asked.gates
    if second.is_rounded:
        named: Mapping[str, float] | None = second.quantization["gates"]  # type: ignore[index]
        return named
    rounds = asked.cache_dtype or first.is_rounded or any(each.is_decoded for each in opened)
    return {} if rounds else DTYPE_GATES[compute]


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
    from tpuconv.quantize.calibrate.data import read_text
    from tpuconv.verify.preparation import model_context, tokenized
    from tpuconv.verify.windows import windows

    with tokenizer_folder(manifest) as folder:
        if text is None:
            return [Window(ids, 0) for ids in tokenized(manifest, folder, prompts)]
        content = read_text(text)
        if length > (context := model_context(manifest)):
            raise UsageError(
                f"a window has {length} tokens, and the model was made for {context}", hint="give a smaller `length=`"
            )
        begin, ids = text_ids(load_tokenizer(folder), content)
        return windows(ids, length, stride, begin)
