"""Features of images and sounds: runs the image processor or feature extractor that came with a checkpoint, and writes
placeholders into the prompt. transformers is imported when it is needed; without torchvision most image processors run,
but not all."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpuconv.errors import ConfigError, TpuconvError, UsageError, root_cause
from tpuconv.extras import install_command
from tpuconv.jsonfile import check
from tpuconv.models.media_files import SAMPLING_RATES, SoundArray, image_of, name_of, pillow, sound_of
from tpuconv.models.media_texts import PIECES, MediaItem
from tpuconv.models.placeholders import IMAGE, PROCESSOR_KEYS, SOUND, Placeholder, placeholder_of
from tpuconv.models.tokenizer import types_of_others
from tpuconv.models.whole_processor import WholeProcessor, load_whole_processor
from tpuconv.sources.config import read_json
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.text import format_count

Features = dict[str, NDArray[Any]]
FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that have the settings of an image processor or feature extractor; the second has the settings of both."""

COPY = f"copy {' and '.join(FILES)} of the release into the folder again, as far as it has them"

COUNTS = ("num_crops", "num_patches", "num_soft_tokens_per_image", "rows", "cols", "aspect_ratios", PIECES)
"""Features that image processors return for the prompt alone, and no model takes."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with images and sounds, as a model takes it.

    Attributes:
        text: with placeholders, to be encoded as any other.
        features: what the model takes beside it, by the names that transformers gives it.
        begun: whether the token that begins a text is in it.
        ids: its token ids; None if they are still to be made of the text.
    """

    text: str
    features: Features
    begun: bool = False
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Preparer:
    """Prepares the images and sounds of prompts by the processor of a release. config.json is read once.

    Attributes:
        folder: a local folder with config.json and the settings of the processor.
        tokenizer: names the special tokens; see `load_tokenizer`.
    """

    folder: Path
    tokenizer: Any

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json of the folder."""
        return read_json(self.folder / CONFIG_FILE, ConfigError)

    def prepared(
        self, text: str, images: Sequence[Any] = (), sounds: Sequence[Any] = (), *, begins: bool = True
    ) -> PreparedPrompt:
        """Returns a prompt with its images and sounds, as the processor of the release prepares it.

        Args:
            text: with a marker for each image and sound, such as a chat template writes; without any they stand before
                it.
            images, sounds: see `image_of` and `sound_of` of `tpuconv.models.media_files`.
            begins: whether token ids, if they are returned, begin with the token that begins a text.

        Raises:
            UsageError: markers and images do not match, an image or sound cannot be read or prepared, a package or file
                of the processor is missing, or how the model writes placeholders is not known.
            ConfigError: the processor cannot be loaded, or prepares no image or sound at all.
        """
        media = {kind: items for kind, items in ((IMAGE, images), (SOUND, sounds)) if items}
        if any(placeholder_of(self.config, kind) is None for kind in media):
            return self._wholly_prepared(text, media, begins)
        prompt = PreparedPrompt(text, {})
        for kind, items in media.items():
            found = self._written(prompt.text, kind, items)
            prompt = PreparedPrompt(found.text, prompt.features | found.features, prompt.begun or found.begun)
        return prompt

    def marker_of(self, kind: str) -> tuple[str, str]:
        """Returns the marker of an image or a sound in a prompt, and the marker with what chat templates write around
        it.

        Raises:
            UsageError: how the model writes placeholders is not known.
            ConfigError: the tokenizer lacks the marker.
        """
        row = placeholder_of(self.config, kind)
        if row is None:
            return (self.whole.marker_of(kind),) * 2
        marker = self._token(row, row.marker)
        return marker, marker.join(row.frame)

    def with_markers(self, text: str, kind: str) -> str:
        """Returns a prompt with the model's marker in place of numbered ones, such as `<|image_1|>`, if its release has
        these; raises what `marker_of` does."""
        row, (marker, _) = placeholder_of(self.config, kind), self.marker_of(kind)
        return re.sub(row.numbered, lambda _: marker, text) if row and row.numbered else text

    def find_marker(self, kind: str, text: str) -> str:
        """Returns the first marker of an image or a sound that a prompt has; "" if it has none, or none is known."""
        row = placeholder_of(self.config, kind)
        if row is None:
            return ""
        if row.numbered and (found := re.search(row.numbered, text)):
            return found[0]
        marker = self._special(row, row.marker)
        return marker if marker in text else ""

    def _loaded(self, kind: str) -> tuple[Any, dict[str, Any]]:
        """Returns the image processor or feature extractor, loaded once, and the settings of both. From then on the
        folder may be gone."""
        if kind not in self._processors:
            extractor = load_processor(self.folder, kind, self._row(kind))
            together = self.folder / FILES[1]
            settings = read_json(together, ConfigError) if together.exists() else {}
            check(settings, PROCESSOR_KEYS, str(together), ConfigError)
            self._processors[kind] = extractor, settings
        return self._processors[kind]

    @cached_property
    def _processors(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        return {}

    @cached_property
    def whole(self) -> WholeProcessor:
        """The processor of the release that writes placeholders too.

        Raises:
            UsageError: transformers has none for the model, or a package is missing.
            ConfigError: it cannot be loaded.
        """
        with _loading(self.folder, "processor"):
            found = load_whole_processor(self.folder)
        if found is None:
            raise UsageError(
                f"transformers has no processor for {self.config.get('model_type')}",
                hint="prepare ids and features with the processor of the release, and give both to the model",
            )
        return found

    def _row(self, kind: str) -> Placeholder:
        """Returns how the model writes an image or a sound, which is known."""
        row = placeholder_of(self.config, kind)
        assert row is not None
        return row

    def _wholly_prepared(self, text: str, media: Mapping[str, Sequence[Any]], begins: bool) -> PreparedPrompt:
        """Returns a prompt as the whole processor of the release prepares it."""
        given: dict[str, list[Any]] = {}
        for kind, items in media.items():
            names = [name_of(item, kind, i) for i, item in enumerate(items)]
            if kind == IMAGE:
                given[kind] = [image_of(*each) for each in zip(items, names, strict=True)]
            else:
                rate = _checked_rate(self.whole.sampling_rate, self.folder)
                given[kind] = [sound_of(*each, rate) for each in zip(items, names, strict=True)]
            marker, _ = self.marker_of(kind)
            text = marker.join(_around_markers(text, marker, marker, kind, len(items))) if marker else text
        ids, returned = self.whole.prepared(text, given, begins=begins)
        return PreparedPrompt(text, {name: _array(values, name) for name, values in returned.items()}, ids=ids)

    def _token(self, row: Placeholder, name: str) -> str:
        """Returns a special token by its name; nothing for an empty name."""
        token = self._special(row, name) if name else name
        if name and not token:
            raise ConfigError(
                f"the tokenizer in {self.folder} has no {name}", hint="copy the tokenizer's files into it again"
            )
        return token

    def _special(self, row: Placeholder, name: str) -> str:
        """Returns a special token by its name; "" if neither tokenizer nor table has it."""
        return str(getattr(self.tokenizer, name, None) or row.tokens[name])

    def _written(self, text: str, kind: str, items: Sequence[Any]) -> PreparedPrompt:
        """Returns the text with placeholders instead of the markers of one kind, and the features."""
        config, row = self.config, self._row(kind)
        extractor, settings = self._loaded(kind)
        token = partial(self._token, row)
        names = [name_of(item, kind, i) for i, item in enumerate(items)]
        if kind == IMAGE:
            images = [image_of(*each) for each in zip(items, names, strict=True)]
            call = dict(row.call)
            if row.patch:
                call["patch_size"] = row.patch(MediaItem(0, {}, extractor, settings, config, token))
            returned = _of_images(partial(extractor, **call), row, images, names)
        else:
            rate = _checked_rate(getattr(extractor, "sampling_rate", None), self.folder)
            given = [sound_of(*each, rate) for each in zip(items, names, strict=True)]
            _check_lengths(extractor, row, given, names)
            returned = _of_sounds(extractor, row, given, names)
        features = {row.renamed.get(name, name): values for name, values in returned.items()}
        marker, framed = self.marker_of(kind)
        pieces = _around_markers(text, marker, framed, kind, len(items))
        try:
            written = [row.write(MediaItem(i, features, extractor, settings, config, token)) for i in range(len(items))]
        except TpuconvError:
            raise
        except Exception as e:  # of any type: settings that do not fit
            raise ConfigError(
                f"the placeholders of {format_count(len(items), kind)} cannot be written: "
                f"{type(e).__name__}: {root_cause(e)}",
                hint=COPY,
            ) from e
        if row.begin and not (row.leading and token(row.begin) in text):
            last = len(pieces) - 1
            place = next((i for i, piece in enumerate(pieces) if piece), last) if row.leading else last
            pieces[place] = token(row.begin) + pieces[place]
            pieces[-1] += row.end
        text = pieces[0] + "".join(new + piece for new, piece in zip(written, pieces[1:], strict=True))
        taken = {name: values for name, values in features.items() if name not in (*COUNTS, *row.spare)}
        return PreparedPrompt(text, {name: _array(values, name) for name, values in taken.items()}, bool(row.begin))


def _around_markers(text: str, marker: str, framed: str, kind: str, count: int) -> list[str]:
    """Returns the pieces of a prompt around its markers, which stand before it if it has none.

    Raises:
        UsageError: it has another number of them.
    """
    pieces = (text if marker in text else framed * count + text).split(marker)
    if len(pieces) - 1 != count:
        raise UsageError(
            f"the prompt has {format_count(len(pieces) - 1, 'marker')} {marker} for {format_count(count, kind)}",
            hint=f"write {marker} once where each {kind} is to stand; without any they stand before the text",
        )
    return pieces


def _checked_rate(rate: Any, folder: Path) -> int:
    """Returns the samples of a sound in a second, as the settings in a folder have them. Raises ConfigError if no sound
    has so many."""
    if not isinstance(rate, int) or rate not in SAMPLING_RATES:
        raise ConfigError(f"the feature extractor in {folder} has the sampling_rate {rate}", hint=COPY)
    return rate


@contextmanager
def _loading(folder: Path, what: str) -> Iterator[None]:
    """Raises errors of transformers, while it loads a processor in a folder, as what is to be done about them."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UsageError(
            "transformers is not installed, which has the processors", hint=install_command("hf")
        ) from None
    if what != "feature extractor":
        pillow()
    try:  # a torchvision that does not fit to torch is found when transformers imports the class
        yield
    except Exception as e:  # of any type
        raise _unloadable(folder, what, e) from e


