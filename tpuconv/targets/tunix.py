"""Tunix (github.com/google/tunix), version 0.1.7: the trees of its models, as their `params.py` name them."""

from dataclasses import replace
from typing import Any

from tpuconv.models.common.beside import VISION
from tpuconv.names import LEAF
from tpuconv.targets.gemma import ATTENTION_PLACES as GEMMA_ATTENTION
from tpuconv.targets.gemma import GEMMA4_NOTE, gemma4_tree
from tpuconv.targets.gemma import MODEL_PLACES as GEMMA_MODEL
from tpuconv.targets.gemma import NORM_PLACES as GEMMA_NORMS
from tpuconv.targets.needs import (
    GEMMA3_ATTENTION,
    GROUPED,
    HEAD_SCALE,
    NORMALIZED,
    PLAIN_ATTENTION,
    QUERY_SCALE,
    UNSCALED_ROPE,
    USUAL_EPS,
    Needs,
    full_attention_in_each,
)
from tpuconv.targets.target import LayerPlaces, PairForm, PartPlaces, Place, Places, Target, Tree

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


def _tree(places: Places, needs: Needs, **changes: Any) -> Tree:
    """Returns the tree of a model."""
    return Tree(MODEL_PLACES, (LayerPlaces(places, "layers.{L}"),), needs=needs, **changes)


def _gemma(norms: Places, **changes: Any) -> Tree:
    """Returns the tree of a Gemma: keys and values are in one array, norms equal the release. Where there are as many
    heads of keys as of queries, Tunix has all three in one array, for which there is no table."""
    places: Places = {**GEMMA_NORMS, **GEMMA_ATTENTION, **norms, **MLP_PLACES}
    return Tree(GEMMA_MODEL, (LayerPlaces(places, "layers.{L}"),), **changes)


GEMMA_NOTE = "models with as many heads of keys as of queries (Gemma 7B) have no table"


GEMMA12 = _gemma(
    {"post_attn_norm.scale": "post_attn_norm.scale"},
    needs={
        **GROUPED,
        **HEAD_SCALE,
        **UNSCALED_ROPE,
        "rope_theta=10000": lambda config: config.rope.theta == 10_000,
    },
    differs=USUAL_EPS,
    note=GEMMA_NOTE,
)
TUNIX_GEMMA3 = _gemma(
    {},
    needs={
        **GROUPED,
        **QUERY_SCALE,
        **full_attention_in_each(6),
        **GEMMA3_ATTENTION,
        "no final_logit_softcapping": lambda config: not config.final_logit_softcapping,
    },
    differs=USUAL_EPS,
    note=GEMMA_NOTE,
)
TUNIX_GEMMA4 = tuple(
    gemma4_tree(
        {
            **GEMMA_NORMS,
            **{ours: place for ours, place in GEMMA_ATTENTION.items() if "norm" in str(ours)},
            **MLP_PLACES,
            "post_mlp_norm_1.scale": "dense_post_ffw_norm.scale",
            "moe_norm.scale": "moe_pre_ffw_norm.scale",
            "post_moe_norm.scale": "moe_post_ffw_norm.scale",
            "moe.router.kernel": "moe.router_logits",
            "moe.router_scale": "moe.router_scale",
            "moe.expert_scale": "moe.per_expert_scale",
            ("moe.gate.kernel", "moe.up.kernel"): Place("moe.gating_einsum", "E D M, E D M -> E (1 + 1) M D"),
            "moe.down.kernel": "moe.linear",
        },
        "per_layer_input_embedding",
        "layers.{L}",
        has_global_values=has_values,
        note=GEMMA4_NOTE,
    )
    for has_values in (False, True)
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

FIXED_BASE: Needs = {"rope_theta=1000000": lambda config: config.rope.theta == 1_000_000}
OTHER_ROPE = "Tunix 0.1.7 computes with rope_theta 1,000,000 and without rope scaling, whatever its settings say"


TUNIX = Target(
    name="tunix",
    summary="Tunix: fine-tuning and RL of Flax NNX models",
    loading='CheckpointManager("OUT").maybe_restore(model)',
    trees={
        "llama": _tree(
            {**ATTENTION_PLACES, **MLP_PLACES}, {}, note=OTHER_ROPE, differs={**FIXED_BASE, **PLAIN_ATTENTION}
        ),
        "qwen2": _tree({**ATTENTION_PLACES, **BIASES, **MLP_PLACES}, PLAIN_ATTENTION),
        "qwen3": _tree({**ATTENTION_PLACES, **MLP_PLACES}, PLAIN_ATTENTION, note=OTHER_ROPE, differs=FIXED_BASE),
        "qwen3_moe": _tree(
            {**ATTENTION_PLACES, **ROUTED}, {**PLAIN_ATTENTION, **NORMALIZED}, note=OTHER_ROPE, differs=FIXED_BASE
        ),
        "gemma": GEMMA12,
        "gemma2": GEMMA12,
        "gemma3_text": TUNIX_GEMMA3,
        "gemma3": replace(TUNIX_GEMMA3, parts={VISION: IMAGES}),
        "gemma4_text": TUNIX_GEMMA4,
        "gemma4": TUNIX_GEMMA4,
    },
    folder="0/model_params",
    leaf=LEAF,
    pairs=PairForm(loading='CheckpointManager("OUT").maybe_restore(model, restore_only_lora_params=True)'),
    step_item="model_params",
)
