"""Text generation: a model with its tokenizer."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike

from tpuconv.arguments import given_as
from tpuconv.errors import UsageError
from tpuconv.models.chats import chat_about, chat_text, has_template
from tpuconv.models.common.beside import VIDEO
from tpuconv.models.common.config import DecoderConfig, context_of
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.denoise import Denoiser, Denoising, SeeingDenoiser, writes_canvases
from tpuconv.models.drafts import generator_of
from tpuconv.models.generate import ENDED, Sampling, check_work
from tpuconv.models.media_files import listed
from tpuconv.models.placeholders import IMAGE, PART_OF_KIND, SOUND
from tpuconv.models.seeing import SeeingGenerator
from tpuconv.models.speculate import Speculator
from tpuconv.models.tokenizer import check_ids
from tpuconv.text import format_count

if TYPE_CHECKING:
    from tpuconv.models.pictures import Preparer

ARTICLES = {IMAGE: "an image", SOUND: "a sound", VIDEO: "a video"}
INCOMPLETE = "\ufffd"
"""The character that a tokenizer decodes an incomplete UTF-8 sequence to."""


@dataclass(frozen=True)
class Completion:
    """The completion of one prompt.

    Attributes:
        prompt: the prompt.
        text: the generated text, without the stop string.
        ids: the generated token ids, the last one included.
        stopped: why it ended: "eos" (an end token), "stop" (a stop string) or "length" (`max_new_tokens`).
    """

    prompt: str
    text: str
    ids: tuple[int, ...]
    stopped: str

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"prompt": self.prompt, "text": self.text, "ids": list(self.ids), "stopped": self.stopped}


@dataclass(frozen=True)
class PromptEncoder:
    """Makes token ids of prompts, and tells what is wrong with them. It needs no weights.

    Attributes:
        tokenizer: a tokenizer from `tpuconv.models.tokenizer.load_tokenizer`.
        context: how many tokens a sequence of the model may have.
        folder: makes the local folder with the files of the processors of images and sounds; None of a model that has
            the text alone.
        parts: what the model has beside its text model: "vision", "audio".
        rows: of the embedding; None if they are not known.
        placeholders: by part the id of the token in whose place features of images or sounds stand.
        has_canvases: whether the model writes canvases, of random tokens.
    """

    tokenizer: Any
    context: int
    folder: Callable[[], Path] | None = None
    parts: Collection[str] = ()
    rows: int | None = None
    placeholders: Mapping[str, int] = field(default_factory=dict)
    has_canvases: bool = False

    @cached_property
    def preparer(self) -> "Preparer | None":
        """Prepares images and sounds; None of a model that has the text alone."""
        from tpuconv.models.pictures import Preparer

        return None if self.folder is None else Preparer(self.folder(), self.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return has_template(self.tokenizer)

    def encode(self, prompts: Sequence[str], *, chat: bool = False, system: str | None = None) -> list[list[int]]:
        """Returns the token ids of each prompt.

        Args:
            prompts: a list of texts.
            chat: format each prompt as the user's message of a conversation, with the tokenizer's chat template.
            system: with `chat`, the system message of each conversation.

        Raises:
            UsageError: the tokenizer has no chat template, the template fails, or `system` is given without `chat`; or
                `prompts` is a single text, whose characters would each be a prompt; or one has a marker or placeholder
                of an image or a sound; or see `check_ids`.
        """
        if isinstance(prompts, str):
            raise UsageError("the prompts are a single text", hint="give a list: [prompt]")
        if not chat:
            if system is not None:
                raise UsageError("a system prompt needs a chat template", hint="add `chat=True`")
            texts: Sequence[str] = prompts
        else:
            texts = [chat_text(self.tokenizer, prompt, system) for prompt in prompts]
        # Not verbose: transformers would warn of long texts, which `check_lengths` refuses.
        ids = [list(self.tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]) for text in texts]
        for text, text_ids in zip(texts, ids, strict=True):
            self._check_media(text, text_ids, {})
        if self.rows is not None:
            check_ids(self.tokenizer, ids, self.rows)
        return ids

    def _check_media(self, text: str, ids: Sequence[int], given: Mapping[str, str]) -> None:
        """Checks that a prompt has no marker of an image or sound that is not given, and no placeholder. The model
        would run it as text, or find out when the weights are read.

        Args:
            text: of the prompt, without the markers of what is given.
            ids: its token ids.
            given: the markers of the kinds that are given.

        Raises:
            UsageError: it has one.
        """
        for part, placeholder in self.placeholders.items():
            kind = next((kind for kind, each in PART_OF_KIND.items() if each == part), part)
            token = ""
            if self.preparer is not None and kind not in given:
                token = self.preparer.find_marker(kind, text)
            if not token and placeholder in ids:
                token = str(self.tokenizer.decode([placeholder]))
            if not token:
                continue
            if kind in given:
                raise UsageError(
                    f"the prompt has {token}, a placeholder of one feature of {ARTICLES[kind]}",
                    hint=f"leave it out, or write {given[kind]}, which stands for the whole {kind}",
                )
            raise UsageError(
                f"the prompt has {token}, which stands for {ARTICLES[kind]}, and no {kind} is given",
                hint=f"leave {token} out"
                if part == VIDEO
                else f"give `{kind}s=[FILE]`, or leave {token} out of the prompt",
            )

    def encode_with(
        self,
        prompt: str,
        images: Sequence[Any] = (),
        sounds: Sequence[Any] = (),
        *,
        chat: bool = False,
        system: str | None = None,
    ) -> tuple[list[int], Mapping[str, np.ndarray]]:
        """Returns the token ids of a prompt with images and sounds, and their features as `Decoder.see` takes them.

        Args:
            prompt: the text. It may have a marker of the model where each image or sound is to stand, such as
                "<start_of_image>"; without any they stand before the text.
            images: a list of files, or of images of Pillow.
            sounds: a list of files, or of samples from -1 to 1 at the rate of the model.
            chat, system: as of `encode`.

        Raises:
            UsageError: the checkpoint has no part that sees or hears, the chat template leaves images or sounds out, or
                see `encode` and `tpuconv.models.pictures.Preparer`.
        """
        media = {IMAGE: listed(images, IMAGE), SOUND: listed(sounds, SOUND)}
        for kind, items in media.items():
            if items and (self.folder is None or PART_OF_KIND[kind] not in self.parts):
                raise UsageError(
                    f"this checkpoint has no part that {'sees images' if kind == IMAGE else 'hears sounds'}",
                    hint=f"leave the {kind}s out; or, if the model has such a part, convert it whole, without "
                    "`text_only=`",
                )
        if self.preparer is None or not any(media.values()):
            return self.encode([prompt], chat=chat, system=system)[0], {}
        for kind in (kind for kind, items in media.items() if items):
            prompt = self.preparer.with_markers(prompt, kind)
        if chat:
            prompt = chat_about(self.preparer, prompt, media, system)
        text = prompt
        given = {kind: self.preparer.marker_of(kind)[0] for kind, items in media.items() if items}
        for marker in given.values():
            text = text.replace(marker, "")
        ids = self.tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
        self._check_media(text, ids, given)
        if self.rows is not None:  # placeholders alone may be outside of the embedding
            check_ids(self.tokenizer, [ids], self.rows)
        found = self.preparer.prepared(prompt, *media.values(), begins=not chat)
        if found.ids is not None:
            return list(found.ids), found.features
        begun = chat or found.begun
        ids = self.tokenizer(found.text, add_special_tokens=not begun, verbose=False)["input_ids"]
        return list(ids), found.features

    def check_lengths(self, ids: Sequence[Sequence[int]], max_new_tokens: int, width: int = 0) -> None:
        """Checks the token ids of prompts, which may be padded to `width`.

        Raises:
            UsageError: there is no prompt, or one has no tokens, or prompt and new tokens exceed the context.
        """
        check_work(ids, max_new_tokens)
        longest = max(width, *map(len, ids))
        if longest + max_new_tokens > self.context:
            raise UsageError(
                f"a prompt of {format_count(longest, 'token')} and {max_new_tokens} new ones are "
                f"{longest + max_new_tokens}, and the model has {self.context} positions",
                hint="ask for fewer new tokens, or give a shorter prompt, or fewer or smaller images and sounds",
            )


def prompt_encoder(
    tokenizer: Any, config: DecoderConfig, folder: Callable[[], Path] | None, parts: Collection[str]
) -> PromptEncoder:
    """Returns the encoder of prompts for the model of a config; other arguments are as of `PromptEncoder`."""
    rows = config.sizes["V"] + config.sizes.get("added_vocab", 0)
    placeholders = {part: each.placeholder for part, each in config.parts.items()}
    return PromptEncoder(tokenizer, context_of(config), folder, parts, rows, placeholders, writes_canvases(config))


class TextGenerator:
    """Generates text with a model, for several prompts at once.

        model = tpuconv.load("Qwen3-8B-orbax")
        tokenizer = load_tokenizer(Path("Qwen3-8B-orbax"))
        write = TextGenerator(model, tokenizer, end_tokens(Path("Qwen3-8B-orbax"), tokenizer))
        write(["What is a TPU?"], max_new_tokens=64, chat=True)[0].text

    Args:
        model: a model from `tpuconv.load`.
        tokenizer: a tokenizer from `tpuconv.models.tokenizer.load_tokenizer`.
        ends: ids of the tokens that end a text, from `tpuconv.models.tokenizer.end_tokens`.
        sampling: how the next token is chosen, by default the most likely one; or how a canvas is denoised.
        cache_dtype: of keys and values; None for the model's dtype.
        speculate: draft tokens with the model's module for multi-token prediction; see `Speculator`.
        draft: a draft of the model from `tpuconv.load`, which drafts tokens instead; see `DraftSpeculator`.
        folder, parts: as of `PromptEncoder`.

    Raises:
        UsageError: tokens are drafted with a temperature, with a model without that module, or by a draft of another
            model.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        ends: Collection[int] = (),
        sampling: Sampling | Denoising = Sampling(),  # noqa: B008  (frozen)
        cache_dtype: DTypeLike | None = None,
        *,
        speculate: bool = False,
        draft: Any = None,
        folder: Callable[[], Path] | None = None,
        parts: Collection[str] = (),
    ):
        self.generator = generator_of(model, sampling, cache_dtype, speculate=speculate, draft=draft)
        self._options = model, sampling, cache_dtype
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self.encoder = prompt_encoder(tokenizer, model.config, folder, parts)

    @cached_property
    def seeing(self) -> SeeingGenerator:
        """The generator of prompts with images and sounds. Drafts are for text alone."""
        kind: Any = SeeingDenoiser if isinstance(self.generator, Denoiser) else SeeingGenerator
        seeing: SeeingGenerator = kind(*self._options)
        return seeing

    @property
    def accepted_share(self) -> float | None:
        """The share of all drafts so far that were accepted; None if none was checked."""
        drafts = self.generator.drafts if isinstance(self.generator, Speculator) else None
        return drafts.share if drafts and drafts.checked else None

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self.encoder.has_chat_template

    def encode(self, prompts: Sequence[str], *, chat: bool = False, system: str | None = None) -> list[list[int]]:
        """Returns the token ids of each prompt; see `PromptEncoder.encode`."""
        return self.encoder.encode(prompts, chat=chat, system=system)

    def stream(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 128,
        *,
        chat: bool = False,
        system: str | None = None,
        stop: Collection[str] = (),
        seed: int = 0,
        images: Sequence[Any] = (),
        sounds: Sequence[Any] = (),
    ) -> Iterator[tuple[list[str], list[Completion]]]:
        """Generates text. Yields, after each token, the new text of each prompt and all completions so far. Text that
        may be the beginning of a stop string, or that ends in an incomplete character, is held back. The completions
        that are yielded last are the results.

        Args:
            prompts, chat, system: see `encode`.
            max_new_tokens: stop after this number of tokens.
            stop: strings that end a text; they may have special tokens, such as "<|im_end|>".
            seed: for sampling.
            images, sounds: of a single prompt; see `PromptEncoder.encode_with`.

        Raises:
            UsageError: see `encode`; or an argument is of another type, a prompt has no tokens, or prompt and new
                tokens exceed the model's context.
        """
        if not isinstance(prompts, str):
            prompts = given_as("prompts", prompts, Sequence[str])
        stop, max_new_tokens = given_as("stop", stop, Sequence[str]), given_as("max_new_tokens", max_new_tokens, int)
        if not listed(images, IMAGE) and not listed(sounds, SOUND):
            ids = self.encode(prompts, chat=chat, system=system)
            yield from self.stream_ids(prompts, ids, max_new_tokens, stop=stop, seed=seed)
            return
        if len(prompts) != 1:
            raise UsageError("images and sounds go with one prompt", hint="give one prompt at a time")
        prompt_ids, features = self.encoder.encode_with(prompts[0], images, sounds, chat=chat, system=system)
        yield from self.stream_ids(prompts, [prompt_ids], max_new_tokens, stop=stop, seed=seed, features=features)

    def stream_ids(
        self,
        prompts: Sequence[str],
        ids: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop: Collection[str] = (),
        seed: int = 0,
        width: int = 0,
        features: Mapping[str, np.ndarray] | None = None,
    ) -> Iterator[tuple[list[str], list[Completion]]]:
        """As `stream`, for prompts whose token ids are `ids`. `width` is as of `Generator`, `features` as of
        `SeeingGenerator`."""
        self.encoder.check_lengths(ids, max_new_tokens, width)
        texts = [_Text(self.tokenizer, prompt_ids, self.ends, stop) for prompt_ids in ids]
        generate = self.generator if features is None else partial(self.seeing, features=features)
        for step, ids_B in enumerate(generate(ids, max_new_tokens, eos=self.ends, seed=seed, width=width)):
            is_last = step + 1 == max_new_tokens
            new = [text.add(int(token), is_last) for text, token in zip(texts, ids_B, strict=True)]
            yield new, [text.completion(prompt) for text, prompt in zip(texts, prompts, strict=True)]
            if all(text.stopped for text in texts):
                return

    def __call__(self, prompts: Sequence[str], max_new_tokens: int = 128, **options: Any) -> list[Completion]:
        """Returns the completions of all prompts. Arguments and errors as in `stream`."""
        out: list[Completion] = []
        for _, completions in self.stream(prompts, max_new_tokens, **options):
            out = completions
        return out