def load_processor(folder: Path, kind: str, row: Placeholder) -> Any:
    """Returns the image processor or the feature extractor of sounds in a folder, loaded by transformers without remote
    code. `row` names its class where transformers would not find it.

    Raises:
        UsageError: the folder has none, or a package is missing.
        ConfigError: it cannot be loaded.
    """
    what = "image processor" if kind == IMAGE else "feature extractor"
    if not any((folder / name).exists() for name in FILES):
        raise UsageError(f"{folder} has no {what}", hint=f"copy {FILES[0]} of the release into it")
    with _loading(folder, what):
        import transformers

        auto = "AutoImageProcessor" if kind == IMAGE else "AutoFeatureExtractor"
        named = getattr(transformers, row.processor or auto)
        if row.has_settings and not (folder / FILES[0]).exists():
            return named()
        with types_of_others():
            return named.from_pretrained(folder, trust_remote_code=False)


def _unloadable(folder: Path, what: str, error: Exception) -> TpuconvError:
    """Returns the error to raise for a processor that could not be loaded."""
    for package in ("torchvision", "torchaudio"):
        if find_spec(package) is None:
            if package in str(error).lower():
                return UsageError(
                    f"the {what} in {folder} needs {package}, which is not installed",
                    hint=f"pip install {package}, from the index that torch came from",
                )
            continue
        try:
            import_module(package)
        except Exception as e:  # an operator is missing: RuntimeError
            return UsageError(
                f"{package} cannot be imported, so that transformers loads no {what}: {root_cause(e)}",
                hint=f"install the {package} that was built for the installed torch, or uninstall it: most processors "
                "run without",
            )
    return ConfigError(
        f"the {what} in {folder} cannot be loaded: {type(error).__name__}: {root_cause(error)[:300]}",
        hint=COPY,
    )


