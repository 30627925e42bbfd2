"""Prompts with images and sounds by the whole processor of a release, which transformers loads: for models whose
placeholders `tpuconv.models.placeholders` does not have. Most of these processors need torchvision."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuconv.errors import UsageError, root_cause
from tpuconv.models.placeholders import IMAGE, SOUND
from tpuconv.models.tokenizer import types_of_others

NAMES_OF_KINDS = {IMAGE: ("images", "image_token"), SOUND: ("audio", "audio_token")}
"""The argument of a processor, and its attribute with the marker."""

SOUND_PARTS = ("feature_extractor", "audio_processor")
"""The attributes of a processor that may have the part for sounds."""

TEXT_INPUTS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "padding_mask")
"""Arrays that processors return for the text, and no encoder takes."""

RENAMED = {"pixel_values_images": "pixel_values"}
"""Features that models take under another name."""

OF_ONE_IMAGE = ("FuyuProcessor",)
"""Processors that place the only image of a text themselves."""


@dataclass(frozen=True)
class WholeProcessor:
    """The processor of a release.

    Attributes:
        processor: a `ProcessorMixin` of transformers.
    """

    processor: Any

    def marker_of(self, kind: str) -> str:
        """Returns the text that stands for an image or a sound in a prompt, and that the processor replaces; "" of one
        that replaces none."""
        return str(getattr(self.processor, NAMES_OF_KINDS[kind][1], None) or "")

    @property
    def sampling_rate(self) -> Any:
        """The samples of a sound in a second; None if the processor does not say it."""
        parts = (getattr(self.processor, name, None) for name in SOUND_PARTS)
        return next((getattr(part, "sampling_rate", None) for part in parts if part is not None), None)

    def prepared(
        self, text: str, media: Mapping[str, Sequence[Any]], *, begins: bool
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Returns the token ids of a prompt with images and sounds, and their features, as tensors.

        Args:
            text: with a marker for each image and sound.
            media: the images and sounds, by kind.
            begins: put the token that begins a text before it.

        Raises:
            UsageError: the processor cannot prepare them.
        """
        given: dict[str, Any] = {NAMES_OF_KINDS[kind][0]: list(items) for kind, items in media.items()}
        if SOUND in media:
            given["sampling_rate"] = self.sampling_rate
        try:
            returned = self.processor(text=[text], **given, add_special_tokens=begins, return_tensors="pt")
            found: dict[str, Any] = dict(returned)
            ids = found.pop("input_ids")[0].tolist()
        except Exception as e:  # of any type
            raise UsageError(
                f"the checkpoint's processor cannot prepare this prompt: {type(e).__name__}: {root_cause(e)[:300]}",
                hint="give other images or sounds, or fewer; or prepare ids and features with the processor of the "
                "release, and give both to the model",
            ) from e
        names = [name for name in found if name not in TEXT_INPUTS]
        return tuple(ids), {RENAMED.get(name, name): found[name] for name in names}


def load_whole_processor(folder: Path) -> WholeProcessor | None:
    """Returns the processor in a folder, loaded by transformers without remote code; None if transformers has none for
    the model, or one that takes a single image. Raises what transformers does if it cannot be loaded."""
    import transformers

    try:
        with types_of_others():
            found = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ValueError as e:
        if re.search("trust_remote_code|Unrecognized processing class", str(e)):  # it is code of the release, or none
            return None
        raise
    is_whole = isinstance(found, transformers.ProcessorMixin) and type(found).__name__ not in OF_ONE_IMAGE
    return WholeProcessor(found) if is_whole else None
