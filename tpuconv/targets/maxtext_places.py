"""Places that many of MaxText's models share, by our names."""

from tpuconv.targets.target import Places

MODEL_PLACES: Places = {
    "embed.embedding": "token_embedder.embedding",
    "norm.scale": "decoder.decoder_norm.scale",
    "lm_head.kernel": "decoder.logits_dense.kernel",
}
NORM_PLACES: Places = {
    "attn_norm.scale": "pre_self_attention_layer_norm.scale",
    "mlp_norm.scale": "post_self_attention_layer_norm.scale",
    "moe_norm.scale": "post_self_attention_layer_norm.scale",
}
MLP_PLACES: Places = {
    "mlp.gate.kernel": "mlp.wi_0.kernel",
    "mlp.up.kernel": "mlp.wi_1.kernel",
    "mlp.down.kernel": "mlp.wo.kernel",
}
ATTENTION_PARTS = {"q": "query", "k": "key", "v": "value", "o": "out"}


def attention_places(name: str = "self_attention", biases: str = "") -> Places:
    """Returns the places of attention with grouped queries, and with biases of these projections."""
    return {
        **{f"attn.{ours}.kernel": f"{name}.{theirs}.kernel" for ours, theirs in ATTENTION_PARTS.items()},
        **{f"attn.{ours}.bias": f"{name}.{ATTENTION_PARTS[ours]}.bias" for ours in biases},
        "attn.q_norm.scale": f"{name}.query_norm.scale",
        "attn.k_norm.scale": f"{name}.key_norm.scale",
    }


def expert_places(name: str) -> Places:
    """Returns the places of experts and their router."""
    return {
        "moe.router.kernel": f"{name}.gate.kernel",
        "moe.gate.kernel": f"{name}.wi_0",
        "moe.up.kernel": f"{name}.wi_1",
        "moe.down.kernel": f"{name}.wo",
    }


def shared_expert_places(name: str) -> Places:
    """Returns the places of the expert that takes every token."""
    return {
        "moe.shared.gate.kernel": f"{name}.wi_0.kernel",
        "moe.shared.up.kernel": f"{name}.wi_1.kernel",
        "moe.shared.down.kernel": f"{name}.wo.kernel",
    }
