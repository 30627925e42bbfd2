"""Features of images and sounds: reads the files, runs the image processor or feature extractor that came with a
checkpoint, and writes placeholders into the prompt. transformers and Pillow are imported when they are needed; without
torchvision most image processors run, but not all."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tpuconv.errors import ConfigError, TpuconvError, UsageError, root_cause
from tpuconv.extras import install_command
from tpuconv.jsonfile import check
from tpuconv.models.media_texts import PIECES, MediaItem
from tpuconv.models.placeholders import IMAGE, PROCESSOR_KEYS, SOUND, Placeholder, placeholder_of
from tpuconv.sources.config import read_json

T = TypeVar("T")
SoundArray = NDArray[np.float32]
Features = dict[str, NDArray[Any]]
FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that have the settings of an image processor or feature extractor; the second has the settings of both."""

COUNTS = ("num_crops", "num_patches", "num_soft_tokens_per_image", "rows", "cols", "aspect_ratios", PIECES)
"""Features that image processors return for the prompt alone, and no model takes."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with images and sounds, as a model takes it.

    Attributes:
        text: with placeholders, to be encoded as any other.
        features: what the model takes beside it, by the names that transformers gives it.
    """

    text: str
    features: Features


def prepared(
    folder: Path,
    tokenizer: Any,
    text: str,
    images: Sequence[Any] = (),
    sounds: Sequence[Any] = (),
) -> PreparedPrompt:
    """Returns a prompt with its images and sounds, as the processor of the release prepares it.

    Args:
        folder: a local folder with config.json and the settings of the processor.
        tokenizer: names the special tokens; see `load_tokenizer`.
        text: with a marker for each image and sound, such as a chat template writes; without any they stand before it.
        images: files, see `load_image`, or images of Pillow.
        sounds: files, see `load_sound`, or samples from -1 to 1 at the rate of the model.

    Raises:
        UsageError: markers and images do not match, a package or file of the processor is missing, or how the model
            writes placeholders is not known.
        ConfigError: the processor cannot be loaded, or cannot prepare an image or a sound.
    """
    features: Features = {}
    for kind, items in ((IMAGE, images), (SOUND, sounds)):
        if items:
            text, found = _written(folder, tokenizer, text, kind, items)
            features |= found
    return PreparedPrompt(text, features)


def _written(folder: Path, tokenizer: Any, text: str, kind: str, items: Sequence[Any]) -> tuple[str, Features]:
    """Returns the text with placeholders instead of the markers of one kind, and the features."""
    config = read_json(folder / "config.json", ConfigError)
    row = placeholder_of(config, kind)
    if row is None:
        raise UsageError(
            f"the placeholders that {config.get('model_type')} has for {kind}s are not known",
            hint="prepare ids and features with the processor of the release, and give both to the model",
        )
    extractor = load_processor(folder, kind)
    if kind == IMAGE:
        returned = _of_images(extractor, row, [load_image(x) if isinstance(x, str | Path) else x for x in items])
    else:
        rate = extractor.sampling_rate
        returned = _of_sounds(extractor, row, [load_sound(x, rate) if isinstance(x, str | Path) else x for x in items])
    features = {row.renamed.get(name, name): values for name, values in returned.items()}
    together = folder / FILES[1]
    settings = read_json(together, ConfigError) if together.exists() else {}
    check(settings, PROCESSOR_KEYS, str(together), ConfigError)
    token = partial(_token, tokenizer, row, folder)
    marker = token(row.marker)
    before, after = row.frame
    pieces = (text if marker in text else f"{before}{marker}{after}" * len(items) + text).split(marker)
    if len(pieces) - 1 != len(items):
        raise UsageError(
            f"the prompt has {len(pieces) - 1} markers {marker} for {len(items)} {kind}s",
            hint=f"write {marker} once where each {kind} is to stand, or use the chat template",
        )
    written = _called(
        lambda: [row.write(MediaItem(i, features, extractor, settings, config, token)) for i in range(len(items))],
        f"{len(items)} {kind}s",
    )
    text = pieces[0] + "".join(new + piece for new, piece in zip(written, pieces[1:], strict=True))
    taken = {name: values for name, values in features.items() if name not in (*COUNTS, *row.spare)}
    return text, {name: _array(values, name) for name, values in taken.items()}


def _token(tokenizer: Any, row: Placeholder, folder: Path, name: str) -> str:
    """Returns a special token by its name; nothing for an empty name."""
    token = (getattr(tokenizer, name, None) or row.tokens[name]) if name else name
    if name and not token:
        raise ConfigError(f"the tokenizer in {folder} has no {name}", hint="copy the tokenizer's files into it again")
    return str(token)


def load_processor(folder: Path, kind: str) -> Any:
    """Returns the image processor or the feature extractor of sounds in a folder, loaded by transformers without remote
    code.

    Raises:
        UsageError: the folder has none, or a package is missing.
        ConfigError: it cannot be loaded.
    """
    what = "image processor" if kind == IMAGE else "feature extractor"
    if not any((folder / name).exists() for name in FILES):
        raise UsageError(f"{folder} has no {what}", hint=f"copy {FILES[0]} of the release into it")
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "transformers is not installed, which has the processors", hint=install_command("hf")
        ) from None
    if kind == IMAGE:
        _pillow()
    try:  # a torchvision that does not fit to torch is found when transformers imports the class
        auto = transformers.AutoImageProcessor if kind == IMAGE else transformers.AutoFeatureExtractor
        return auto.from_pretrained(folder, trust_remote_code=False)
    except Exception as e:  # of any type
        raise _unloadable(folder, what, e) from e


