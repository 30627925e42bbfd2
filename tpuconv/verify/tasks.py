"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), run on a checkpoint."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from tpuconv.checkpoint.companions import tokenizer_folder
from tpuconv.checkpoint.manifest import Manifest
from tpuconv.errors import UsageError, root_cause
from tpuconv.extras import install_command
from tpuconv.verify.logits import ModelLoader

BOOTSTRAPS = 1000
"""Samples of the standard error of metrics without a formula for it."""
NO_PROCESSES = "DISABLE_MULTIPROC"
"""The variable of the environment that lm_eval reads."""


@dataclass(frozen=True)
class TaskScore:
    """A statistic of a task, and its standard error, if there is one.

    Attributes:
        metric: its name, such as "acc"; with the filter of the answers, if the task has one: "exact_match,strict".
    """

    task: str
    metric: str
    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskDifference:
    """A statistic of a task for the reference and for the other checkpoint."""

    reference: TaskScore
    checkpoint: TaskScore

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        sides = {"reference": self.reference, "checkpoint": self.checkpoint}
        return {
            "task": self.reference.task,
            "metric": self.reference.metric,
            **{side: score.value for side, score in sides.items()},
            "stderr": {side: score.stderr for side, score in sides.items()},
        }


@dataclass(frozen=True)
class TaskList:
    """Tasks to run.

    Attributes:
        names: of tasks or groups.
        folder: with further tasks as YAML files.
        limit: examples of each task at most; None for all.
        chat_template: whether requests are conversations, by the chat template of the tokenizer: examples of answers
            are earlier turns.
    """

    names: tuple[str, ...]
    folder: Path | None = None
    limit: int | None = None
    chat_template: bool = False

    def check(self) -> None:
        """Reads the data of the tasks.

        Raises:
            UsageError: lm_eval is not installed or has no such task, or the data of one cannot be read.
        """
        _ = self._manager

    def check_tokenizer(self, manifest: Manifest) -> None:
        """Raises UsageError if a checkpoint has no tokenizer, or none with a chat template where one is asked for."""
        self._tokenizer(manifest)

    def _tokenizer(self, manifest: Manifest) -> tuple[Any, frozenset[int]]:
        """Returns the tokenizer of a checkpoint, and the tokens that end a text."""
        from tpuconv.models.tokenizer import end_tokens, load_tokenizer

        with tokenizer_folder(manifest) as folder:
            tokenizer = load_tokenizer(folder)
            ends = end_tokens(folder, tokenizer)
        if self.chat_template and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"the tokenizer of {manifest.folder} has no chat template", hint="leave `chat_template=` out"
            )
        return tokenizer, ends

    @cached_property
    def _manager(self) -> Any:
        """lm_eval's manager of tasks, after the data are read."""
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as e:
            raise UsageError(
                f"tasks need lm-evaluation-harness, which cannot be imported: {e}", hint=install_command("eval")
            ) from None
        manager = TaskManager(include_path=None if self.folder is None else str(self.folder))
        if unknown := [name for name in self.names if name not in manager.all_tasks]:
            raise UsageError(
                f"lm-evaluation-harness has no task {', '.join(unknown)}",
                hint="`lm-eval ls tasks` lists all; give `task_folder=` for tasks of yours",
            )
        try:
            manager.load(list(self.names))
        except (OSError, ValueError) as e:
            raise UsageError(
                f"the data of {', '.join(self.names)} cannot be read: {type(e).__name__}: {root_cause(e)}",
                hint="without a network they must be in the cache of `datasets`, or in files that a task of "
                "`task_folder=` names",
            ) from e
        return manager

    def run(
        self,
        manifest: Manifest,
        load: ModelLoader,
        dtype: str,
        cache_dtype: str | None = None,
        on_request: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[TaskScore]:
        """Returns the scores of a model.

        Args:
            manifest: of the model.
            load: loads it in a dtype onto a mesh.
            dtype: to compute in.
            cache_dtype: of keys and values; None for the model's.
            on_request: called with the number of requests that are done, and of all, of one kind.

        Raises:
            UsageError: see `check` and `check_tokenizer`; or a task draws its texts, or the chat template fails.
        """
        manager = self._manager
        from lm_eval import simple_evaluate

        from tpuconv.verify.task_model import TaskModel

        tokenizer, ends = self._tokenizer(manifest)
        gc.collect()  # a model of another checkpoint is in cycles of references
        model = TaskModel(load(dtype, None), tokenizer, ends, dtype, cache_dtype, on_request)
        settings = {"limit": self.limit, "task_manager": manager, "bootstrap_iters": BOOTSTRAPS}
        settings |= {"apply_chat_template": self.chat_template, "fewshot_as_multiturn": self.chat_template}
        with _in_this_process(), redirect_stdout(StringIO()):
            found = simple_evaluate(model=model, tasks=list(self.names), log_samples=False, **settings)
        return list(_scores(found["results"]))


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Lets lm_eval make its bootstraps without processes, which would be forks of one with the threads of jax."""
    before = os.environ.get(NO_PROCESSES)
    os.environ[NO_PROCESSES] = "1"
    try:
        yield
    finally:
        os.environ.pop(NO_PROCESSES)
        if before is not None:
            os.environ[NO_PROCESSES] = before


def _scores(results: Mapping[str, Mapping[str, Any]]) -> Iterator[TaskScore]:
    for task, values in results.items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not isinstance(value, int | float) or not chosen or metric.endswith("_stderr"):
                continue
            stderr = values.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else key
            yield TaskScore(task, name, float(value), float(stderr) if isinstance(stderr, int | float) else None)
