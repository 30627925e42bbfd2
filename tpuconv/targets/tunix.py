"""Tunix (github.com/google/tunix), version 0.1.7: the trees of its models, as their `params.py` name them."""

from tpuconv.targets.target import LayerPlaces, Place, Places, Target, Tree

MODEL_PLACES: Places = {
    "embed.embedding": "embedder.input_embedding",
    "norm.scale": "final_norm.w",
    "lm_head.kernel": "lm_head.w",
}
ATTENTION_PLACES: Places = {
    **{f"attn.{x}.kernel": f"attn.{x}_proj.w" for x in "qkvo"},
    "attn.q_norm.scale": "attn.q_norm.w",
    "attn.k_norm.scale": "attn.k_norm.w",
    "attn_norm.scale": "input_layernorm.w",
    "mlp_norm.scale": "post_attention_layernorm.w",
}
BIASES: Places = {
    f"attn.{x}.bias": Place(f"attn.{x}_bias", f"{heads} H -> ({heads} H)")
    for x, heads in zip("qkv", "NKK", strict=True)
}
MLP_PLACES: Places = {f"mlp.{x}.kernel": f"mlp.{x}_proj.kernel" for x in ("gate", "up", "down")}
ROUTED: Places = {
    "moe.router.kernel": "mlp.router.kernel",
    **{f"moe.{x}.kernel": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def _tree(places: Places, note: str = "") -> Tree:
    """The tree of a model."""
    return Tree(MODEL_PLACES, (LayerPlaces(places, "layers.{L}"),), note=note)


OTHER_ROPE = "Tunix 0.1.7 computes with rope_theta 1,000,000 and without rope scaling, whatever its settings say"


TUNIX = Target(
    name="tunix",
    summary="Tunix: fine-tuning and RL of Flax NNX models",
    loading="CheckpointManager(OUT).maybe_restore(model)",
    trees={
        "llama": _tree({**ATTENTION_PLACES, **MLP_PLACES}, OTHER_ROPE),
        "qwen2": _tree({**ATTENTION_PLACES, **BIASES, **MLP_PLACES}),
        "qwen3": _tree({**ATTENTION_PLACES, **MLP_PLACES}, OTHER_ROPE),
        "qwen3_moe": _tree({**ATTENTION_PLACES, **ROUTED}, OTHER_ROPE),
    },
    folder="0/model_params",
    leaf=".value",
    step_item="model_params",
)
