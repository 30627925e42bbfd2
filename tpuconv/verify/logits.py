"""Does the converted model compute what the original does? Logits of both on the same tokens, side by side.

The reference is transformers on the source checkpoint, without remote code. Divergences are KL(reference || ours) in
nats, per predicted token.
"""

import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.errors import ConfigError, UsageError
from tpuconv.models.logits import divergences, forward, log_softmax
from tpuconv.models.tokenizer import has_tokenizer, load_tokenizer
from tpuconv.sharding import format_mesh
from tpuconv.sources.config import read_config, read_json
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILE, INDEX_FILE
from tpuconv.sources.source import open_source

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
"""What is compared where the user gives no prompts: prose, code, dialogue, numbers, other languages."""

ID_PROMPTS, ID_LENGTH = 8, 128
"""Of random token ids. A model is less sure of what follows them than of text: of a right one in bfloat16 one token in
300 or so differs that is not a tie, so that of few tokens too many would now and then."""

TIE = 2
"""Of two logits that differ by no more spacings of their type neither is the larger one: each is rounded, and made of
what was rounded before."""

Gates = Mapping[str, float]
DTYPE_GATES: Mapping[str, Gates] = {
    "float32": {"relative_difference": 1e-4, "mean_kl": 1e-6, "top1": 0.999},
    "bfloat16": {"mean_kl": 1e-3, "top1": 0.99},
    "float16": {"mean_kl": 1e-3, "top1": 0.99},
}
"""Largest difference by the largest logit, largest mean divergence, least agreement of the most likely token where the
reference has one. Float32 compares the mathematics; in the shorter types both sides round, and differently."""


@dataclass(frozen=True)
class Comparison:
    """Figures over all predicted tokens of all prompts. `decided` counts those for which the reference has one most
    likely, and no tie of two: the share of these that agrees, `top1_decided`, is what the gate "top1" is for."""

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
    perplexity_hf: float
    perplexity_jax: float
    worst_prompt: int
    worst_prompt_kl: float
    gates: Gates

    @property
    def relative_difference(self) -> float:
        return self.max_abs_difference / self.max_abs_logit

    def failures(self) -> list[str]:
        """The gates that do not hold, in words."""
        out = []
        for name, gate in self.gates.items():
            value = float(self.top1_decided if name == "top1" else getattr(self, name))
            if not (value >= gate if name == "top1" else value <= gate):  # a NaN fails too
                out.append(f"{name} is {value:.3g}, the gate is {gate:g}")
        return out

    @property
    def passed(self) -> bool | None:
        """Whether every gate holds; None where there are no gates."""
        return not self.failures() if self.gates else None

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        facts["perplexity"] = {"hf": facts.pop("perplexity_hf"), "jax": facts.pop("perplexity_jax")}
        return {"passed": self.passed, **facts, "failures": self.failures()}


def tokenize(source: Path, prompts: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Token ids of the prompts, or fixed pseudo-random ids where the source has no tokenizer and no prompts are given.

    Raises:
        UsageError: prompts without a tokenizer, or prompts that are too short to predict anything.
    """
    if not has_tokenizer(source):
        if prompts:
            raise UsageError(
                f"{source} has no tokenizer for the prompts", hint="leave --prompts away to compare on token ids"
            )
        rng = np.random.default_rng(0)
        return [list(map(int, row)) for row in rng.integers(0, vocab_size, (ID_PROMPTS, ID_LENGTH))]
    tokenizer = load_tokenizer(source)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts or PROMPTS]
    ids = [own for own in ids if len(own) > 1]
    if not ids:
        raise UsageError("the prompts are shorter than two tokens", hint="give longer ones")
    return ids


READ_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers reads as another, which has the same mathematics: it would ask for remote code."""


def reference_config(source: Path) -> Any:
    """Transformers' config of the source."""
    from transformers import AutoConfig

    raw = read_json(source / CONFIG_FILE, ConfigError)
    if (other := READ_AS.get(raw.get("model_type", ""))) is None:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    return AutoConfig.for_model(other, **{k: v for k, v in raw.items() if k not in ("model_type", "auto_map")})


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Where transformers makes a model that may have weights without elements, of no shared experts: torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        yield


def reference_logits(source: Path, prompts: Sequence[Sequence[int]], dtype: str) -> list[np.ndarray]:
    """Transformers' logits [T, V] in float32 of each prompt.

    Raises:
        UsageError: it would take codes for weights.
    """
    path = source / CONFIG_FILE
    if read_config(path) != read_json(path, ConfigError):
        raise UsageError(
            f"transformers takes the codes of {source} for weights: {ENCODING_FILE} says how they are encoded, "
            "which it does not read",
            hint="--layerwise compares with transformers on the weights as tpuconv reads them",
        )
    if (source / INDEX_FILE).exists():
        open_source(source)  # transformers follows `../` in an index
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with empty_weights():
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=reference_config(source),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            trust_remote_code=False,
            use_safetensors=True,
        ).eval()
    with torch.no_grad():
        out = [model(torch.tensor([list(ids)])).logits[0].float().numpy() for ids in prompts]
    del model
    gc.collect()
    return out