class _Text:
    """The text that is generated for one prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], ends: Collection[int], stop: Collection[str]):
        self.tokenizer, self.prompt, self.ends = tokenizer, list(prompt), ends
        self.stop = [text for text in stop if text]
        self.ids: list[int] = []
        # Decoding the new ids alone may lose a leading space. So all ids are decoded, and the prompt's text is removed.
        self.before, self.before_with_special = (len(self._decoded(self.prompt, special)) for special in (False, True))
        self.text, self.shown, self.stopped = "", 0, ""

    def add(self, token: int, is_last: bool) -> str:
        """Adds a token. Returns the text that can be shown now."""
        if self.stopped or token == ENDED:
            return ""
        self.ids.append(token)
        self.text = self._new_text(len(self.ids))
        if (before := self._before_stop()) is not None:
            self.text, self.stopped = before, "stop"
        elif token in self.ends:
            self.stopped = "eos"
        elif is_last:
            self.stopped = "length"
        ready = self.text if self.stopped else self.text[: len(self.text) - self._held_back()]
        new = ready[self.shown :]
        self.shown = max(self.shown, len(ready))
        return new

    def _before_stop(self) -> str | None:
        """Returns the text before the first stop string; None if there is none. A stop string may have special tokens,
        which the text has not."""
        if (at := self._first_stop(self.text)) is not None:
            return self.text[:at]
        if not self.stop or (whole := self._new_text(len(self.ids), special=True)) == self.text:
            return None
        if (at := self._first_stop(whole)) is None:
            return None
        # The tokens that end before the stop string; where it begins within a token of text, that one's beginning too.
        count = next(n for n in range(len(self.ids), -1, -1) if len(self._new_text(n, special=True)) <= at)
        text, begins = self._new_text(count), len(self._new_text(count, special=True))
        return text + (whole[begins:at] if self._new_text(count + 1) != text else "")

    def _first_stop(self, text: str) -> int | None:
        return min((at for stop in self.stop if (at := text.find(stop)) >= 0), default=None)

    def _held_back(self) -> int:
        """The number of characters at the end that may change: an incomplete character, or the beginning of a stop
        string."""
        if self.text.endswith(INCOMPLETE):
            return len(self.text) - self.shown
        ends = (n for text in self.stop for n in range(len(text) - 1, 0, -1) if self.text.endswith(text[:n]))
        return max(ends, default=0)

    def _new_text(self, count: int, *, special: bool = False) -> str:
        """The text of the first `count` generated ids, without special tokens or with them."""
        before = self.before_with_special if special else self.before
        return self._decoded(self.prompt + self.ids[:count], special)[before:]

    def _decoded(self, ids: Sequence[int], special: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=not special))

    def completion(self, prompt: str) -> Completion:
        """Returns the completion so far."""
        return Completion(prompt, self.text, tuple(self.ids), self.stopped or "length")
