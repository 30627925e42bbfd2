"""Log-probabilities of prompts by a running server, and their difference from a checkpoint's.

A server gives the log-probability of each token of a prompt and of the tokens that it takes for most likely, not of
all. So divergences are of the tokens that it names, and of all others as one: a lower bound of the whole divergence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tpuconv.errors import ServerError
from tpuconv.jsonfile import Optional, check
from tpuconv.models.logits import log_softmax
from tpuconv.verify.logits import DTYPE_GATES, ROUNDINGS, are_tied

OF_VLLM, OF_SGLANG = "vLLM", "SGLang"
SERVER_SECONDS = 600.0
"""A server compiles a program for a new length of prompts."""
MODELS_SCHEMA = {"data": [{"id": str}]}
COMPLETIONS_SCHEMA = {"choices": [{"prompt_logprobs": Optional(list)}]}
GENERATE_SCHEMA = {"meta_info": {"input_token_logprobs": list, "input_top_logprobs": list}}

TokenLogProbs = Mapping[int, float]
"""Of one position: log-probabilities in nats, by the id of the token."""


@dataclass(frozen=True)
class Server:
    """A server that was found.

    Attributes:
        url: its address, without a path.
        program: vLLM (and vLLM TPU) or SGLang.
        model: the name of the model that it serves.
    """

    url: str
    program: str
    model: str

    def log_probs(self, ids: Sequence[int], count: int) -> list[TokenLogProbs]:
        """Returns the log-probabilities of the tokens of a prompt after the first, each with the `count` most likely.

        Raises:
            ServerError: the server refuses the request, cannot be reached, or answers something else.
        """
        if self.program == OF_SGLANG:
            request = {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": count,
            }
            schema: Any = GENERATE_SCHEMA
            path, read = "/generate", _rows_of_sglang
        else:
            request = {
                "model": self.model,
                "prompt": list(ids),
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": count,
            }
            schema, path, read = COMPLETIONS_SCHEMA, "/v1/completions", _rows_of_vllm
        found = check(_asked(f"{self.url}{path}", request), schema, self.url, ServerError)
        try:
            positions = read(found)
        except (AttributeError, LookupError, TypeError, ValueError):
            positions = []
        given = sum(token in named for token, named in zip(ids[1:], positions[1:], strict=False))
        if len(positions) != len(ids) or given != len(ids) - 1:
            raise ServerError(
                f"{self.url} gave log-probabilities of {given} of the last {len(ids) - 1} tokens of a prompt",
                hint="it must say how likely the prompt is: `prompt_logprobs` of vLLM, `return_logprob` of SGLang",
            )
        return positions[1:]


def _rows_of_vllm(answer: Mapping[str, Any]) -> list[TokenLogProbs]:
    named = answer["choices"][0].get("prompt_logprobs") or []
    return [{int(token): float(each["logprob"]) for token, each in (row or {}).items()} for row in named]


def _rows_of_sglang(answer: Mapping[str, Any]) -> list[TokenLogProbs]:
    own, top = (answer["meta_info"][key] for key in ("input_token_logprobs", "input_top_logprobs"))
    rows = [[token, *(others or ())] for token, others in zip(own, top, strict=False)]
    return [{int(each[1]): float(each[0]) for each in row if each[0] is not None} for row in rows]


def find_server(url: str, model: str | None) -> Server:
    """Asks a server what it is.

    Args:
        url: its address, with or without `/v1`.
        model: which of its models; None if it has one.

    Raises:
        ServerError: it cannot be reached, or is no server of vLLM or SGLang; or it does not have the model.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if "://" not in base:
        base = f"http://{base}"
    served = [each["id"] for each in check(_asked(f"{base}/v1/models"), MODELS_SCHEMA, base, ServerError)["data"]]
    if model is None and len(served) == 1:
        (model,) = served
    if model is None or model not in served:
        raise ServerError(
            f"{base} does not serve {model}" if model else f"{base} serves several models",
            details=served,
            hint="give one of them by `served=`",
        )
    try:
        _asked(f"{base}/get_model_info")
    except ServerError:
        return Server(base, OF_VLLM, model)
    return Server(base, OF_SGLANG, model)


