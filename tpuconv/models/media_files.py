"""Images and sounds as users give them: files, images of Pillow, arrays of samples. Pillow, scipy and soundfile are
imported when they are needed."""

import warnings
from collections.abc import Sequence
from math import gcd
from os import SEEK_END
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tpuconv.errors import TpuconvError, UsageError, root_cause
from tpuconv.extras import install_command
from tpuconv.location import local_path

SoundArray = NDArray[np.float32]
WAV = (b"RIFF", b"RIFX", b"RF64")
"""How the files begin that scipy reads."""
STREAM = 0x7FFF0000
"""The least length that the header of a WAV file has if its writer could not know it, such as in a pipe."""
SAMPLING_RATES = range(1000, 1_000_001)
"""Samples a second of sounds. Others are of damaged headers, and would need any amount of memory to be resampled."""


def listed(items: Sequence[Any] | None, kind: str) -> Sequence[Any]:
    """Returns the images or sounds of a prompt.

    Raises:
        UsageError: they are no list: a path is one, of characters.
    """
    if items is None:
        return ()
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise UsageError(f"the {kind}s are of type {type(items).__name__}, not a list", hint=f"give a list: [{kind}]")
    return items


def name_of(item: Any, kind: str, index: int) -> str:
    """Returns how messages name an image or sound: by its file or its number."""
    return str(item) if isinstance(item, str | Path) else f"{kind} {index + 1}"


def image_of(item: Any, name: str) -> Any:
    """Returns an image as image processors take it: of a file, an image of Pillow, or an array.

    Raises:
        UsageError: it is something else, or cannot be read.
    """
    if isinstance(item, str | Path):
        return load_image(item)
    if isinstance(item, pillow().Image):
        _check_depth(item, name)
    elif not hasattr(item, "__array__"):
        raise UsageError(f"{name} is of type {type(item).__name__}", hint="give a file or an image of Pillow")
    elif not (array := np.asarray(item)).flags.writeable:
        return array.copy()  # torch warns of others
    return item


def pillow() -> Any:
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
    """Returns the image in a file, of any format that Pillow reads, in RGB and turned as its camera was held; the first
    one of several.

    Raises:
        UsageError: it cannot be read, or Pillow is not installed.
    """
    image = pillow()
    from PIL import ImageOps, UnidentifiedImageError

    path = local_path(path)
    try:
        with warnings.catch_warnings():  # of large images, and of palettes with transparency
            warnings.simplefilter("ignore")
            with image.open(path) as opened:
                _check_depth(opened, str(path))
                return ImageOps.exif_transpose(opened).convert("RGB")
    except TpuconvError:
        raise
    except image.DecompressionBombError as e:
        most = 2 * image.MAX_IMAGE_PIXELS
        raise UsageError(
            f"{path} has more than {most:,} pixels, the most that Pillow reads", hint="scale the image down"
        ) from e
    except Exception as e:  # of any type: Pillow's decoders raise many
        reason = "it has no format that Pillow knows" if isinstance(e, UnidentifiedImageError) else str(e)
        raise _unreadable(path, "an image", reason, e, "save the image again, as a PNG or JPEG file") from e


def _check_depth(image: Any, name: str) -> None:
    """Raises UsageError for an image with values of 16 or 32 bits. In RGB Pillow cuts them off at 255: white."""
    if image.mode[0] in "IF":
        raise UsageError(
            f"{name} has values of more than 8 bits (mode {image.mode} of Pillow), which would be cut off at 255",
            hint="save the image with 8 bits a channel",
        )


def _unreadable(path: Path, what: str, reason: str, error: Exception, hint: str) -> UsageError:
    """Returns the error to raise for a file that cannot be read."""
    if isinstance(error, OSError) and error.strerror:  # of the system, not of a decoder
        reason, hint = error.strerror, "check the path, and whether you may read it"
    return UsageError(f"{path} cannot be read as {what}: {reason or type(error).__name__}", hint=hint)


