"""The library `gemma` (github.com/google-deepmind/gemma), version 4.0.1: the trees of its models, as their Flax modules
name them. Norms and embeddings equal the release."""

from dataclasses import replace
from typing import Any

from tpuconv.targets.needs import (
    GEMMA3_ATTENTION,
    GEMMA3N_STREAMS,
    GROUPED,
    QUERY_SCALE,
    SHARED_KEYS,
    USUAL_EPS,
    WHOLE_VOCABULARY,
    rope_of,
)
from tpuconv.targets.target import LayerPlaces, Place, Places, Target, Tree

MODEL_PLACES: Places = {"embed.embedding": "embedder.input_embedding", "norm.scale": "final_norm.scale"}
NORM_PLACES: Places = {
    "attn_norm.scale": "pre_attention_norm.scale",
    "post_attn_norm.scale": "post_attention_norm.scale",
    "mlp_norm.scale": "pre_ffw_norm.scale",
    "post_mlp_norm.scale": "post_ffw_norm.scale",
}
ATTENTION_PLACES: Places = {
    "attn.q.kernel": Place("attn.q_einsum.w", "D N H -> N D H"),
    ("attn.k.kernel", "attn.v.kernel"): Place("attn.kv_einsum.w", "D K H, D K H -> (1 + 1) K D H"),
    "attn.o.kernel": "attn.attn_vec_einsum.w",
    "attn.q_norm.scale": "attn._query_norm.scale",
    "attn.k_norm.scale": "attn._key_norm.scale",
}
GEMMA4_LAYER_INPUTS: Places = {
    "per_layer_gate.kernel": "per_layer_input_gate.w",
    "per_layer_projection.kernel": "per_layer_projection.w",
    "post_per_layer_norm.scale": "post_per_layer_input_norm.scale",
    "layer_scalar": "skip_scale",
}


def _attention(kind: str, H: str, K: str, has_values: bool, apart: str) -> tuple[LayerPlaces, ...]:
    """Returns the places of queries, keys and values of the layers of a kind, which have heads of their own sizes."""
    key = f"D {K} {H}"
    joined = Place("attn.kv_einsum.w", f"{key}, {key} -> (1 + 1) {K} D {H}")
    alone = Place("attn.k_einsum.w", f"{key} -> {K} D {H}")
    kv: Places = {("attn.k.kernel", "attn.v.kernel"): joined} if has_values else {"attn.k.kernel": alone}
    queries: Places = {"attn.q.kernel": Place("attn.q_einsum.w", f"D N {H} -> N D {H}")}
    places = {f"{kind}_layers": queries, f"{kind}_kv_layers": kv, f"unused_{kind}_layers": kv}
    return tuple(LayerPlaces(x, apart.replace("{L}", f"{{{name}}}"), letter=name) for name, x in places.items())


def _mlps(name: str, apart: str) -> tuple[LayerPlaces, ...]:
    """Returns the places of dense MLPs of both widths."""
    widths = {"narrow_layers": "F", "wide_layers": "wide_mlp"}
    return tuple(
        LayerPlaces(_dense(name, F), apart.replace("{L}", f"{{{kind}}}"), letter=kind) for kind, F in widths.items()
    )


def gemma4_tree(
    layers: Places,
    embeddings: str,
    apart: str,
    mlps: tuple[LayerPlaces, ...] = (),
    *,
    has_global_values: bool,
    when: Any = lambda config: True,
    note: str,
) -> Tree:
    """Returns the tree of a Gemma 4, whose layers with and without a sliding window have heads of their own sizes.

    Args:
        layers: the places that all layers have.
        embeddings: the name of the embeddings of all layers.
        apart: what stands before the names of a layer.
        mlps: the places of dense MLPs, if they differ by width.
        has_global_values: whether the layers without a window have a matrix for values.
        when: whether the tree belongs to a config, besides.
        note: what a user must know to load it.
    """
    model: Places = {
        **MODEL_PLACES,
        "per_layer.embed.embedding": f"embedder.{embeddings}",
        "per_layer.projection.kernel": "embedder.per_layer_model_projection.w",
        "per_layer.norm.scale": "embedder.per_layer_projection_norm.scale",
    }
    return Tree(
        model,
        (
            LayerPlaces({**layers, **GEMMA4_LAYER_INPUTS, "attn.o.kernel": "attn.attn_vec_einsum.w"}, apart),
            *_attention("window", "H", "K", True, apart),
            *_attention("full", "full_head_dim", "full_kv_heads", has_global_values, apart),
            *mlps,
        ),
        when=lambda config: config.has_global_values == has_global_values and when(config),
        layer_sets=lambda config: config.unused_layer_sets,
        needs={**WHOLE_VOCABULARY, **SHARED_KEYS},
        differs={"a dense MLP alone": lambda config: not config.enable_moe_block, **USUAL_EPS},
        note=note,
    )


def _dense(name: str, F: str = "F") -> Places:
    """Returns the places of a dense MLP of the width F."""
    return {
        ("mlp.gate.kernel", "mlp.up.kernel"): Place(f"{name}.gating_einsum", f"D {F}, D {F} -> (1 + 1) {F} D"),
        "mlp.down.kernel": f"{name}.linear",
    }


