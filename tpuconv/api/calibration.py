"""The text and the samples of a calibration."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tpuconv.errors import UsageError
from tpuconv.location import local_path
from tpuconv.options import MOST_TOKENS, option
from tpuconv.progress import Listener, Progress
from tpuconv.text import format_count

if TYPE_CHECKING:
    import numpy as np

    from tpuconv.checkpoint.manifest import Manifest
    from tpuconv.quantize.calibrate.data import CalibrationData
    from tpuconv.quantize.config import QuantConfig

CALIBRATION_SAMPLES, CALIBRATION_LENGTH = 128, 512
"""The default amount of calibration text: samples, and tokens per sample."""
DRAWN_AT_ONCE = 8
"""Samples that a model draws at once."""


@dataclass(frozen=True)
class CalibrationText:
    """The amount of calibration text.

    Attributes:
        text: the origin of the text.
        samples, length: the number of samples, and of tokens per sample.
        asked: the number of requested samples.
        inputs: the most inputs of a product whose weights are rounded.
    """

    text: str
    samples: int
    length: int
    asked: int
    inputs: int

    @classmethod
    def of(cls, data: "CalibrationData", inputs: int) -> Self:
        """Returns the amount of text in the data of a calibration."""
        return cls(data.text, data.samples, data.length, data.asked or data.samples, inputs)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.samples * self.length

    @property
    def warning(self) -> str:
        """The reason why the text is too short, with advice; empty if it is long enough."""
        if self.tokens >= self.inputs:
            return ""
        more = (
            'give a longer text by `calibration=FILE`, or `calibration="self"`'
            if self.samples < self.asked
            else "give a larger `samples=`"
        )
        return f"{self.tokens:,} tokens are fewer than the {self.inputs:,} inputs of a product: {more}"

    def __str__(self) -> str:
        few = f" of the {self.asked:,} asked for" if self.samples < self.asked else ""
        return f"calibration: {format_count(self.samples, 'sample')}{few}, {self.tokens:,} tokens, of {self.text}"

    def announce(self, progress: Listener) -> None:
        """Tells a listener, before the work begins."""
        progress(Progress("", message=str(self)))
        if self.warning:
            progress(Progress("", message=f"warning: {self.warning}"))

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {**asdict(self), "tokens": self.tokens, "warning": self.warning or None}


@dataclass(eq=False, repr=False, kw_only=True)
class CalibrationOptions:
    """The text for a calibration."""

    calibration: str | Path | None = option(
        None,
        'The text for a config with `calibration`, and for `method="gptq"` or awq: a file, or `self` to sample text '
        "from the model; a file.jsonl has prompts, with images and sounds too.  [default: a text of this package]",
    )
    samples: int = option(CALIBRATION_SAMPLES, "The largest number of samples of the text.", least=1)
    length: int = option(CALIBRATION_LENGTH, "Tokens per sample.", least=2, most=MOST_TOKENS)


def calibration_data(
    manifest: "Manifest", rules: "QuantConfig", asked: CalibrationOptions, load: Callable[[], Any]
) -> "CalibrationData | None":
    """Returns the samples for a config with a calibration of a checkpoint; None for other configs. `load` returns its
    model, where that draws the samples.

    Raises:
        UsageError: there is a text and no calibration, or a sample has more tokens than the model has positions; or see
            `tpuconv.quantize.calibrate.data`.
    """
    text, samples, length = asked.calibration, asked.samples, asked.length
    if rules.calibration is None:
        if text is not None:
            raise UsageError(
                f"{rules.name} has no calibration, so that no text is needed",
                hint="leave `calibration=` out, or give a checkpoint with a tokenizer, whose costs are measured"
                if rules.target_bits is not None
                else "add `calibration: {method: gptq}` to the config, or leave `calibration=` out",
            )
        return None
    from tpuconv.checkpoint.companions import tokenizer_folder
    from tpuconv.models.stored import check_positions, model_config
    from tpuconv.models.text_generator import prompt_encoder
    from tpuconv.models.tokenizer import load_tokenizer
    from tpuconv.quantize.calibrate.data import (
        PROMPTS_SUFFIX,
        SELF,
        CalibrationData,
        check_tokenizer,
        from_prompts,
        from_text,
    )

    check_positions(manifest, length, "a sample", hint="make `length=` smaller")
    if str(text) == SELF:
        return CalibrationData(SELF, samples, length, "", lambda: _drawn(manifest, load(), samples, length))
    file = None if text is None else local_path(text, "a text to calibrate on is a local file")
    with tokenizer_folder(manifest) as folder:
        if file is None or file.suffix != PROMPTS_SUFFIX:
            return from_text(folder, file, samples, length)
        check_tokenizer(folder)
        processors = (lambda: folder) if manifest.parts else None
        encoder = prompt_encoder(load_tokenizer(folder), model_config(manifest), processors, manifest.parts)
        return from_prompts(file, encoder, samples, length)


def _drawn(manifest: "Manifest", model: Any, samples: int, length: int) -> "np.ndarray":
    """Token ids [samples, length] that the model of a checkpoint draws itself, at temperature 1, the same in every run.
    They begin with the token that begins a text, or, if config.json names none, with a random one."""
    import numpy as np

    from tpuconv.checkpoint.reader import read_checkpoint_config
    from tpuconv.models.generate import Generator, Sampling
    from tpuconv.sources.config import parts_of

    vocabulary = manifest.arrays["embed.embedding"].shape[0]
    raw = read_checkpoint_config(manifest)
    begin = raw.get("bos_token_id", parts_of(raw)[-1].get("bos_token_id"))
    if isinstance(begin, int) and 0 <= begin < vocabulary:
        first = [begin] * samples
    else:
        first = np.random.default_rng(0).integers(0, vocabulary, samples).tolist()
    generator = Generator(model, Sampling(temperature=1.0))
    out = np.empty((samples, length), np.int32)
    for start in range(0, samples, DRAWN_AT_ONCE):
        prompts = [[token] for token in first[start : start + DRAWN_AT_ONCE]]
        rows = slice(start, start + len(prompts))
        out[rows, 0] = first[rows]
        for step, ids_B in enumerate(generator(prompts, length - 1, seed=start)):
            out[rows, step + 1] = ids_B
    return out
