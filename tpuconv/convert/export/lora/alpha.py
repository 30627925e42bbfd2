"""The alpha of LoRA, which scales changes: the arrays do not hold it, but MaxText records it beside them."""

from tpuconv.checkpoint.orbax_tree import TrainedTree
from tpuconv.errors import UsageError


def alpha_of(tree: TrainedTree, given: float | None, option: str) -> float:
    """Returns the alpha that the LoRA of a tree was trained with.

    Args:
        tree: what was saved.
        given: the alpha by the user.
        option: the name of the option that needs it.

    Raises:
        UsageError: it is not given, and the trainer did not record it, or recorded another one.
        SourceError: the metadata of the checkpoint cannot be understood.
    """
    recorded = _recorded(tree)
    if given is not None and recorded not in (None, given):
        raise UsageError(
            f"`lora_alpha=` is {given:g}, and {tree.folder} records {recorded:g} as the alpha of its training: changes "
            "are scaled by alpha / rank",
            hint="leave out `lora_alpha=`",
        )
    alpha = recorded if given is None else given
    if alpha is None:
        raise UsageError(
            f"`{option}=` needs `lora_alpha=`, which {tree.folder} does not record: changes are scaled by alpha / rank",
            hint="give the alpha of the training, such as 32 of Qwix's `LoraProvider(rank=16, alpha=32.0)`",
        )
    return alpha


def _recorded(tree: TrainedTree) -> float | None:
    """The alpha in the metadata of a step, where MaxText's `save_checkpoint` writes it; None if it is not there."""
    match tree.custom_metadata:
        case {"lora": {"lora_alpha": int() | float() as alpha}}:
            return float(alpha)
    return None
