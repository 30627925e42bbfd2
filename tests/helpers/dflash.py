"""Tiny DFlash drafts, and their computation in torch.

The computation follows the formulas of the paper (arXiv:2602.06036) and of the public code of z-lab, speculators and
vLLM. It was written for these tests from the formulas, not copied. transformers has Muse Glimmer's assistant alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import write_checkpoint
from helpers.eagle3 import SPECULATORS, maps

QWEN3_KEYS: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 43,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
CASES: Mapping[str, Mapping[str, Any]] = {
    "z-lab": {
        "architectures": ["DFlashDraftModel"],
        **QWEN3_KEYS,
        "block_size": 4,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 100, "target_layer_ids": [0]},
    },
    "windows": {  # layers with a window are causal; the block size is inside
        "architectures": ["DFlashDraftModel"],
        **QWEN3_KEYS,
        "attention_bias": True,
        "layer_types": MIXED,
        "use_sliding_window": True,
        "sliding_window": 5,
        "dflash_config": {
            **{"mask_token_id": 99, "target_layer_ids": [0], "block_size": 6, "input_embedding_scale": 3.0},
            **{"output_multiplier": 0.2, "final_logit_softcapping": 20.0},
        },
    },
    "both-ways": {
        "architectures": ["DFlashDraftModel"],
        **QWEN3_KEYS,
        "is_causal": False,
        "layer_types": MIXED,
        "use_sliding_window": True,
        "sliding_window": 4,
        "dflash_config": {"mask_token_id": 99, "target_layer_ids": [0], "block_size": 7},
    },
    "speculators": {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {**SPECULATORS, "algorithm": "dflash"},
        "aux_hidden_state_layer_ids": [0, 1],
        "block_size": 5,
        "draft_vocab_size": 37,
        "mask_token_id": 98,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "transformer_layer_config": {**QWEN3_KEYS, "rope_theta": 700.0},
    },
}
"""config.json of tiny drafts for a target of width 48 with two layers."""


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json, the keys inside it beside the others."""
    return {**config.get("transformer_layer_config", {}), **config.get("dflash_config", {}), **config}


def save_dflash(name: str, folder: Path, **changes: Any) -> Path:
    """Writes a draft with random tensors, and returns the folder."""
    config = {**CASES[name], **changes}
    return write_checkpoint(folder, config, tensors_of(config))


def tensors_of(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns random tensors of a draft with this config.json."""
    keys, rng = keys_of(config), np.random.default_rng(0)
    D, F, N, K, H = (
        keys[key]
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    states = keys.get("target_layer_ids") or keys["aux_hidden_state_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, len(states) * D), "hidden_norm.weight": (D,)}
    for layer in range(keys["num_hidden_layers"]):
        front = f"layers.{layer}."
        shapes |= {
            f"{front}input_layernorm.weight": (D,),
            f"{front}post_attention_layernorm.weight": (D,),
            f"{front}self_attn.q_proj.weight": (N * H, D),
            f"{front}self_attn.k_proj.weight": (K * H, D),
            f"{front}self_attn.v_proj.weight": (K * H, D),
            f"{front}self_attn.o_proj.weight": (D, N * H),
            f"{front}self_attn.q_norm.weight": (H,),
            f"{front}self_attn.k_norm.weight": (H,),
            f"{front}mlp.gate_proj.weight": (F, D),
            f"{front}mlp.up_proj.weight": (F, D),
            f"{front}mlp.down_proj.weight": (D, F),
        }
        if keys["attention_bias"]:
            sizes = {"q": N * H, "k": K * H, "v": K * H, "o": D}
            shapes |= {f"{front}self_attn.{each}_proj.bias": (size,) for each, size in sizes.items()}
    shapes["norm.weight"] = (D,)
    tensors = {name: (rng.normal(size=shape) * 0.25).astype("f4") for name, shape in shapes.items()}
    tensors |= {name: np.float32(1) + x for name, x in tensors.items() if "norm" in name}
    if keys.get("draft_vocab_size"):
        chosen = np.sort(rng.choice(keys["vocab_size"], keys["draft_vocab_size"], replace=False))
        head = rng.normal(size=(len(chosen), D)).astype("f4")
        tensors |= {"lm_head.weight": head, **maps(chosen, keys["vocab_size"])}
    return tensors


def block_states(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    states: np.ndarray,
    embedded: np.ndarray,
) -> np.ndarray:
    """Returns the hidden states [B, T, D] of a block behind C tokens, after the last norm.

    Args:
        config: a config.json.
        tensors: of the draft.
        states: hidden states [B, C, s] of the tokens before the block, at the positions 0, 1, ...
        embedded: embeddings [B, T, D] of the block.
    """
    import torch

    keys = keys_of(config)
    N, K, H, eps = (keys[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"))
    kinds = keys.get("layer_types") or ["full_attention"] * keys["num_hidden_layers"]
    w = {name: torch.tensor(x) for name, x in tensors.items() if x.dtype == np.float32}

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def turned(x: Any, places: Any) -> Any:
        angles = places[:, None] * keys["rope_theta"] ** (-torch.arange(0, H, 2) / H)
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
        first, second = x[..., : H // 2], x[..., H // 2 :]
        return x * cos + torch.cat([-second, first], -1) * sin

    context = norm(linear(torch.tensor(states), "fc"), "hidden_norm")
    x = torch.tensor(embedded) * keys.get("input_embedding_scale", 1.0)
    (B, C), T = states.shape[:2], embedded.shape[1]
    places = torch.arange(C + T)
    distance = places[C:, None] - places[None, :]
    for i, kind in enumerate(kinds):
        front, is_sliding = f"layers.{i}.", kind == "sliding_attention"
        attention = f"{front}self_attn."
        normed = norm(x, f"{front}input_layernorm")
        both = torch.cat([context, normed], 1)
        q = norm(linear(normed, f"{attention}q_proj").view(B, T, N, H), f"{attention}q_norm")
        k = norm(linear(both, f"{attention}k_proj").view(B, C + T, K, H), f"{attention}k_norm")
        v = linear(both, f"{attention}v_proj").view(B, C + T, K, H)
        q, k = turned(q, places[C:]), turned(k, places)
        k, v = k.repeat_interleave(N // K, 2), v.repeat_interleave(N // K, 2)
        is_causal = keys.get("is_causal")
        is_causal = is_sliding if is_causal is None else is_causal
        seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        if is_sliding:
            seen &= distance.abs() < keys["sliding_window"]
        scores = torch.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        y = torch.einsum("bnts,bsnh->btnh", weights, v).reshape(B, T, N * H)
        x = x + linear(y, f"{attention}o_proj")
        normed = norm(x, f"{front}post_attention_layernorm")
        gate, up = (linear(normed, f"{front}mlp.{part}_proj") for part in ("gate", "up"))
        x = x + linear(torch.nn.functional.silu(gate) * up, f"{front}mlp.down_proj")
    return np.asarray(norm(x, "norm"))


def save_muse(folder: Path, **keys: Any) -> Path:
    """Writes an assistant of Muse Glimmer as `save_pretrained` does, with random weights, and returns the folder."""
    import torch
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(0)
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    sizes = {key: QWEN3_KEYS[key] for key in (*same, "head_dim", "max_position_embeddings")}
    own = {"block_size": 6, "mask_token_id": 100, "target_layer_ids": [0], "sliding_window": 5}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**sizes, **own, **rope, **keys}))
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.normal_(std=0.25)
            if "norm" in name:
                values.add_(1)
    model.save_pretrained(folder)
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """Returns config.json of a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
