"""Compares the logits of the converted model with the logits of transformers on the same tokens.

The reference is transformers on the source checkpoint, without remote code. Divergences are KL(reference || ours) in
nats per predicted token.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tpuconv.checkpoint.manifest import read_manifest
from tpuconv.errors import UsageError
from tpuconv.location import Location
from tpuconv.models.logits import Window, divergences, forward_each, log_softmax, whole_texts
from tpuconv.models.tokenizer import check_ids, has_tokenizer, load_tokenizer
from tpuconv.notation.sharding import format_mesh, named_mesh

PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then it sits down to think about what it has done.",
    "In the beginning there was a small town by the river. Every morning the baker opened his shop before sunrise,",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\nprint(",
    "Q: What is the capital of France?\nA: The capital of France is Paris.\nQ: And of Japan?\nA:",
    "3.14159 + 2.71828 = 5.85987, and the square root of 144 is 12. Therefore 12 * 12 =",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist",
    "机器学习是人工智能的一个分支，它使计算机能够从数据中学习。",
    '{"name": "tpuconv", "inputs": ["model-00001-of-00002.safetensors"], "layers": 32, "tied": false, "next":',
)
"""The default prompts: prose, code, dialogue, numbers, other languages."""

ID_PROMPTS, ID_LENGTH = 8, 128
"""Number and length of the prompts of random token ids. After random tokens a model's predictions are less certain than
after text: with a correct model in bfloat16 about one token in 300 differs without a tie. Fewer tokens would sometimes
fail the gate by chance."""

TIE = 2
"""Two logits are tied if they differ by at most this number of spacings of their dtype: both are rounded, and are
computed from rounded values."""
TIED_NATS = 0.05
"""Two logits are tied too if they differ by at most this: neither token is 6% more likely than the other, and which is
first says nothing. A model may hesitate so between the same two tokens through a whole prompt."""

Gates = Mapping[str, float]
DTYPE_GATES: Mapping[str, Gates] = {
    "float32": {"relative_difference": 1e-4, "mean_kl": 1e-6, "top1": 0.999},
    "bfloat16": {"mean_kl": 1e-3, "top1": 0.99},
    "float16": {"mean_kl": 1e-3, "top1": 0.99},
}
"""Gates by dtype: the largest `relative_difference`, the largest `mean_kl`, the least `top1_decided`. Float32 compares
the mathematics. In the 16-bit types both models round, and not alike: these gates are for where nobody measured by how
much. See `rounding_gates`."""

ROUNDINGS = 2
"""The largest allowed ratio between the difference of two models and the effect of another rounding: in a 16-bit type,
a rounding in the reference; of a quantized model, roundings of its weights (`tpuconv.quantize.rerounding`). With a
trained model of 135 million parameters in bfloat16 one rounding gives 0.0024 nats, transformers' own two
implementations of attention differ by 0.0015, and ours from them by 0.0015 and 0.0018."""


def rounding_gates(dtype: str, rounding_kl: float | None) -> Gates:
    """Returns the gates of two models that compute in a dtype. How far roundings move the logits depends on the model;
    the reference itself shows it. Where it did, the most likely token has no gate, since the most likely token of a
    right model changes too.

    Args:
        dtype: of parameters and activations.
        rounding_kl: see `tpuconv.verify.reference.Reference`. If it is None, `mean_kl` has a gate in float32 only.
    """
    gates = DTYPE_GATES[dtype]
    if dtype == "float32":
        return gates
    if rounding_kl is None:
        return {"top1": gates["top1"]}
    return {"mean_kl": max(gates["mean_kl"], ROUNDINGS * rounding_kl)}


CLIPPED = 5
"""The same of models some of whose values may be clipped, which another rounding does not change: 3.1 times with int4
weights and scales for 0.8 of the largest weight, 2.6 times with static scales for twice the mean of the largest
activations, in the trained example."""

UNCLIPPED: Mapping[str, Mapping[str, float]] = {
    "weights": {"absmax": 1, "minmax": 1, "mse": 1},
    "activations": {"absmax": 1},
    "static": {},
}
HARDLY_CLIPPED: Mapping[str, Mapping[str, float]] = {
    "weights": {"absmax": 0.8, "minmax": 0.8, "rms": 4, "mse": 1},
    "activations": {"absmax": 1},
    "static": {"absmax": 2},
}
"""The calibration methods, with their least factors, by which nothing is clipped, and by which so little is that
`CLIPPED` bounds it. What other methods clip of activations changes a right model 5 to 600 times as much as a rounding,
which is as much as faults do."""


def quantized_gates(dtype: str, rounding_kl: float, quantization: Mapping[str, Any]) -> Gates:
    """Returns the gates of a quantized model whose config has none of its own. Models differ by orders of magnitude in
    what roundings change; the most likely token says little where a model hesitates between two. There are no gates
    where no bound tells right models from wrong ones.

    Args:
        dtype: that it computes in.
        rounding_kl: the mean divergence of another rounding: see `tpuconv.quantize.rerounding`.
        quantization: of the manifest; its rules say whether values are clipped.
    """
    methods = list(_methods(quantization.get("rules", ())))
    if not _all_within(methods, HARDLY_CLIPPED):
        return {}
    factor = ROUNDINGS if _all_within(methods, UNCLIPPED) else CLIPPED
    return {"mean_kl": max(DTYPE_GATES[dtype]["mean_kl"], factor * rounding_kl)}


def _methods(rules: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields the kind of values that rules round, as a key of `UNCLIPPED`, and the calibration method."""
    for rule in rules:
        yield "weights", rule.get("weight_calibration_method") or "absmax"
        if rule.get("act_qtype"):
            rounded = "static" if rule.get("act_static_scale") else "activations"
            yield rounded, rule.get("act_calibration_method") or "absmax"