def device_mesh(sizes: Mapping[str, int]) -> Any:
    """The first devices here, as a mesh with axes of these sizes.

    Raises:
        UsageError: there are fewer.
    """
    import jax

    devices, count = jax.devices(), prod(sizes.values())
    if count > len(devices):
        hint = (
            "name a smaller one; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight devices of one"
        )
        raise UsageError(f"the mesh {format_mesh(sizes)} has {count} devices, here are {len(devices)}", hint=hint)
    return jax.sharding.Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def model_logits(ckpt: Path, prompts: Sequence[Sequence[int]], dtype: str, mesh: Any = None) -> list[np.ndarray]:
    """Our logits [T, V] in float32 of each prompt, computed on one device or on those of a mesh."""
    import jax

    from tpuconv.restore import load

    with jax.sharding.set_mesh(mesh) if mesh else contextlib.nullcontext():
        return forward(load(ckpt, dtype, mesh), prompts, dtype)()


def compare(
    prompts: Sequence[Sequence[int]], hf: Sequence[np.ndarray], ours: Sequence[np.ndarray], dtype: str, gates: Gates
) -> Comparison:
    """The figures of two models' logits [T, V] on the same prompts."""
    difference = np.concatenate([np.abs(a - b).max(-1) for a, b in zip(hf, ours, strict=True)])
    mean = float(np.mean([np.abs(a - b).mean() for a, b in zip(hf, ours, strict=True)]))
    logp, logq = ([log_softmax(x) for x in side] for side in (hf, ours))
    kl = divergences(logp, logq)
    means = [divergences([p], [q]).mean() for p, q in zip(logp, logq, strict=True)]
    agree = np.concatenate([p.argmax(-1) == q.argmax(-1) for p, q in zip(logp, logq, strict=True)])
    decided = np.concatenate([~are_tied(x, dtype) for x in hf])
    return Comparison(
        dtype=dtype,
        prompts=len(prompts),
        tokens=len(kl),
        max_abs_difference=float(difference.max()),
        mean_abs_difference=mean,
        max_abs_logit=float(max(np.abs(x).max() for x in hf)),
        mean_kl=float(kl.mean()),
        p999_kl=float(np.quantile(kl, 0.999)),
        top1=float(agree.mean()),
        decided=int(decided.sum()),
        top1_decided=float(agree[decided].mean()) if decided.any() else 1.0,
        perplexity_hf=_perplexity(prompts, logp),
        perplexity_jax=_perplexity(prompts, logq),
        worst_prompt=1 + int(np.argmax(means)),
        worst_prompt_kl=float(np.max(means)),
        gates=gates,
    )


def are_tied(logits: np.ndarray, dtype: str) -> np.ndarray:
    """Of every token of [T, V] whether the two largest logits are one to the precision of `dtype`, which they had."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    exponent = np.frexp(np.abs(first))[1] - 1
    spacing = float(ml_dtypes.finfo(dtype).eps) * np.exp2(exponent)  # type: ignore[no-untyped-call]
    return np.asarray(first - second <= TIE * spacing)


def _perplexity(prompts: Sequence[Sequence[int]], logp: Sequence[np.ndarray]) -> float:
    """exp of the mean negative log-likelihood of every token after the first."""
    nll = [-p[np.arange(len(ids) - 1), list(ids)[1:]] for ids, p in zip(prompts, logp, strict=True)]
    return float(np.exp(np.concatenate(nll).mean()))
