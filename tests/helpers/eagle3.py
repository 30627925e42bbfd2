"""Tiny EAGLE-3 drafts, and their computation in torch.

The computation follows the formulas of the paper (arXiv:2503.01840) and of the public code of EAGLE, SGLang, vLLM and
speculators, which agree. It was written for these tests from the formulas, not copied. transformers has no such model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import read_tensors, write_checkpoint

LLAMA_KEYS = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 30,
    "intermediate_size": 43,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500.0,
}
SPECULATORS = {
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "sglang": {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA_KEYS,
        "draft_vocab_size": 37,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True},
    },
    "narrow": {  # narrower than its target, with biases, without maps
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA_KEYS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "attention_bias": True,
        "mlp_bias": True,
        "target_hidden_size": 48,
        "tie_word_embeddings": False,
    },
    "speculators": {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "speculators_config": SPECULATORS,
        "draft_vocab_size": 41,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 4],
        "target_hidden_size": None,
        "transformer_layer_config": {
            **LLAMA_KEYS,
            "num_key_value_heads": 1,
            "head_dim": 18,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 12,
            },
        },
    },
}
"""config.json of tiny drafts with sizes that differ from each other."""
WITH_EMBEDDING = ("narrow", "speculators")


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config.json, the keys of its layer beside the others."""
    return {**config.get("transformer_layer_config", {}), **config}


def count_of_states(config: Mapping[str, Any]) -> int:
    keys = keys_of(config)
    inside = keys.get("eagle_config") or {}
    named = [place.get("eagle_aux_hidden_state_layer_ids") for place in (keys, inside)]
    return len(next(filter(None, named), (2, 0, -3)))


