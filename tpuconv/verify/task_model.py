"""A model of ours as lm-evaluation-harness takes it. Imports lm_eval, which is an extra."""

from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from tpuconv.errors import UsageError
from tpuconv.models.common.config import context_of
from tpuconv.models.logits import TEXTS_AT_ONCE, TokenScorer, padded_rows, padded_width
from tpuconv.models.text_generator import TextGenerator


class TaskModel(TemplateLM):  # type: ignore[misc]
    """A model of lm_eval. Its tokens come from the tokenizer by itself, as in lm_eval's model of transformers; texts
    that are too long lose their beginning.

    Args:
        model: from `tpuconv.load`.
        tokenizer, ends: as of `TextGenerator`.
        dtype: that the model computes in.
        cache_dtype: the dtype of keys and values; None for the dtype of the model.
        on_request: called with the number of requests that are done, and of all, of one kind.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        ends: frozenset[int],
        dtype: str,
        cache_dtype: str | None,
        on_request: Callable[[int, int], None],
    ):
        super().__init__()
        self.tokenizer, self.on_request = tokenizer, on_request
        self.scorer = TokenScorer(model, dtype, cache_dtype)
        self.generator = TextGenerator(model, tokenizer, ends, cache_dtype=cache_dtype)
        self.context = context_of(model.config)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Tells the texts of this chat template from the texts of other templates."""
        return str(self.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation, by the tokenizer's chat template. Without the prompt for an answer, the
        last message is the beginning of one. The system message is left out if the template refuses it, as lm_eval's
        model of transformers does.

        Raises:
            UsageError: the template fails.
        """
        failure: Exception | None = None
        for messages in (chat_history, [message for message in chat_history if message["role"] != "system"]):
            try:
                return str(
                    self.tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=not add_generation_prompt,
                    )
                )
            except (TemplateError, TypeError, ValueError) as e:
                failure = e
        raise UsageError(
            f"the chat template cannot be used: {type(failure).__name__}: {str(failure)[:300]}",
            hint="leave `chat_template=` out",
        ) from failure

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for what is before a text."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """See `TemplateLM`."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See `LM`."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        texts = [[*context, *continuation][-self.context - 1 :] for _, context, continuation in requests]
        scored = self.scorer(texts, self.on_request)
        counts = [len(continuation) for *_, continuation in requests]
        pairs = ((logp[-n:], best[-n:]) for (logp, best), n in zip(scored, counts, strict=True))
        return [(float(logp.sum(dtype=float)), bool(best.all())) for logp, best in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """See `LM`."""
        windows = [
            [
                (None, *utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.context, 1
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([window for of_text in windows for window in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """See `LM`.

        Raises:
            UsageError: a task asks for samples instead of the most likely tokens.
        """
        wanted: dict[tuple[Any, ...], list[int]] = {}
        end = str(self.tokenizer.decode([self.eot_token_id]))
        for i, request in enumerate(requests):
            settings = normalize_gen_kwargs(request.args[1])
            if settings["do_sample"]:
                raise UsageError(
                    f"{request.task_name} draws its texts, and tasks are generated by the most likely tokens",
                    hint="set `do_sample: false` in its generation_kwargs",
                )
            until = tuple(handle_stop_sequences(list(settings["until"]), eos=end))
            wanted.setdefault((until, settings["max_gen_toks"]), []).append(i)
        out = [""] * len(requests)
        done = 0
        for (until, new_tokens), numbers in wanted.items():
            room = self.context - new_tokens
            if room < 1:
                raise UsageError(f"a task asks for {new_tokens} tokens, and the model was made for {self.context}")
            ids = {i: self.tok_encode(requests[i].args[0])[-room:] for i in numbers}
            numbers.sort(key=lambda i: len(ids[i]))
            for start in range(0, len(numbers), TEXTS_AT_ONCE):
                chosen = numbers[start : start + TEXTS_AT_ONCE]
                filled = [*chosen, *[chosen[-1]] * (padded_rows(len(chosen)) - len(chosen))]
                width = min(room, padded_width(len(ids[chosen[-1]])))
                texts = [requests[i].args[0] for i in filled]
                for _, completions in self.generator.stream_ids(
                    texts, [ids[i] for i in filled], new_tokens, stop=until, width=width
                ):
                    out_of_batch = completions
                for i, completion in zip(chosen, out_of_batch, strict=False):
                    out[i] = completion.text
                done += len(chosen)
                self.on_request(done, len(requests))
        return out
