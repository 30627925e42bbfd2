"""The text that a model is calibrated on, as token ids."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from itertools import cycle, islice, repeat
from pathlib import Path

import numpy as np
import xxhash

from tpuconv.errors import SourceError, UsageError
from tpuconv.jsonfile import Exactly, Optional, check, parse
from tpuconv.location import local_path
from tpuconv.models.text_generator import PromptEncoder
from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer, text_ids

SELF = "self"
"""The name of text that the model itself draws."""
DEFAULT_TEXT = "calibration.txt"
"""The text of this package."""
PROMPTS_SUFFIX = ".jsonl"
"""How the name of a file with prompts ends."""
LINE_SCHEMA = Exactly({"prompt": str, "images": Optional([str]), "sounds": Optional([str]), "chat": Optional(bool)})
"""Schema of a line of it."""
EXAMPLE_LINE = '{"prompt": "What is this?", "images": ["cat.png"], "chat": true}'


def default_text() -> str:
    """Returns the text of this package."""
    return (files("tpuconv") / "quantize" / "calibrate" / DEFAULT_TEXT).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Sample:
    """Token ids [T], and the features of their images and sounds as `tpuconv.models.common.decoder.Decoder.see` takes
    them."""

    ids: Sequence[int] | np.ndarray
    features: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class CalibrationData:
    """Samples of equal length.

    Attributes:
        text: where they are from: a file, `DEFAULT_TEXT` or `SELF`.
        samples, length: how many, and of how many tokens.
        digest: equal for equal ids.
        ids: makes the token ids [samples, length].
        asked: how many samples were asked for.
        features: make the features of each sample, which are not kept: an image may have more than a hundred megabytes.
            Empty for texts.
    """

    text: str
    samples: int
    length: int
    digest: str
    ids: Callable[[], np.ndarray]
    asked: int = 0
    features: Sequence[Callable[[], Mapping[str, np.ndarray]]] = ()

    def each(self) -> Iterator[Sample]:
        """Yields the samples.

        Raises:
            SourceError: an image or sound changed since its hash was computed.
        """
        ids_ST = self.ids()
        return map(Sample, ids_ST, (make() for make in self.features) if self.features else repeat({}, len(ids_ST)))

    @property
    def example(self) -> Sample | None:
        """A sample with images or sounds; None if there is none."""
        return next((sample for sample in self.each() if sample.features), None) if self.features else None

    def to_json(self) -> dict[str, str | int]:
        """Returns the manifest's description of the text."""
        return {"text": self.text, "samples": self.samples, "length": self.length, "xxh3_128": self.digest}


def from_ids(text: str, ids_ST: np.ndarray) -> CalibrationData:
    """Returns the data of token ids [samples, length]."""
    ids_ST = np.ascontiguousarray(ids_ST, np.int32)
    digest = xxhash.xxh3_128_hexdigest(ids_ST.tobytes())
    samples, length = ids_ST.shape
    return CalibrationData(text, samples, length, digest, lambda: ids_ST)


def check_tokenizer(folder: Path) -> None:
    """Raises UsageError if a folder has no tokenizer."""
    if not has_tokenizer(folder):
        raise UsageError(
            "the checkpoint has no tokenizer for the text to calibrate on",
            hint=f'copy tokenizer.json into its folder, or give `calibration="{SELF}"`, which draws text from the '
            "model",
        )


def read_text(file: Path) -> str:
    """Returns the content of a text file. Raises UsageError if it cannot be read, or is not in UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{file} cannot be read: {e.strerror}", hint="give the path of a text file") from None
    except UnicodeDecodeError as e:
        raise UsageError(f"{file} is no text file: {e}", hint="save the text in UTF-8") from None


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
    check_tokenizer(folder)
    begin, ids = text_ids(load_tokenizer(folder), read_text(file) if file else default_text())
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


def from_prompts(file: Path, encoder: PromptEncoder, samples: int, length: int) -> CalibrationData:
    """The first `samples` prompts of a file, each filled up to `length` tokens with the text of this package.

    Args:
        file: of JSON, an object a line: `prompt`, and where wanted `images` and `sounds`, which are files beside it,
            and `chat`.
        encoder: of the model.
        samples, length: how many, and of how many tokens.

    Raises:
        UsageError: the file has another form; or a prompt with images or sounds has more tokens than a sample, or see
            `tpuconv.models.text_generator.PromptEncoder.encode_with`.
    """
    # Not splitlines(): a string of JSON may have separators of lines other than \n.
    lines = [line for line in enumerate(read_text(file).split("\n"), 1) if line[1].strip()][:samples]
    if not lines:
        raise UsageError(f"{file} has no prompt", hint=f"give a line for each, such as {EXAMPLE_LINE}")
    _, filling = text_ids(encoder.tokenizer, default_text())
    ids_ST: list[list[int]] = []
    features: list[Callable[[], Mapping[str, np.ndarray]]] = []
    digests: list[str] = []
    for number, line in lines:
        what = f"line {number} of {file}"
        try:
            prompt = check(parse(line.encode(), what, UsageError), LINE_SCHEMA, what, UsageError)
        except UsageError as e:
            raise UsageError(e.message, hint=e.hint or f"write it such as {EXAMPLE_LINE}") from None
        chat = prompt.get("chat", False)
        media = [[file.parent / local_path(name) for name in prompt.get(kind, ())] for kind in ("images", "sounds")]
        encode = partial(encoder.encode_with, prompt["prompt"], *media, chat=chat)
        ids, found = encode()
        if found and len(ids) > length:
            raise UsageError(
                f"the prompt in {what} has {len(ids)} tokens with its images and sounds, and a sample has {length}",
                hint=f"make `length=` at least {len(ids)}",
            )
        start = len(ids_ST) * length % len(filling)
        ids_ST.append([*ids, *islice(cycle(filling), start, start + length)][:length])
        digests.append(_digest_of(found))
        features.append(partial(_made_again, encode, digests[-1], what) if found else dict)
        del found  # before the next prompt has its own
    data = from_ids(file.name, np.array(ids_ST))
    digest = xxhash.xxh3_128_hexdigest("".join([data.digest, *digests]).encode())
    return replace(data, digest=digest, asked=samples, features=features if any(digests) else ())


def _digest_of(features: Mapping[str, np.ndarray]) -> str:
    """Returns a hash of the features of a sample; "" without any."""
    hashed = xxhash.xxh3_128()
    for name, values in sorted(features.items()):
        hashed.update(f"{name} {values.dtype} {values.shape}".encode())
        hashed.update(np.ascontiguousarray(values).tobytes())
    return hashed.hexdigest() if features else ""


def _made_again(
    encode: Callable[[], tuple[list[int], Mapping[str, np.ndarray]]], digest: str, what: str
) -> Mapping[str, np.ndarray]:
    """Returns the features of a prompt, which had this hash before. Raises SourceError if they have another one."""
    _, features = encode()
    if _digest_of(features) != digest:
        raise SourceError(
            f"an image or sound of {what} changed while it was used",
            hint="wait until nothing writes to it, and run again",
        )
    return features