def rounds_activations(quantization: Mapping[str, Any] | None) -> bool:
    """Returns True if rules quantize activations.

    Args:
        quantization: of the manifest.
    """
    return any(rule.get("act_qtype") for rule in (quantization or {}).get("rules", ()))


def _all_within(methods: Iterable[tuple[str, str]], least: Mapping[str, Mapping[str, float]]) -> bool:
    for rounded, method in methods:
        name, *numbers = method.split(",")
        if float(numbers[0] if numbers else 1) < least[rounded].get(name, np.inf):
            return False
    return True


@dataclass(frozen=True)
class LogitStatistics:
    """Statistics over all predicted tokens of all prompts.

    Attributes:
        dtype: that both models computed in.
        prompts, tokens: how many were compared.
        max_abs_difference: largest absolute difference of two logits.
        mean_abs_difference: mean absolute difference of two logits.
        max_abs_logit: largest absolute logit of the reference.
        mean_kl, p999_kl: mean and 99.9th percentile of the divergence, in nats.
        top1: share of tokens with the same most likely next token.
        decided: number of tokens for which the reference has no tie (see `are_tied`).
        top1_decided: the share `top1` of those tokens, of all if there are none; the gate "top1" applies to it.
        perplexity_reference, perplexity: of the prompts, by the reference and by the model compared with it.
        worst_prompt: number of the prompt with the largest mean divergence, from 1.
        worst_prompt_kl: its mean divergence in nats.
        gates: bounds by the name of a statistic.
        rounding_kl: what another rounding changes: see `tpuconv.verify.reference.Reference`, and of a quantized model
            `tpuconv.quantize.rerounding`; None if it was not measured.
    """

    dtype: str
    prompts: int
    tokens: int
    max_abs_difference: float
    mean_abs_difference: float
    max_abs_logit: float
    mean_kl: float
    p999_kl: float
    top1: float
    decided: int
    top1_decided: float
    perplexity_reference: float
    perplexity: float
    worst_prompt: int
    worst_prompt_kl: float
    gates: Gates
    rounding_kl: float | None = None

    @property
    def relative_difference(self) -> float:
        """The largest difference of two logits, divided by the largest logit."""
        return self.max_abs_difference / max(self.max_abs_logit, float(np.finfo(np.float32).tiny))

    def failures(self) -> list[str]:
        """Returns the gates that failed, one sentence each."""
        out = [] if "mean_kl" in self.gates or np.isfinite(self.mean_kl) else [f"mean_kl is {self.mean_kl}"]
        failed = {name: self._value(name) for name in self.gates if self.fails(name)}
        return [*out, *(f"{name} is {value:.3g}, the gate is {self.gates[name]:g}" for name, value in failed.items())]

    def fails(self, name: str) -> bool:
        """Returns True if a gate failed, as it does for a NaN."""
        value, gate = self._value(name), self.gates[name]
        return not (value >= gate if name == "top1" else value <= gate)

    def _value(self, name: str) -> float:
        return float(self.top1_decided if name == "top1" else getattr(self, name))

    @property
    def passed(self) -> bool | None:
        """True if all gates hold; None if there are no gates."""
        return not self.failures() if self.gates else None

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        facts = asdict(self)
        facts["perplexity"] = {"hf": facts.pop("perplexity_reference"), "jax": self.perplexity}
        return {"passed": self.passed, **facts, "failures": self.failures()}