GEMMA4_MIXTURE: Places = {
    "mlp_norm.scale": "pre_ffw2_norm.scale",
    "post_mlp_norm_1.scale": "post_ffw2_norm.scale",
    "moe_norm.scale": "pre_ffw_norm.scale",
    "post_moe_norm.scale": "post_ffw1_norm.scale",
    "moe.router.kernel": "mlp.router_logits.w",
    "moe.router_scale": "mlp.router_scale",
    "moe.expert_scale": "mlp.per_expert_scale",
    ("moe.gate.kernel", "moe.up.kernel"): Place("mlp.gating_einsum.w", "E D M, E D M -> E (1 + 1) M D"),
    "moe.down.kernel": "mlp.linear.w",
}
GEMMA4_NORMS: Places = {"attn.q_norm.scale": "attn.query_norm.scale", "attn.k_norm.scale": "attn.key_norm.scale"}

GEMMA_LAYER = "layer_{L}"
CONFIG_NOTE = "give num_embed as vocab_size of config.json, and transpose_gating_einsum=True, which Gemma 2 2B lacks"
GEMMA4_NOTE = "the router of experts differs"


GEMMA23 = Tree(
    MODEL_PLACES,
    (LayerPlaces({**NORM_PLACES, **ATTENTION_PLACES, **_dense("mlp")}, GEMMA_LAYER),),
    needs={**GROUPED, **QUERY_SCALE, **rope_of("default", "linear")},
    differs=USUAL_EPS,
    note=CONFIG_NOTE,
)
GEMMA3 = replace(GEMMA23, needs={**GEMMA23.needs, **GEMMA3_ATTENTION})
GEMMA4 = tuple(
    gemma4_tree(
        {**NORM_PLACES, **GEMMA4_NORMS, **(GEMMA4_MIXTURE if has_experts else {})},
        "per_layer_embeddings",
        GEMMA_LAYER,
        _mlps("mlp2" if has_experts else "mlp", GEMMA_LAYER),
        has_global_values=has_values,
        when=lambda config, has_experts=has_experts: config.enable_moe_block == has_experts,
        note=GEMMA4_NOTE,
    )
    for has_experts in (False, True)
    for has_values in (False, True)
)

GEMMA3N_LAYERS: Places = {
    **NORM_PLACES,
    **GEMMA4_NORMS,
    **_dense("mlp"),
    "attn.o.kernel": "attn.attn_vec_einsum.w",
    "per_layer_gate.kernel": "per_layer_mapping.per_layer_input_gate.w",
    "per_layer_projection.kernel": "per_layer_mapping.per_layer_projection.w",
    "post_per_layer_norm.scale": "per_layer_mapping.post_per_layer_input_norm.scale",
    "altup.router_norm.scale": "altup.router_norm_layer.scale",
    "altup.router.kernel": "altup.modality_router.w",
    "altup.prediction.kernel": "altup.prediction_coefs",
    "altup.correction.kernel": "altup.correction_coefs",
    "altup.output_scale": "altup.correct_output_scale",
    "laurel.left.kernel": "laurel.linear_left.w",
    "laurel.right.kernel": "laurel.linear_right.w",
    "laurel.norm.scale": "post_laurel_norm.scale",
}


def _gemma3n_tree(embeddings: Place, when: Any) -> Tree:
    """Returns the tree of a Gemma 3n: layers that share keys and values have no arrays for them."""

    def of_streams(name: str) -> str:
        return f"{name}_{{side_streams}}.{name}_{{side_streams}}"

    model: Places = {
        **MODEL_PLACES,
        "embed.embedding": embeddings,
        "per_layer.embed.embedding": "embedder.per_layer_input_embedding",
        "per_layer.projection.kernel": "embedder.per_layer_input_projection.w",
        "per_layer.norm.scale": "embedder.per_layer_projection_norm.scale",
        "altup.kernel": of_streams("altup_projection"),
        "norm.streams.kernel": of_streams("altup_unembed_projection"),
    }
    return Tree(
        model,
        (
            LayerPlaces(GEMMA3N_LAYERS, GEMMA_LAYER),
            *_attention("window", "H", "K", True, GEMMA_LAYER),
            *_attention("full", "full_head_dim", "full_kv_heads", True, GEMMA_LAYER),
        ),
        when=when,
        needs={**GROUPED, **SHARED_KEYS, **GEMMA3N_STREAMS, **rope_of("default", "linear")},
        differs=USUAL_EPS,
        note="give num_embed as vocab_size_per_layer_input of config.json, and its final_logit_softcapping",
    )


GEMMA3N = (
    _gemma3n_tree(
        Place("embedder.input_embedding"), lambda config: config.vocab_size == config.vocab_size_per_layer_input
    ),
    _gemma3n_tree(
        Place(
            "embedder.input_embedding",
            "(layer_vocab + further_vocab) D -> layer_vocab D, further_vocab D",
            others=("embedder.further_embedding",),
        ),
        lambda config: config.vocab_size > config.vocab_size_per_layer_input,
    ),
)

GEMMA = Target(
    name="gemma",
    summary="the library gemma of Google DeepMind: Flax Linen models",
    loading='gm.ckpts.load_params("OUT/params")',
    trees={
        "gemma2": GEMMA23,
        "gemma3_text": GEMMA3,
        "gemma3": GEMMA3,
        "gemma3n_text": GEMMA3N,
        "gemma3n": GEMMA3N,
        "gemma4_text": GEMMA4,
        "gemma4": GEMMA4,
    },
)
