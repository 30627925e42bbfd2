"""The text that a model is calibrated on, as token ids."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import xxhash

from tpuconv.errors import UsageError
from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer, text_ids

SELF = "self"
"""The name of text that the model itself draws."""
DEFAULT_TEXT = "calibration.txt"
"""The text of this package."""


def default_text() -> str:
    """Returns the text of this package."""
    return (files("tpuconv") / "quantize" / "calibrate" / DEFAULT_TEXT).read_text(encoding="utf-8")


@dataclass(frozen=True)
class CalibrationData:
    """Samples of equal length.

    Attributes:
        text: where they are from: a file, `DEFAULT_TEXT` or `SELF`.
        samples, length: how many, and of how many tokens.
        digest: equal for equal ids.
        ids: makes the token ids [samples, length].
        asked: how many samples were asked for.
    """

    text: str
    samples: int
    length: int
    digest: str
    ids: Callable[[], np.ndarray]
    asked: int = 0

    def to_json(self) -> dict[str, str | int]:
        """Returns the manifest's description of the text."""
        return {"text": self.text, "samples": self.samples, "length": self.length, "xxh3_128": self.digest}


def from_ids(text: str, ids_ST: np.ndarray) -> CalibrationData:
    """Returns the data of token ids [samples, length]."""
    ids_ST = np.ascontiguousarray(ids_ST, np.int32)
    digest = xxhash.xxh3_128_hexdigest(ids_ST.tobytes())
    samples, length = ids_ST.shape
    return CalibrationData(text, samples, length, digest, lambda: ids_ST)


def from_text(folder: Path, file: Path | None, samples: int, length: int) -> CalibrationData:
    """At most `samples` samples of `length` tokens, evenly spaced over a text. Each begins with what the tokenizer puts
    before a text, such as BOS.

    Args:
        folder: with a tokenizer.
        file: with the text, in UTF-8; the text of this package if it is None.
        samples, length: how many, and of how many tokens.

    Raises:
        UsageError: there is no tokenizer, the file cannot be read, or it has less than one sample.
    """
    if not has_tokenizer(folder):
        raise UsageError(
            "the checkpoint has no tokenizer for the text to calibrate on",
            hint=f'copy tokenizer.json into its folder, or give `calibration="{SELF}"`, which draws text from the '
            "model",
        )
    try:
        text = file.read_text(encoding="utf-8") if file else default_text()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file} is no text file: {e}") from None
    begin, ids = text_ids(load_tokenizer(folder), text)
    room = length - len(begin)
    count = min(samples, len(ids) // room) if room > 0 else 0
    name = file.name if file else DEFAULT_TEXT
    if count == 0:
        raise UsageError(
            f"{name} has {len(ids)} tokens, and a sample has {length}",
            hint="give `calibration=` a longer text, or a smaller `length=`",
        )
    starts = np.linspace(0, len(ids) - room, count).astype(int)
    found = from_ids(name, np.array([[*begin, *ids[start : start + room]] for start in starts]))
    return replace(found, asked=samples)
