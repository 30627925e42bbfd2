"""The checks of a draft and its target by their configs, without jax."""

from collections.abc import Iterable
from typing import Any

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.heads import ANOTHER_DRAFT
from tpuconv.models.common.rope import Rope


def check_ropes(ropes: Iterable[Rope | None]) -> None:
    """Raises UnsupportedConfig if rotary positions depend on the length of the cache."""
    if any(rope and rope.depends_on_length for rope in ropes):
        raise UnsupportedConfig(
            "the rotary positions of this model depend on the length of the cache, which is longer with drafts",
            hint="generate without them, for the same text",
        )


def check_pair(target: DecoderConfig, draft: Any, *, stacked: bool = False) -> None:
    """Checks that a draft fits a target, by their configs.

    Args:
        target, draft: the configs.
        stacked: True if the layers of the target are stacked.

    Raises:
        UsageError: `draft` is no draft, or its sizes differ from the sizes of the target.
        UnsupportedConfig: rotary positions depend on the length of the cache, or the layers of the target are stacked.
    """
    if not hasattr(draft, "states_of"):
        raise UsageError("this model is no draft of another one", hint="give the checkpoint of a draft")
    sizes = draft.sizes_beside(target).items()
    faults = [f"{size}: {a} in the draft, {b} in the target" for size, (a, b) in sizes if a != b]
    if faults:
        raise UsageError(
            "the draft is for another model: its sizes differ from the target's", details=faults, hint=ANOTHER_DRAFT
        )
    draft.states_of(target.num_hidden_layers)
    if stacked:
        raise UnsupportedConfig(
            "the layers of this model are stacked, and a draft reads what enters some of them",
            hint="convert it without `scan_layers=`",
        )
    check_ropes((*target.ropes, *draft.ropes))