def sound_of(item: Any, name: str, rate: int) -> SoundArray:
    """Returns the samples of a sound: of a file, see `load_sound`, or of an array or list of them.

    Raises:
        UsageError: it is something else, or cannot be read.
    """
    if isinstance(item, str | Path):
        return load_sound(item, rate)
    try:
        samples = np.asarray(item)
    except Exception:  # of any type: a list of different things, a tensor on a device
        samples = np.asarray(None)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        is_array = samples.dtype != object
        what = f"an array {list(samples.shape)} of {samples.dtype}" if is_array else f"of type {type(item).__name__}"
        raise UsageError(
            f"{name} is no sound but {what}",
            hint=f"give a file, or floating-point samples from -1 to 1, {rate:,} a second",
        )
    return _checked(samples.astype(np.float32), name)


def load_sound(path: str | Path, rate: int) -> SoundArray:
    """Returns the sound in a file: the mean of its channels, from -1 to 1, at `rate` samples a second. scipy reads WAV
    files; other formats need the package soundfile.

    Raises:
        UsageError: it cannot be read.
    """
    from scipy.signal import resample_poly

    path = local_path(path)
    samples, given = _samples(path)
    if given not in SAMPLING_RATES:
        least, most = SAMPLING_RATES[0], SAMPLING_RATES[-1]
        raise UsageError(
            f"{path} has a sampling rate of {given:,}, and rates from {least:,} to {most:,} are read",
            hint="save the sound again: the file may be damaged",
        )
    _checked(samples, str(path))
    if samples.ndim == 2:
        samples = samples.mean(axis=1, dtype=np.float32)
    if given != rate:
        divisor = gcd(given, rate)
        samples = resample_poly(samples, rate // divisor, given // divisor)
    return np.asarray(samples, np.float32)


def _checked(samples: NDArray[Any], name: str) -> NDArray[Any]:
    """Returns samples. Raises UsageError if there are none, or numbers among them that are not finite."""
    if not samples.size:
        raise UsageError(f"{name} is a sound without samples", hint="give a file with sound")
    if not np.isfinite(samples).all():
        raise UsageError(
            f"{name} has samples that are infinite or no numbers", hint="save the sound again, with 16 bits a sample"
        )
    return samples


def _check_whole(file: IO[bytes]) -> None:
    """Raises ValueError for a WAV file that ends before the length in its header. Readers take what there is."""
    begin, size = file.read(8), file.seek(0, SEEK_END)
    file.seek(0)
    length = 8 + int.from_bytes(begin[4:], "big" if begin.startswith(b"RIFX") else "little")
    if size + 1 < length < STREAM:  # some writers count a last byte of padding that they leave out
        raise ValueError(f"it has {size:,} of {length:,} bytes: the end is missing")


def _samples(path: Path) -> tuple[NDArray[Any], int]:
    """Returns the samples in a file and how many there are a second. Its first bytes decide who reads it: names may be
    wrong."""
    error: Exception
    try:
        with path.open("rb") as file:
            is_wav = file.read(4) in WAV
            file.seek(0)
            if not is_wav:
                return _of_soundfile(file)
            _check_whole(file)
            try:
                return _of_wav(file)
            except Exception as e:  # of any type
                error = e
                file.seek(0)
                return _of_soundfile(file)  # it reads compressed samples in WAV files too
    except ImportError:
        if not is_wav:
            raise UsageError(
                f"{path} is not a WAV file, and soundfile, which reads others, is not installed",
                hint="pip install soundfile, or convert the file to WAV",
            ) from None
        hint = "save the sound again as a WAV file with 16 bits a sample, or pip install soundfile"
        raise _unreadable(path, "a sound", root_cause(error), error, hint) from error
    except Exception as e:  # of any type
        reason = root_cause(e).rpartition("'>: ")[2]  # soundfile begins with the file's object
        raise _unreadable(path, "a sound", reason, e, "save the sound again, as a WAV file") from e


def _of_wav(file: IO[bytes]) -> tuple[NDArray[Any], int]:
    from scipy.io import wavfile

    with warnings.catch_warnings():  # of what is in the file beside the samples
        warnings.simplefilter("ignore", wavfile.WavFileWarning)
        rate, samples = wavfile.read(file)
    if samples.dtype.kind == "f":
        return samples.astype(np.float32), rate
    zero = 128 if samples.dtype == np.uint8 else 0  # 8 bits have no sign
    return (samples.astype(np.float32) - zero) / np.float32(2.0 ** (8 * samples.dtype.itemsize - 1)), rate


def _of_soundfile(file: IO[bytes]) -> tuple[NDArray[Any], int]:
    import soundfile

    samples, rate = soundfile.read(file, dtype="float32")
    return samples, rate
