"""The options of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuconv.errors import UsageError
from tpuconv.location import Location
from tpuconv.options import (
    DRAFT_FORMS,
    FORM_CHOICES,
    SCHEME_OPTION,
    TRAINED_CONFIG_OPTION,
    TRAINED_NONFINITE_OPTION,
    TRAINED_TARGET_OPTION,
    option,
)

WITHOUT_CONFIG = {
    "form": ("is for checkpoints of tpuconv, and `config=` names tensors as SRC does", "leave one of them out"),
    "scheme": (
        "is for quantized checkpoints of tpuconv, and `config=` is for a trainer's checkpoint",
        "leave it out",
    ),
    "with_skipped": (
        "needs the manifest of a conversion, and `config=` is for checkpoints without one",
        "give one of them",
    ),
}
"""Options for checkpoints of tpuconv alone: why, and what to do."""

OF_TRAINERS = ("is only for a trainer's checkpoint, which needs `config=`", "leave it out, or give `config=SRC`")

WITH_CONFIG = {
    "target": OF_TRAINERS,
    "allow_nonfinite": OF_TRAINERS,
    "adapter": ("needs `config=`, the model that was trained", "give `config=SRC`"),
    "merge": ("needs `config=`, the model that was trained", "give `config=SRC`"),
}
"""Options for a trainer's checkpoint alone."""


def refuse_options(asked: Any, reasons: Mapping[str, tuple[str, str]]) -> None:
    """Raises UsageError if one of these options is given that cannot be used here; `reasons` says why, and what to
    do."""
    for name, (why, hint) in reasons.items():
        if getattr(asked, name, None):
            raise UsageError(f"`{name}=` cannot be used here: it {why}", hint=hint)


@dataclass(eq=False, repr=False, kw_only=True)
class ExportOptions:
    """The options of `export` and `plan_export`."""

    config: str | Location | None = field(default=None, metadata=TRAINED_CONFIG_OPTION)
    target: str | None = field(default=None, metadata=TRAINED_TARGET_OPTION)
    allow_nonfinite: bool = field(default=False, metadata=TRAINED_NONFINITE_OPTION)
    with_skipped: str | Location | None = option(
        None,
        "Add the tensors that the conversion skipped (towers, MTP layers) from its source, a path or Hub id.",
    )
    adapter: bool = option(
        False, "Write the LoRA that was trained on SRC as an adapter that PEFT and servers load, and nothing else."
    )
    merge: bool = option(False, "Add the LoRA that was trained to the model, and write that.")
    lora_alpha: float | None = option(
        None,
        "The alpha that LoRA was trained with: changes are scaled by alpha / rank.  [default: as the run records it]",
    )
    scheme: str | None = field(default=None, metadata=SCHEME_OPTION)
    form: str | None = option(
        None,
        "Name and group the tensors as the family's releases do, or as the modules of transformers do; of a draft as "
        "speculators or SGLang do, config.json too.  [default: as the source did]",
        choices=FORM_CHOICES,
    )
    draft_for: str | None = option(
        None,
        'The target of a draft, such as Qwen/Qwen3-8B, which config.json of `form="speculators"` names.  [default: as '
        "the draft was converted]",
    )

    def check_together(self) -> None:
        """Raises UsageError for options that do not go together."""
        refuse_options(self, WITH_CONFIG if self.config is None else WITHOUT_CONFIG)
        if self.adapter and self.merge:
            raise UsageError(
                "`adapter=` writes an adapter, and `merge=` a whole model", hint="give one of them, or run twice"
            )
        if self.draft_for is not None and self.form != DRAFT_FORMS[0]:
            raise UsageError(
                f'`draft_for=` is for `form="{DRAFT_FORMS[0]}"`', hint="give both, or leave `draft_for=` out"
            )
        if self.lora_alpha is not None and not (self.adapter or self.merge):
            raise UsageError("`lora_alpha=` is for `adapter=` and `merge=`", hint="give one of them, or leave it out")