def random_tensors(config: Mapping[str, Any], has_embedding: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors of a draft, under the names of its format."""
    keys, rng = keys_of(config), np.random.default_rng(seed)
    D, F, V = keys["hidden_size"], keys["intermediate_size"], keys["vocab_size"]
    N, K = keys["num_attention_heads"], keys["num_key_value_heads"]
    H = keys.get("head_dim") or D // N
    draft = keys.get("draft_vocab_size") or V
    states = count_of_states(config) * (keys.get("target_hidden_size") or D)
    layer = "layers.0" if "speculators_config" in config else "midlayer"
    shapes = {
        "fc.weight": (D, states),
        f"{layer}.self_attn.q_proj.weight": (N * H, 2 * D),
        f"{layer}.self_attn.k_proj.weight": (K * H, 2 * D),
        f"{layer}.self_attn.v_proj.weight": (K * H, 2 * D),
        f"{layer}.self_attn.o_proj.weight": (D, N * H),
        f"{layer}.mlp.gate_proj.weight": (F, D),
        f"{layer}.mlp.up_proj.weight": (F, D),
        f"{layer}.mlp.down_proj.weight": (D, F),
        "lm_head.weight": (draft, D),
    }
    if keys.get("attention_bias"):
        shapes |= {
            f"{layer}.self_attn.{x}_proj.bias": (n,) for x, n in (("q", N * H), ("k", K * H), ("v", K * H), ("o", D))
        }
    if keys.get("mlp_bias"):
        shapes |= {f"{layer}.mlp.{x}_proj.bias": (n,) for x, n in (("gate", F), ("up", F), ("down", D))}
    if has_embedding:
        shapes["embed_tokens.weight"] = (V, D)
    tensors = {name: (rng.normal(size=shape) * 0.25).astype("f4") for name, shape in shapes.items()}
    norms = [f"{layer}.{x}" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    for name in (*norms, "norm"):
        tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, D).astype("f4")
    if keys.get("norm_before_fc"):
        tensors["input_norm.weight"] = rng.uniform(0.5, 1.5, states).astype("f4")
    if draft != V:
        tensors |= maps(np.sort(rng.choice(V, draft, replace=False)), V)
    return tensors


def maps(chosen: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """Returns the maps of a draft whose tokens are these tokens of its target."""
    t2d = np.zeros(vocab, bool)
    t2d[chosen] = True
    return {"d2t": (chosen - np.arange(len(chosen))).astype("i8"), "t2d": t2d}


def save_draft(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes the draft of a case, and returns the folder."""
    config = json.loads(json.dumps({**CASES[name], **changes}))
    return write_checkpoint(folder, config, random_tensors(config, name in WITH_EMBEDDING, seed))


def drafted(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    states_BTX: np.ndarray,
    embedded_BTD: np.ndarray,
    pos_BT: np.ndarray,
    further_BTD: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits [B, T, draft vocabulary] and hidden states [B, T, D] of a draft.

    Args:
        states_BTX: hidden states of the target, before `fc`.
        embedded_BTD: embeddings of the tokens after each.
        pos_BT: positions.
        further_BTD: hidden states of the draft for the tokens behind those of `states_BTX`.
    """
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention, silu
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    keys = keys_of(config)
    layer = "layers.0" if "speculators_config" in config else "midlayer"
    weights = {name: torch.tensor(values) for name, values in tensors.items()}
    N, K = keys["num_attention_heads"], keys["num_key_value_heads"]

    def product(x: Any, name: str) -> Any:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + keys["rms_norm_eps"]) * weights[f"{name}.weight"]

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (-1, keys.get("head_dim") or keys["hidden_size"] // N)).transpose(1, 2)

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]

    of_rope = LlamaConfig(**{key: value for key, value in keys.items() if key in {*LLAMA_KEYS, "head_dim"}})
    rope = {"rope_type": "default", "rope_theta": keys["rope_theta"], **keys.get("rope_scaling", {})}
    of_rope.rope_parameters = rope
    states = torch.tensor(states_BTX)
    if keys.get("norm_before_fc"):
        states = norm(states, "input_norm")
    x = product(states, "fc")
    if further_BTD is not None:
        x = torch.cat([x, torch.tensor(further_BTD)], dim=1)
    normed = norm(x, f"{layer}.hidden_norm")
    joined = torch.cat([norm(torch.tensor(embedded_BTD), f"{layer}.input_layernorm"), normed], dim=-1)
    q, k, v = (heads(product(joined, f"{layer}.self_attn.{part}_proj")) for part in "qkv")
    cos, sin = LlamaRotaryEmbedding(of_rope)(x, torch.tensor(pos_BT))
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    k, v = (each.repeat_interleave(N // K, dim=1) for each in (k, v))
    y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = (normed if keys.get("norm_before_residual") else x) + product(y, f"{layer}.self_attn.o_proj")
    normed = norm(x, f"{layer}.post_attention_layernorm")
    gated = silu(product(normed, f"{layer}.mlp.gate_proj")) * product(normed, f"{layer}.mlp.up_proj")
    x = x + product(gated, f"{layer}.mlp.down_proj")
    return product(norm(x, "norm"), "lm_head").numpy(), x.numpy()


def save_agreeing_draft(target: Path, folder: Path, tokens: np.ndarray, noise: float = 0.0) -> Path:
    """Writes a draft of a target whose next token depends on the last one mostly, and returns the folder.

    The attention of the draft sees the last token alone, since queries and keys are the same and large, and hands its
    embedding on to the head of the target, in place of the embedding before. So it predicts what the target does, with
    some noise.

    Args:
        target: a release whose embedding has `hidden_size` values, and whose head has no factor.
        folder: to write.
        tokens: the vocabulary of the draft.
        noise: the size of what is added to the embedding.
    """
    tensors = read_tensors(target)
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)

    def tensor(*ends: str) -> np.ndarray:
        return next(x for end in ends for name, x in tensors.items() if name.endswith(end)).astype("f4")

    embedding = tensor("embed_tokens.weight", "embeddings.weight")
    head = tensor("lm_head.weight", "embed_tokens.weight")
    (V, D), rng = embedding.shape, np.random.default_rng(0)
    one = np.ones(D, "f4")
    both = rng.normal(size=(D, D)).astype("f4") * 4
    zero, square = np.zeros((D, D), "f4"), np.eye(D, dtype="f4")
    keys = {
        **LLAMA_KEYS,
        "vocab_size": V,
        "hidden_size": D,
        "num_attention_heads": D // 8,
        "num_key_value_heads": D // 8,
    }
    layer = {
        "input_layernorm.weight": one,
        "hidden_norm.weight": one,
        "post_attention_layernorm.weight": one,
        "self_attn.q_proj.weight": np.concatenate([both, zero], axis=1),
        "self_attn.k_proj.weight": np.concatenate([both, zero], axis=1),
        "self_attn.v_proj.weight": np.concatenate([square, -square], axis=1),
        "self_attn.o_proj.weight": square + noise * rng.normal(size=(D, D)).astype("f4"),
        **{f"mlp.{x}_proj.weight": np.zeros((LLAMA_KEYS["intermediate_size"], D), "f4") for x in ("gate", "up")},
        "mlp.down_proj.weight": np.zeros((D, LLAMA_KEYS["intermediate_size"]), "f4"),
    }
    written = {
        **{f"midlayer.{name}": values for name, values in layer.items()},
        "fc.weight": np.zeros((D, 3 * D), "f4"),
        "norm.weight": tensor(*LAST_NORMS) + float(config["model_type"] in CENTERED),
        "lm_head.weight": head[tokens],
        **maps(tokens, V),
    }
    of_draft = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **keys,
        "draft_vocab_size": len(tokens),
        "eagle_aux_hidden_state_layer_ids": [0, 1, config["num_hidden_layers"]],
    }
    return write_checkpoint(folder, of_draft, written)


LAST_NORMS = ("model.norm.weight", "language_model.norm.weight")
CENTERED = ("qwen3_next",)
"""Model types whose norms store the scale less 1."""


def save_twins(folder: Path) -> tuple[Path, Path]:
    """Writes a target whose next token depends on all tokens before it, and a draft with its only layer, which is never
    wrong: any fault of positions, masks or states of the draft is seen in what is accepted.

    The draft has no input of the layer beside the norms, since `hidden_norm` is 0, and the embeddings of the target are
    so small that it has none either. The draft does not see the first token, whose embedding is 0: it adds nothing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = {**LLAMA_KEYS, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "rms_norm_eps": 1e-12}
    torch.manual_seed(0)
    of_target = {key: value for key, value in keys.items() if key not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": keys["rope_theta"]}
    target = LlamaForCausalLM(LlamaConfig(**of_target, rope_parameters=rope, tie_word_embeddings=False))
    with torch.no_grad():
        for name, values in target.named_parameters():
            values.uniform_(0.5, 1.5) if "norm" in name else values.normal_(std=0.25)
        target.model.embed_tokens.weight.mul_(1e-4)[0] = 0
        target.model.layers[0].mlp.down_proj.weight.zero_()
    target.save_pretrained(folder / "target")
    tensors, layer, zero = read_tensors(folder / "target"), "layers.0.", np.zeros((48, 48), "f4")
    written = {name.removeprefix("model."): x for name, x in tensors.items() if "embed_tokens" not in name}
    for each in ("q_proj", "k_proj", "v_proj"):
        name = f"{layer}self_attn.{each}.weight"
        written[name] = np.concatenate([written[name], zero], axis=1)
    written |= {f"{layer}hidden_norm.weight": zero[0], "fc.weight": np.ones((48, 96), "f4")}
    config = {
        **CASES["speculators"],
        "draft_vocab_size": keys["vocab_size"],
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
        "transformer_layer_config": keys,
    }
    return folder / "target", write_checkpoint(folder / "draft", config, written)