def tokenize(source: Path, prompts: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Returns the token ids of the prompts, `PROMPTS` by default. Prompts of fewer than two tokens are left out. If the
    source has no tokenizer and no prompts are given, the ids are pseudo-random, the same in every run.

    Raises:
        UsageError: the source has no tokenizer for the prompts, every prompt is shorter than two tokens, or the model
            has no embedding for a token.
    """
    if not has_tokenizer(source):
        if prompts:
            raise UsageError(
                f"{source} has no tokenizer for the prompts", hint="leave `prompts=` out to compare on random token ids"
            )
        rng = np.random.default_rng(0)
        return [list(map(int, row)) for row in rng.integers(0, vocab_size, (ID_PROMPTS, ID_LENGTH))]
    tokenizer = load_tokenizer(source)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts or PROMPTS]
    ids = [prompt_ids for prompt_ids in ids if len(prompt_ids) > 1]
    if not ids:
        raise UsageError("the prompts are shorter than two tokens", hint="give longer prompts")
    check_ids(tokenizer, ids, vocab_size)
    return ids


def device_mesh(sizes: Mapping[str, int]) -> Any:
    """Returns a mesh of the first devices, of all processes, with axes of these sizes.

    Raises:
        UsageError: there are too few devices, or `named_mesh` refuses the axes.
    """
    import jax

    sizes = named_mesh(sizes)
    devices, count = jax.devices(), prod(sizes.values())
    if count > len(devices):
        hint = "use a smaller mesh; XLA_FLAGS=--xla_force_host_platform_device_count=8 gives a CPU eight devices"
        raise UsageError(f"the mesh {format_mesh(sizes)} needs {count} devices, there are {len(devices)}", hint=hint)
    return jax.sharding.Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def model_logits(
    ckpt: Location, prompts: Sequence[Sequence[int]], dtype: str, mesh: Any = None, cache_dtype: str | None = None
) -> list[np.ndarray]:
    """Returns our model's logits [T, V] in float32 for each prompt (or what else it returns: see `forward`), computed
    on one device or on a mesh; with several processes all of them call this, and the mesh is of all devices if None.
    Raises as `tpuconv.load`."""
    from tpuconv.restore import load, mesh_of_processes

    mesh = mesh or mesh_of_processes(read_manifest(ckpt))
    return list(each_logits(partial(load, ckpt), whole_texts(prompts), dtype, mesh, cache_dtype))


ModelLoader = Callable[[str, Any], Any]
"""Returns a model from the dtype of its parameters and activations, and a mesh; None is one device."""


def each_logits(
    load: ModelLoader,
    windows: Sequence[Window],
    dtype: str,
    mesh: Any = None,
    cache_dtype: str | None = None,
    *,
    rounding: int | None = None,
    on_seen: Callable[[np.ndarray], None] = lambda features: None,
) -> Iterator[np.ndarray]:
    """Yields what `model_logits` returns, one window at a time, from its first token that counts on; with `rounding`, a
    seed, the logits of another rounding of the model (`tpuconv.quantize.rerounding`). `on_seen` is as in
    `forward_each`."""
    import jax

    def on_mesh() -> Any:
        return jax.sharding.set_mesh(mesh) if mesh else contextlib.nullcontext()

    model = load(dtype, mesh)
    with on_mesh():
        if rounding is not None:
            from tpuconv.quantize.rerounding import rerounded

            model = rerounded(model, rounding)
        run = forward_each(model, windows, dtype, cache_dtype, on_seen)()
    for _ in windows:
        with on_mesh():  # not while this generator is suspended
            logits = next(run)
        yield logits


def _perplexity(nll: np.ndarray) -> float:
    """Returns the perplexity, of the negative log-probabilities of tokens; infinity where float64 is too small."""
    with np.errstate(over="ignore"):
        return float(np.exp(nll.mean(dtype=np.float64)))


def rounding_divergence(
    prompts: Sequence[Sequence[int]],
    ours: Callable[[], Iterable[np.ndarray]],
    rerounded: Callable[[int], Iterable[np.ndarray]],
    dtype: str,
) -> float:
    """Returns what another rounding of a quantized model changes: the mean divergence in nats from its logits.

    Args:
        prompts, dtype: as of `compare_logits`.
        ours: gives the model's logits for each prompt.
        rerounded: gives the logits of another rounding of the model, with a seed.
    """
    from tpuconv.quantize.rerounding import SEEDS

    return float(np.mean([compare_logits(prompts, ours(), rerounded(seed), dtype, {}).mean_kl for seed in SEEDS]))


def compare_logits(
    prompts: Sequence[Sequence[int]],
    hf: Iterable[np.ndarray],
    ours: Iterable[np.ndarray],
    dtype: str,
    gates: Gates,
    rounding_kl: float | None = None,
) -> LogitStatistics:
    """Returns the statistics of two models' logits. Those of one prompt are held at a time.

    Args:
        prompts: token ids of each prompt; with logits of T of its tokens, the last T or T + 1 ids.
        hf: the reference's logits [T, V] in float32 for each prompt.
        ours: our logits, of the same shapes.
        dtype: that both models computed in; it says which logits are tied.
        gates: bounds by the name of a statistic.
        rounding_kl: see `tpuconv.verify.reference.Reference`.
    """
    each = [_compared(ids, a, b, dtype) for ids, a, b in zip(prompts, hf, ours, strict=True)]
    kl, agree, decided, nll_hf, nll_ours = (
        np.concatenate([getattr(found, name) for found in each])
        for name in ("kl_T", "agree_T", "decided_T", "nll_hf", "nll_ours")
    )
    means = [found.kl_T.mean() for found in each]
    return LogitStatistics(
        dtype=dtype,
        prompts=len(prompts),
        tokens=len(kl),
        max_abs_difference=float(np.max([found.largest_difference for found in each])),
        mean_abs_difference=sum(found.sum_of_differences for found in each) / sum(found.logits for found in each),
        max_abs_logit=float(max(found.largest_logit for found in each)),
        mean_kl=float(kl.mean()),
        p999_kl=float(np.quantile(kl, 0.999)),
        top1=float(agree.mean()),
        decided=int(decided.sum()),
        top1_decided=float((agree[decided] if decided.any() else agree).mean()),
        perplexity_reference=_perplexity(nll_hf),
        perplexity=_perplexity(nll_ours),
        worst_prompt=1 + int(np.argmax(means)),
        worst_prompt_kl=float(np.max(means)),
        gates=gates,
        rounding_kl=rounding_kl,
    )


class _Compared(NamedTuple):
    """The statistics that `compare_logits` keeps of a prompt: of each token, and the negative log-likelihoods of the
    predicted tokens."""

    largest_difference: float
    sum_of_differences: float
    logits: int
    largest_logit: float
    kl_T: np.ndarray
    agree_T: np.ndarray
    decided_T: np.ndarray
    nll_hf: np.ndarray
    nll_ours: np.ndarray


def _compared(ids: Sequence[int], hf_TV: np.ndarray, ours_TV: np.ndarray, dtype: str) -> _Compared:
    difference_TV = np.abs(hf_TV - ours_TV)
    p, q = log_softmax(hf_TV), log_softmax(ours_TV)
    next_T = np.array(ids[1:], int)
    (at,) = np.nonzero(next_T < p.shape[-1])  # placeholders may have ids beyond the head's
    predicted = at, next_T[at]
    return _Compared(
        float(difference_TV.max()),
        float(difference_TV.sum(dtype=np.float64)),
        difference_TV.size,
        float(np.abs(hf_TV).max()),
        divergences([p], [q]),
        p.argmax(-1) == q.argmax(-1),
        ~are_tied(hf_TV, dtype),
        -p[predicted],
        -q[predicted],
    )


def are_tied(logits: np.ndarray, dtype: str) -> np.ndarray:
    """Returns [T] bool: whether the two largest of the logits [T, V] are tied (see `TIE` and `TIED_NATS`). `dtype` is
    the dtype that they were computed in."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    exponent = np.frexp(np.abs(first))[1] - 1
    spacing = float(ml_dtypes.finfo(dtype).eps) * np.exp2(exponent)  # type: ignore[no-untyped-call]
    return np.asarray(first - second <= np.maximum(TIE * spacing, TIED_NATS))
