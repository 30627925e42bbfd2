"""Tunix (github.com/google/tunix), version 0.1.7: the trees of its models, as their `params.py` name them."""

from dataclasses import replace
from typing import Any

from tpuconv.models.common.beside import VISION
from tpuconv.targets.target import LayerPlaces, PartPlaces, Place, Places, Target, Tree

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
    """Returns the tree of a model."""
    return Tree(MODEL_PLACES, (LayerPlaces(places, "layers.{L}"),), note=note)


def _gemma(norms: Places, **changes: Any) -> Tree:
    """Returns the tree of a Gemma: keys and values are in one array, norms equal the release. Where there are as many
    heads of keys as of queries, Tunix has all three in one array, for which there is no table."""
    places: Places = {
        "attn.q.kernel": Place("attn.q_einsum.w", "D N H -> N D H"),
        ("attn.k.kernel", "attn.v.kernel"): Place("attn.kv_einsum.w", "D K H, D K H -> (1 + 1) K D H"),
        "attn.o.kernel": "attn.attn_vec_einsum.w",
        "attn.q_norm.scale": "attn._query_norm.scale",
        "attn.k_norm.scale": "attn._key_norm.scale",
        "attn_norm.scale": "pre_attention_norm.scale",
        "mlp_norm.scale": "pre_ffw_norm.scale",
        "post_mlp_norm.scale": "post_ffw_norm.scale",
        **norms,
        **MLP_PLACES,
    }
    model: Places = {"embed.embedding": "embedder.input_embedding", "norm.scale": "final_norm.scale"}
    return Tree(model, (LayerPlaces(places, "layers.{L}"),), **changes)


GEMMA_NOTE = "models with as many heads of keys as of queries (Gemma 7B) have no table"


def _is_grouped(config: Any) -> bool:
    return bool(config.num_key_value_heads != config.num_attention_heads)


GEMMA12 = _gemma(
    {"post_attn_norm.scale": "post_attn_norm.scale"},
    when=lambda config: (
        _is_grouped(config) and getattr(config, "query_pre_attn_scalar", config.head_dim) == config.head_dim
    ),
    note=GEMMA_NOTE,
)
TUNIX_GEMMA3 = _gemma(
    {"post_attn_norm.scale": "post_attention_norm.scale"},
    when=lambda config: (
        _is_grouped(config)
        and config.query_pre_attn_scalar in (config.head_dim, config.hidden_size // config.num_attention_heads)
    ),
    note=GEMMA_NOTE,
)

TUNIX_SIGLIP, SIGLIP_LAYER = "vision_encoder.siglip_encoder", "vision_encoder.siglip_encoder.transformer.blocks.{L}"
ATTENTION_INPUTS = {"q": "query", "k": "key", "v": "value"}
IMAGES = PartPlaces(
    {
        "patch.kernel": Place(f"{TUNIX_SIGLIP}.embedding.kernel", "(X p q) D -> p q X D"),
        "patch.bias": f"{TUNIX_SIGLIP}.embedding.bias",
        "positions": Place(f"{TUNIX_SIGLIP}.pos_embedding", "P D -> 1 P D"),
        **{
            f"layers.{{L}}.{ours}.{x}": f"{SIGLIP_LAYER}.{theirs}.{x}"
            for ours, theirs in (("attn_norm", "ln1"), ("mlp_norm", "ln2"))
            for x in ("scale", "bias")
        },
        **{
            f"layers.{{L}}.attn.{x}.kernel": Place(f"{SIGLIP_LAYER}.attn.{name}_proj.kernel", "D N H -> D (N H)")
            for x, name in ATTENTION_INPUTS.items()
        },
        **{
            f"layers.{{L}}.attn.{x}.bias": Place(f"{SIGLIP_LAYER}.attn.{name}_proj.bias", "N H -> (N H)")
            for x, name in ATTENTION_INPUTS.items()
        },
        "layers.{L}.attn.o.kernel": Place(f"{SIGLIP_LAYER}.attn.out_proj.kernel", "N H D -> (N H) D"),
        "layers.{L}.attn.o.bias": f"{SIGLIP_LAYER}.attn.out_proj.bias",
        **{
            f"layers.{{L}}.mlp.{ours}.{x}": f"{SIGLIP_LAYER}.mlp.{theirs}.{x}"
            for ours, theirs in (("up", "fc1"), ("down", "fc2"))
            for x in ("kernel", "bias")
        },
        "norm.scale": f"{TUNIX_SIGLIP}.transformer.encoder_norm.scale",
        "norm.bias": f"{TUNIX_SIGLIP}.transformer.encoder_norm.bias",
        "projector.matrix.kernel": "embedder.mm_input_projection.w",
        "projector.norm.scale": "embedder.mm_soft_embedding_norm.scale",
    },
    when=lambda config: not config.vision_use_head,
)

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
        "gemma": GEMMA12,
        "gemma2": GEMMA12,
        "gemma3_text": TUNIX_GEMMA3,
        "gemma3": replace(TUNIX_GEMMA3, parts={VISION: IMAGES}),
    },
    folder="0/model_params",
    leaf=".value",
    step_item="model_params",
)