def _asked(url: str, request: Mapping[str, Any] | None = None) -> Any:
    """The answer to a request, parsed: to POST if it has contents, else to GET."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    data = None if request is None else json.dumps(request).encode()
    try:
        with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=SERVER_SECONDS) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        said = error.read(1000).decode(errors="replace").strip()
        raise ServerError(
            f"{url} refuses the request: {error.code} {error.reason}", details=[said] if said else ()
        ) from None
    except (OSError, HTTPException) as error:
        raise ServerError(
            f"{url} cannot be reached: {getattr(error, 'reason', error)}", hint="start the server, and give its address"
        ) from None
    except ValueError:
        raise ServerError(f"{url} does not answer with JSON", hint="give the address of vLLM or SGLang") from None


@dataclass(frozen=True)
class Position:
    """A token of a prompt where server and checkpoint differ.

    Attributes:
        prompt, position: their numbers, from 1 and from 0.
        token: the most likely token by the checkpoint, and by the server (`server_token`).
        kl: the divergence there, in nats.
    """

    prompt: int
    position: int
    token: int
    server_token: int
    kl: float


@dataclass(frozen=True)
class ServerStatistics:
    """Statistics over all tokens of all prompts but the first of each.

    Attributes:
        dtype: in which the checkpoint's model computed beside float32, and the server is expected to.
        prompts, tokens: how many were compared.
        max_difference, mean_difference: of the log-probabilities of the prompts' tokens, in nats.
        mean_kl, p999_kl: mean and 99.9th percentile of KL(checkpoint || server) in nats, over the tokens that the
            server names and all others as one.
        top1: the share of tokens with the same most likely next token; `top1_decided` of those without a tie.
        perplexity, perplexity_server: of the prompts.
        rounding_kl: the mean divergence of the checkpoint's own model in `dtype` from float32, over the same tokens; of
            a model that quantizes activations, with another rounding of its weights (`tpuconv.quantize.rerounding`).
        gate: the largest `mean_kl` that passes.
        first: the first token whose most likely successor differs, without a tie; None if none does.
        worst: the token with the largest divergence.
    """

    dtype: str
    prompts: int
    tokens: int
    max_difference: float
    mean_difference: float
    mean_kl: float
    p999_kl: float
    top1: float
    top1_decided: float
    perplexity: float
    perplexity_server: float
    rounding_kl: float
    gate: float
    first: Position | None
    worst: Position

    @property
    def failures(self) -> list[str]:
        """The gates that failed, one sentence each."""
        return [] if self.mean_kl <= self.gate else [f"mean_kl is {self.mean_kl:.3g}, the gate is {self.gate:.3g}"]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return asdict(self)


def compare_log_probs(
    prompts: Sequence[Sequence[int]],
    server: Sequence[Sequence[TokenLogProbs]],
    exact: Sequence[np.ndarray],
    rounded: Sequence[np.ndarray],
    dtype: str,
) -> ServerStatistics:
    """Returns the statistics of a server's log-probabilities.

    Args:
        prompts: token ids of each prompt.
        server: of each prompt, the server's log-probabilities of each token but the first.
        exact: the checkpoint's logits [T, V] in float32.
        rounded: its logits when it computes in `dtype`, or with another rounding.
        dtype: that the server computes in.
    """
    kl, rounded_kl, agree, decided, ours, theirs = ([] for _ in range(6))
    places: list[Position] = []
    for number, (ids, found, logits_TV, rounded_TV) in enumerate(zip(prompts, server, exact, rounded, strict=True), 1):
        p_TV, r_TV = log_softmax(logits_TV), log_softmax(rounded_TV)
        ties = are_tied(logits_TV, dtype)
        for t, (token, named) in enumerate(zip(ids[1:], found, strict=True)):
            tokens = np.array([i for i in named if 0 <= i < logits_TV.shape[1]])  # a server may pad its vocabulary
            q = np.array([named[i] for i in tokens.tolist()])
            kl.append(_partial_kl(p_TV[t, tokens], q))
            rounded_kl.append(_partial_kl(p_TV[t, tokens], r_TV[t, tokens]))
            first, server_first = int(p_TV[t].argmax()), max(named, key=lambda i: named[i])
            agree.append(first == server_first)
            decided.append(not ties[t])
            ours.append(p_TV[t, token])
            theirs.append(named[token])
            places.append(Position(number, t + 1, first, server_first, float(kl[-1])))
    differences, is_decided, is_same = np.abs(np.subtract(ours, theirs)), np.array(decided), np.array(agree)
    rounding_kl = float(np.mean(rounded_kl))
    return ServerStatistics(
        dtype=dtype,
        prompts=len(prompts),
        tokens=len(kl),
        max_difference=float(differences.max()),
        mean_difference=float(differences.mean()),
        mean_kl=float(np.mean(kl)),
        p999_kl=float(np.quantile(kl, 0.999)),
        top1=float(is_same.mean()),
        top1_decided=float((is_same[is_decided] if is_decided.any() else is_same).mean()),
        perplexity=float(np.exp(-np.mean(ours))),
        perplexity_server=float(np.exp(-np.mean(theirs))),
        rounding_kl=rounding_kl,
        gate=max(DTYPE_GATES[dtype]["mean_kl"], ROUNDINGS * rounding_kl),
        first=next((x for x, same, sure in zip(places, agree, decided, strict=True) if sure and not same), None),
        worst=max(places, key=lambda place: place.kl),
    )


def _partial_kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) in nats of some log-probabilities, and of what is left of each as one."""
    left = [max(1.0 - float(np.exp(x.astype(np.float64)).sum()), 1e-9) for x in (p, q)]
    named = float(np.sum(np.exp(p.astype(np.float64)) * (p - q)))
    return max(0.0, named + left[0] * float(np.log(left[0] / left[1])))
