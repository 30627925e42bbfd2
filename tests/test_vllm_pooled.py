"""Embedding models, rerankers and reward models that vLLM loads: it computes what tpuconv does, quantized or not.

Slow, in an environment of its own: see `helpers/oracles.py`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tpuconv
from helpers.checkpoints import read_tensors, write_checkpoint
from helpers.consumers import MODELS
from helpers.families import save
from helpers.logits import forward
from helpers.oracles import ROOT, ask
from helpers.processors import word_tokenizer
from tpuconv import api
from tpuconv.models.common.heads import HIDDEN, LOGITS, SCORES, TOKEN_SCORES

pytestmark = [pytest.mark.slow, pytest.mark.consumers]
SCRIPT = ROOT / "tests" / "helpers" / "vllm_pooled.py"
IDS = [int(n) for n in np.random.default_rng(0).integers(4, 97, 40)]
FORMS = {"plain": None, "int8": "int8_default", "fp8": "fp8_default"}
MOST_OF_ROUNDING = {"fp8": 0.25, "int8": 1.5}
"""The most that vLLM's vectors differ from ours, as a part of what the quantization changes. Its kernels round
activations to int8 otherwise; to FP8 as ours do, but for values between two numbers, which sums in another order
move."""
BIDIRECTIONAL = {"pooling": "avg", "temperature": 1.0}
"""vLLM finds the class by `architectures`; the `model_type` of NVIDIA is known to the code of the release alone."""


def with_mlp(labels: int) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """What gives a Qwen2 the head of Qwen2.5-Math's reward models."""
    width, random = MODELS["qwen2"].config["hidden_size"], np.random.default_rng(0)
    shapes = {"0.weight": (width, width), "0.bias": (width,), "2.weight": (labels, width), "2.bias": (labels,)}

    def changed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kept = {name: x for name, x in tensors.items() if name != "lm_head.weight"}
        return kept | {f"score.{name}": 0.1 * random.normal(size=s).astype(np.float32) for name, s in shapes.items()}

    return changed


def one_score(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors | {"score.weight": tensors["score.weight"][:1]}


@dataclass(frozen=True)
class Pooled:
    """A model that vLLM pools.

    Attributes:
        of: the model of `MODELS`.
        returns: what transformers' model returns.
        task: of vLLM.
        config: further keys of config.json.
        tensors: changes the tensors.
        rows: what of our rows [T, O] or [O] vLLM returns.
    """

    of: str
    returns: str
    task: str
    config: dict[str, Any]
    tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict
    rows: Callable[[np.ndarray], np.ndarray] = np.asarray


def last(x: np.ndarray) -> np.ndarray:
    return x[-1]


def mean(x: np.ndarray) -> np.ndarray:
    return x.mean(axis=0)


POOLED = {
    "embedding": Pooled("qwen3", HIDDEN, "embed", {}, rows=last),
    "embedding that sees behind": Pooled(
        "llama", HIDDEN, "embed", {"architectures": ["LlamaBidirectionalModel"], **BIDIRECTIONAL}, rows=mean
    ),
    "classifier": Pooled("qwen3", SCORES, "classify", {}),
    "reranker that sees behind": Pooled(
        "llama",
        SCORES,
        "classify",
        {
            "architectures": ["LlamaBidirectionalForSequenceClassification"],
            "id2label": {"0": "relevant"},
            **BIDIRECTIONAL,
        },
        one_score,
    ),
    "classifier of tokens": Pooled("qwen3", TOKEN_SCORES, "token_classify", {}),
    "process reward": Pooled(
        "qwen2", LOGITS, "token_classify", {"architectures": ["Qwen2ForProcessRewardModel"]}, with_mlp(2)
    ),
}


@pytest.mark.parametrize("name", POOLED)
def test_vllm_returns_our_vectors(name: str, tmp_path: Path) -> None:
    pooled = POOLED[name]
    save(MODELS[pooled.of], tmp_path / "plain-hf", returns=pooled.returns)
    config = json.loads((tmp_path / "plain-hf" / "config.json").read_text()) | {"pad_token_id": None}
    source = tmp_path / "hf"
    write_checkpoint(source, config | pooled.config, pooled.tensors(dict(read_tensors(tmp_path / "plain-hf"))))
    word_tokenizer({}).save_pretrained(source)
    # Ours read NVIDIA's models by their `model_type`.
    of_nvidia = {"model_type": "llama_bidirec"} if "pooling" in pooled.config else {}
    ours = write_checkpoint(tmp_path / "ours-hf", config | pooled.config | of_nvidia, read_tensors(source))
    wanted, models = {}, []
    for form, rules in FORMS.items():
        api.convert(ours, tmp_path / f"{form}-orbax", quantize=rules)
        found = forward(tpuconv.load(tmp_path / f"{form}-orbax", "float32"), jnp.array([IDS]))
        wanted[form] = pooled.rows(np.asarray(found)[0])
        out = api.convert(ours, tmp_path / form, target="huggingface", quantize=rules).out
        if of_nvidia:
            written = json.loads((out / "config.json").read_text()) | {"model_type": "llama"}
            (out / "config.json").write_text(json.dumps(written))
        word_tokenizer({}).save_pretrained(out)
        models.append({"folder": str(out), "task": pooled.task, "out": str(tmp_path / f"{form}.npy")})
    ask("vllm", str(SCRIPT), {"ids": IDS, "models": models, "results": str(tmp_path / "results.json")})
    assert json.loads((tmp_path / "results.json").read_text()) == [{}] * len(FORMS)
    for form, want in wanted.items():
        have = np.load(tmp_path / f"{form}.npy")
        assert have.shape == want.shape
        if form == "plain":
            assert np.abs(have - want).max() <= 2e-5 * np.abs(want).max()
        else:
            changed = max(np.linalg.norm(want - wanted["plain"]), 0.02 * np.linalg.norm(want))
            assert np.linalg.norm(have - want) <= MOST_OF_ROUNDING[form] * changed, form