def _unloadable(folder: Path, what: str, error: Exception) -> TpuconvError:
    """Returns the error to raise for a processor that could not be loaded."""
    if find_spec("torchvision"):
        try:
            import torchvision  # noqa: F401
        except Exception as e:  # an operator is missing: RuntimeError
            return UsageError(
                f"torchvision cannot be imported, so that transformers loads no {what}: {root_cause(e)}",
                hint="install the torchvision that was built for the installed torch, or uninstall it: most image "
                "processors run without",
            )
    elif "torchvision" in str(error):
        return UsageError(
            f"the {what} in {folder} needs torchvision, which is not installed",
            hint="pip install torchvision, from the index that torch came from",
        )
    return ConfigError(
        f"the {what} in {folder} cannot be loaded: {type(error).__name__}: {root_cause(error)}",
        hint=f"copy {FILES[0]} of the release into the folder again",
    )


def _pillow() -> Any:
    """Returns Pillow's module `Image`.

    Raises:
        UsageError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("Pillow is not installed, which reads images", hint=install_command("hf")) from None
    return Image


def load_image(path: str | Path) -> Any:
    """Returns the image in a file, of any format that Pillow reads, in RGB and turned as its camera was held.

    Raises:
        UsageError: it cannot be read, or Pillow is not installed.
    """
    image = _pillow()
    from PIL import ImageOps

    try:
        with image.open(path) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as e:  # of any type: Pillow's decoders raise many
        raise UsageError(f"{path} cannot be read as an image: {root_cause(e)}", hint="give a PNG or JPEG file") from e


def load_sound(path: str | Path, rate: int) -> SoundArray:
    """Returns the sound in a file: the mean of its channels, from -1 to 1, at `rate` samples a second. scipy reads WAV
    files; other formats need the package soundfile.

    Raises:
        UsageError: it cannot be read.
    """
    from scipy.signal import resample_poly

    try:
        samples, given = (_of_wav if str(path).lower().endswith(".wav") else _of_soundfile)(path)
    except ImportError:
        raise UsageError(
            f"{path} is not a WAV file, and soundfile, which reads others, is not installed",
            hint="pip install soundfile, or convert the file to WAV",
        ) from None
    except Exception as e:  # of any type
        raise UsageError(f"{path} cannot be read as a sound: {root_cause(e)}", hint="give a WAV file") from e
    if not len(samples):
        raise UsageError(f"{path} is a sound without samples", hint="give a file with sound")
    if samples.ndim == 2:
        samples = samples.mean(axis=1, dtype=np.float32)
    if given != rate:
        divisor = gcd(given, rate)
        samples = resample_poly(samples, rate // divisor, given // divisor)
    return np.asarray(samples, np.float32)


def _of_wav(path: str | Path) -> tuple[NDArray[Any], int]:
    from scipy.io import wavfile

    with warnings.catch_warnings():  # of what is in the file beside the samples
        warnings.simplefilter("ignore", wavfile.WavFileWarning)
        rate, samples = wavfile.read(path)
    if samples.dtype.kind == "f":
        return samples.astype(np.float32), rate
    zero = 128 if samples.dtype == np.uint8 else 0  # 8 bits have no sign
    return (samples.astype(np.float32) - zero) / np.float32(2.0 ** (8 * samples.dtype.itemsize - 1)), rate


def _of_soundfile(path: str | Path) -> tuple[NDArray[Any], int]:
    import soundfile

    samples, rate = soundfile.read(path, dtype="float32")
    return samples, rate


def _of_images(processor: Any, row: Placeholder, images: Sequence[Any]) -> dict[str, Any]:
    given = [list(images)] if row.nested else list(images)
    return _called(lambda: dict(processor(given, **row.call)), f"{len(images)} images")


def _of_sounds(extractor: Any, row: Placeholder, sounds: Sequence[SoundArray]) -> dict[str, Any]:
    def call(given: Sequence[SoundArray]) -> dict[str, Any]:
        rate = extractor.sampling_rate
        return _called(lambda: dict(extractor(list(given), sampling_rate=rate, **row.call)), f"{len(given)} sounds")

    if row.windows:
        length = int(extractor.sampling_rate * extractor.chunk_length)
        pieces = [[sound[i : i + length] for i in range(0, max(1, len(sound)), length)] for sound in sounds]
        return call([piece for each in pieces for piece in each]) | {PIECES: [len(each) for each in pieces]}
    if row.frames is None:
        return call(sounds)
    each = [np.asarray(call([sound])["input_features"])[0] for sound in sounds]  # [mel, frames]
    cut = [x.reshape(len(x), -1, row.frames).swapaxes(0, 1) for x in each]
    return {"input_features": np.concatenate(cut), PIECES: [len(x) for x in cut]}


def _called(run: Callable[[], T], what: str) -> T:
    """Returns what a function returns that prepares images or sounds.

    Raises:
        ConfigError: it raises an error, such as for settings that do not fit.
    """
    try:
        return run()
    except TpuconvError:
        raise
    except Exception as e:  # of any type
        raise ConfigError(
            f"the checkpoint's processor cannot prepare {what}: {type(e).__name__}: {root_cause(e)}",
            hint="compare its settings with the release's",
        ) from e


def _array(values: Any, name: str) -> NDArray[Any]:
    """Returns a feature as an array, of an array or tensor or a list of either.

    Raises:
        UsageError: images have different shapes, which the model does not take together.
    """
    # numpy has no bfloat16, in which the processor of Llama 4 returns pixels
    parts = [np.asarray(x.float() if str(getattr(x, "dtype", "")) == "torch.bfloat16" else x) for x in values]
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise UsageError(f"the images have different shapes as {name}: {shapes}", hint="give images of one size")
    return np.stack(parts)
