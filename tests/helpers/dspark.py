"""Tiny DSpark drafts, and how they choose tokens, in torch.

The computation follows the formulas of speculators' code (`models/dspark`); it was written for these tests from the
formulas, not copied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import write_checkpoint
from helpers.dflash import QWEN3_KEYS, keys_of, tensors_of
from helpers.eagle3 import SPECULATORS

HEADS: Mapping[str, Any] = {
    "markov_rank": 5,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
OF_SPECULATORS: Mapping[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.9.0",
    "speculators_config": {**SPECULATORS, "algorithm": "dspark"},
    "aux_hidden_state_layer_ids": [0, 1],
    "block_size": 4,
    "draft_vocab_size": 37,
    "mask_token_id": 98,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    "transformer_layer_config": QWEN3_KEYS,
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "deepspec": {  # keys of both heads beside the others; the embedding of the target is a state
        "architectures": ["Qwen3DSparkModel"],
        **QWEN3_KEYS,
        **HEADS,
        "block_size": 5,
        "mask_token_id": 100,
        "num_anchors": 512,
        "num_target_layers": 2,
        "target_layer_ids": [-1, 0],
    },
    "sglang": {  # as SpecForge writes it, without the head that predicts whether tokens are accepted
        "architectures": ["DSparkDraftModel"],
        **QWEN3_KEYS,
        "block_size": 3,
        "dflash_config": {"mask_token_id": 99, "target_layer_ids": [0]},
        "dspark_config": {"markov_rank": 6, "markov_head_type": "vanilla"},
        "enable_confidence_head": False,
    },
    "gated": {**OF_SPECULATORS, **HEADS, "markov_head_type": "gated", "confidence_head_with_markov": False},
    "recurrent": {**OF_SPECULATORS, **HEADS, "markov_head_type": "rnn"},
    "recurrent-masks": {  # the last token drafts none
        **OF_SPECULATORS,
        **HEADS,
        "markov_head_type": "rnn",
        "sample_from_anchor": False,
    },
    "without": {**OF_SPECULATORS, **HEADS, "markov_rank": 0, "enable_confidence_head": False},
}
"""config.json of tiny drafts for a target of width 48 with two layers."""


def heads_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json, the keys of its objects beside them."""
    return {**keys_of(config), **config.get("dspark_config", {})}


def save_dspark(name: str, folder: Path, **changes: Any) -> Path:
    """Writes a draft with random tensors, and returns the folder."""
    config = {**CASES[name], **changes}
    keys, rng = heads_of(config), np.random.default_rng(7)
    V, D, r = keys["vocab_size"], keys["hidden_size"], keys["markov_rank"]
    shapes: dict[str, tuple[int, ...]] = {}
    if r:
        shapes |= {
            "markov_head.markov_w1.weight": (V, r),
            "markov_head.markov_w2.weight": (keys.get("draft_vocab_size") or V, r),
        }
    if keys["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, D + r), "markov_head.gate_proj.bias": (r,)}
    if keys["markov_head_type"] == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + D), "markov_head.joint_proj.bias": (3 * r,)}
    if keys["enable_confidence_head"]:
        shapes["confidence_head.proj.weight"] = (1, D + r * keys["confidence_head_with_markov"])
        if "speculators_model_type" in keys:
            shapes["confidence_head.proj.bias"] = (1,)
    heads = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    return write_checkpoint(folder, config, {**tensors_of(config), **heads})


def chosen_tokens(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], states: np.ndarray, logits: np.ndarray, last: int
) -> list[int]:
    """Returns the drafts of a block, in the vocabulary of the target.

    Args:
        config: a config.json.
        tensors: of the draft.
        states: hidden states [T, D] of the block after the last norm.
        logits: theirs [T, V].
        last: the token before the drafts.
    """
    import torch

    keys = heads_of(config)
    w = {name.removeprefix("markov_head."): torch.tensor(x) for name, x in tensors.items() if x.dtype == np.float32}
    kind, rank, out = keys["markov_head_type"], keys["markov_rank"], []
    state, is_anchored = torch.zeros(rank), keys.get("sample_from_anchor", True)

    def gates(name: str, *inputs: Any) -> Any:
        return torch.cat(inputs) @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    for k, (x, row) in enumerate(zip(torch.tensor(states), torch.tensor(logits), strict=True)):
        if rank:
            before = w["markov_w1.weight"][last]
            if kind == "gated":
                before = torch.sigmoid(gates("gate_proj", x, before)) * before
            elif kind == "rnn":
                gate, new, before = gates("joint_proj", state, before, x).split(rank)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                before = torch.tanh(before)
            row = row + w["markov_w2.weight"] @ before
        if k or is_anchored:
            best = int(row.argmax())
            last = best + int(tensors["d2t"][best]) if "d2t" in tensors else best
            out.append(last)
    return out