def _of_images(processor: Any, row: Placeholder, images: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    def call(given: Sequence[Any]) -> dict[str, Any]:
        return dict(processor([list(given)] if row.nested else list(given)))

    return _called(call, images, names, pillow().new("RGB", (256, 256)))


def _check_lengths(extractor: Any, row: Placeholder, sounds: Sequence[SoundArray], names: Sequence[str]) -> None:
    """Raises UsageError for a sound of which the feature extractor would leave out the end."""
    call = {name: each.default for name, each in signature(extractor.__call__).parameters.items()} | dict(row.call)
    most = call.get("max_length") or getattr(extractor, "n_samples", None)
    if row.windows or most is None or call.get("truncation") is not True:
        return
    for sound, name in zip(sounds, names, strict=True):
        if len(sound) > most:
            seconds, longest = (samples / extractor.sampling_rate for samples in (len(sound), most))
            raise UsageError(
                f"{name} has {seconds:.1f} seconds, and the model hears {longest:g} of a sound",
                hint="cut the sound into parts, and give one of them",
            )


def _of_sounds(extractor: Any, row: Placeholder, sounds: Sequence[SoundArray], names: Sequence[str]) -> dict[str, Any]:
    rate = extractor.sampling_rate

    def call(given: Sequence[SoundArray]) -> dict[str, Any]:
        return dict(extractor(list(given), sampling_rate=rate, **row.call))

    def call_in_pieces(given: Sequence[SoundArray]) -> dict[str, Any]:
        if row.windows:
            length = int(rate * extractor.chunk_length)
            pieces = [[sound[i : i + length] for i in range(0, max(1, len(sound)), length)] for sound in given]
            return call([piece for each in pieces for piece in each]) | {PIECES: [len(each) for each in pieces]}
        if row.frames is None:
            return call(given)
        each = [np.asarray(call([sound])["input_features"])[0] for sound in given]  # [mel, frames]
        cut = [x.reshape(len(x), -1, row.frames).swapaxes(0, 1) for x in each]
        return {"input_features": np.concatenate(cut), PIECES: [len(x) for x in cut]}

    return _called(call_in_pieces, sounds, names, np.sin(np.arange(rate, dtype=np.float32)))


def _called(
    call: Callable[[Sequence[Any]], dict[str, Any]], items: Sequence[Any], names: Sequence[str], usual: Any
) -> dict[str, Any]:
    """Returns what a processor returns for images or sounds.

    Raises:
        UsageError: it raises an error for them, but not for a usual one.
        ConfigError: it does for a usual one, such as for settings that do not fit.
    """

    def error_of(some: Sequence[Any]) -> Exception | None:
        try:
            call(some)
        except Exception as e:  # of any type
            return e
        return None

    try:
        return call(items)
    except Exception as e:  # of any type
        if unusable := error_of([usual]):
            raise ConfigError(
                f"the checkpoint's processor cannot prepare {', '.join(names)}, nor any other: "
                f"{type(unusable).__name__}: {root_cause(unusable)}",
                hint=COPY,
            ) from e
        name, error = next(
            ((name, found) for item, name in zip(items, names, strict=True) if (found := error_of([item]))),
            (f"{', '.join(names)} together", e),
        )
        raise UsageError(
            f"the checkpoint's processor cannot prepare {name}: {type(error).__name__}: {root_cause(error)}",
            hint="give another one, or of another size or length",
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
