"""Text in, text out: a model with its tokenizer."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.config import context_of
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.generate import ENDED, Generator, Sampling

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to, as long as the others are missing."""


@dataclass(frozen=True)
class Completion:
    """What a model wrote after one prompt: `text`, and the token `ids` of it, the one that ended it included. `stopped`
    says why it ended: "eos" (a token that ends a text), "stop" (a stop string, which is not part of `text`) or
    "length" (`max_new_tokens`)."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    stopped: str

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "text": self.text, "ids": list(self.ids), "stopped": self.stopped}


class TextGenerator:
    """A model that continues texts, several at once.

        model = tpuconv.load("Qwen3-8B-orbax")
        tokenizer = load_tokenizer(Path("Qwen3-8B-orbax"))
        write = TextGenerator(model, tokenizer, end_tokens(Path("Qwen3-8B-orbax")))
        write(["What is a TPU?"], max_new_tokens=64, chat=True)[0].text

    Args:
        model: from `tpuconv.load`.
        tokenizer: from `tpuconv.models.tokenizer.load_tokenizer`.
        ends: token ids that end a text, as `tpuconv.models.tokenizer.end_tokens` reads them.
        sampling: how a token is chosen; the most likely one by default.
        cache_dtype: of keys and values; the model's dtype where None.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        ends: Collection[int] = (),
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        cache_dtype: DTypeLike | None = None,
    ):
        self.generator = Generator(model, sampling, cache_dtype)
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self.context = context_of(model.config)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer knows how a conversation is written."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, prompts: Sequence[str], *, chat: bool = False, system: str | None = None) -> list[list[int]]:
        """The token ids of each prompt. With `chat` each is what a user says in a conversation of its own, which the
        tokenizer's chat template writes out; `system` is what the conversation begins with.

        Raises:
            UsageError: the tokenizer has no chat template, or the template refuses the conversation; `system` without
                `chat`.
        """
        if not chat:
            if system is not None:
                raise UsageError("a system prompt needs a chat template", hint="give --chat too")
            return [list(self.tokenizer(prompt)["input_ids"]) for prompt in prompts]
        if not self.has_chat_template:
            raise UsageError("the tokenizer has no chat template", hint="leave --chat out, or give another checkpoint")
        begin = [] if system is None else [{"role": "system", "content": system}]
        texts = []
        for prompt in prompts:
            messages = [*begin, {"role": "user", "content": prompt}]
            try:
                texts.append(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            except Exception as e:  # the template is a program of the model's authors, and may raise what it likes
                raise UsageError(
                    f"the chat template cannot be used: {type(e).__name__}: {str(e)[:300]}",
                    hint="leave --system out, if it refuses that" if system is not None else "leave --chat out",
                ) from e
        return [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    def stream(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 128,
        *,
        chat: bool = False,
        system: str | None = None,
        stop: Collection[str] = (),
        seed: int = 0,
    ) -> Iterator[tuple[list[str], list[Completion]]]:
        """Yields after every token, for each prompt, the text that is new and all of it so far. Text that may become a
        stop string, or of which bytes are missing, comes later. The last completions are the results.

        Raises:
            UsageError: see `encode`; or a prompt has no tokens, or more with `max_new_tokens` than the model has
                positions.
        """
        ids = self.encode(prompts, chat=chat, system=system)
        longest = max(map(len, ids), default=0)
        if longest + max_new_tokens > self.context:
            raise UsageError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones are {longest + max_new_tokens}, and the "
                f"model has {self.context} positions",
                hint="ask for fewer new tokens, or give a shorter prompt",
            )
        texts = [_Text(self.tokenizer, own, self.ends, stop) for own in ids]
        for step, ids_B in enumerate(self.generator(ids, max_new_tokens, eos=self.ends, seed=seed)):
            is_last = step + 1 == max_new_tokens
            new = [text.add(int(token), is_last) for text, token in zip(texts, ids_B, strict=True)]
            yield new, [text.completion(prompt) for text, prompt in zip(texts, prompts, strict=True)]
            if all(text.stopped for text in texts):
                return

    def __call__(self, prompts: Sequence[str], max_new_tokens: int = 128, **options: Any) -> list[Completion]:
        """The completions of all prompts, in one batch; arguments and errors are those of `stream`."""
        out: list[Completion] = []
        for _, completions in self.stream(prompts, max_new_tokens, **options):
            out = completions
        return out


class _Text:
    """What follows one prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], ends: Collection[int], stop: Collection[str]):
        self.tokenizer, self.prompt, self.ends, self.stop = (
            tokenizer,
            list(prompt),
            ends,
            [text for text in stop if text],
        )
        self.ids: list[int] = []
        # The text of the new ids alone may lack its first space: it is what the text of all has more.
        self.before = len(self._decoded(self.prompt))
        self.text, self.shown, self.stopped = "", 0, ""

    def add(self, token: int, is_last: bool) -> str:
        """The text that is new."""
        if self.stopped or token == ENDED:
            return ""
        self.ids.append(token)
        self.text = self._decoded(self.prompt + self.ids)[self.before :]
        if found := [at for text in self.stop if (at := self.text.find(text)) >= 0]:
            self.text, self.stopped = self.text[: min(found)], "stop"
        elif token in self.ends:
            self.stopped = "eos"
        elif is_last:
            self.stopped = "length"
        ready = self.text if self.stopped else self.text[: len(self.text) - self._held()]
        new = ready[self.shown :]
        self.shown = max(self.shown, len(ready))
        return new

    def _held(self) -> int:
        """Characters at the end that may not stay: of an incomplete one, or the beginning of a stop string."""
        if self.text.endswith(INCOMPLETE):
            return len(self.text) - self.shown
        ends = (n for text in self.stop for n in range(len(text) - 1, 0, -1) if self.text.endswith(text[:n]))
        return max(ends, default=0)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def completion(self, prompt: str) -> Completion:
        return Completion(prompt, self.text, tuple(self.ids), self.stopped or "length")
