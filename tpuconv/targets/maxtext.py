"""MaxText (github.com/AI-Hypercomputer/maxtext), version 0.2.5: names and shapes of its own models.

The value changes come from its `checkpoint_conversion/utils/param_mapping.py`: queries are stored with the factor
1 / sqrt(head dimension) where its attention has none, and Llama 3.1's heads in interleaved pairs.
"""

from dataclasses import replace
from typing import Any

from tpuconv.models.common.beside import AUDIO, VISION
from tpuconv.notation.arithmetic import Plus, Times
from tpuconv.targets.maxtext_encoders import (
    GEMMA3_IMAGES,
    GEMMA4_IMAGES,
    LLAMA4_IMAGES,
    OMNI_SOUNDS,
    qwen3_images,
)
from tpuconv.targets.maxtext_places import (
    ATTENTION_PARTS,
    MLP_PLACES,
    MODEL_PLACES,
    NORM_PLACES,
    attention_places,
    expert_places,
    shared_expert_places,
)
from tpuconv.targets.maxtext_streams import DEEPSEEK4
from tpuconv.targets.needs import (
    ATTENTION_TO_ALL,
    DELTA_LAYERS,
    DELTA_PERIOD,
    DENSE_FIRST,
    GEMMA3_ATTENTION,
    HAS_SHARED,
    HEAD_SCALE,
    LLAMA4_LAYERS,
    LLAMA31_ROPE,
    NO_WINDOWS,
    NORMALIZED,
    QUERY_SCALE,
    ROPE_OF_HALVES,
    UNSCALED_ROPE,
    Needs,
    full_attention_in_each,
    rope_of,
    yarn_scales,
)
from tpuconv.targets.target import LayerPlaces, PairForm, Place, Places, Target, Tree

SCALED_QUERY = Times("H", -0.5)


def _alike(places: Places, needs: Needs = ATTENTION_TO_ALL, **changes: Any) -> Tree:
    """Returns the tree of a model whose layers are all alike."""
    layers = LayerPlaces(places, "decoder.layers_{L}", "decoder.layers")
    return Tree(MODEL_PLACES, (layers,), needs=needs, **changes)


def _periodic(period: int, places: Places, needs: Needs, rest: str = "", **changes: Any) -> Tree:
    """Returns the tree of a model whose layers are alike at the same place of a period."""
    layers = LayerPlaces(places, "decoder.layers_{L}", "decoder.layers.layers_{#}", rest=rest)
    return Tree(MODEL_PLACES, (layers,), period, needs=needs, **changes)


QWEN2 = _alike({**NORM_PLACES, **attention_places(biases="qkv"), **MLP_PLACES})
QWEN = _alike({**NORM_PLACES, **attention_places(), **MLP_PLACES})
QWEN_MOE = _alike(
    {**NORM_PLACES, **attention_places(), **expert_places("moe_block")}, {**ATTENTION_TO_ALL, **NORMALIZED}
)

SCALED: Places = {
    **NORM_PLACES,
    **attention_places(),
    **MLP_PLACES,
    "attn.q.kernel": Place("self_attention.query.kernel", arithmetic=SCALED_QUERY),
}
PAIRS: Places = {
    **SCALED,
    "attn.q.kernel": Place(
        "self_attention.query.kernel", "D N (half_head + half_head) -> D N (half_head (1 + 1))", SCALED_QUERY
    ),
    "attn.k.kernel": Place("self_attention.key.kernel", "D K (half_head + half_head) -> D K (half_head (1 + 1))"),
}
LLAMA_TREE = (
    _alike(
        PAIRS,
        NO_WINDOWS,
        when=lambda config: config.rope.type == "llama3",
        differs=LLAMA31_ROPE,
        note="Llama 3.1 and later: give rope_type=llama3.1, which the model names llama3.1-... imply",
    ),
    _alike(SCALED),
)

GPT_OSS_TREE = _periodic(
    2,
    {
        **NORM_PLACES,
        **attention_places("GptOssAttention", "qkvo"),
        **expert_places("GptOssMlp"),
        "attn.sinks": "GptOssAttention.sinks",
        "moe.router.bias": "GptOssMlp.gate.bias",
        "moe.gate.bias": "GptOssMlp.wi_0_bias",
        "moe.up.bias": "GptOssMlp.wi_1_bias",
        "moe.down.bias": "GptOssMlp.wo_bias",
    },
    {**full_attention_in_each(2), **ROPE_OF_HALVES, "swiglu_alpha=1.702": lambda config: config.swiglu_alpha == 1.702},
)


LLAMA4 = _periodic(
    4,
    {
        **NORM_PLACES,
        **{f"attn.{ours}.kernel": f"self_attention.{theirs}.kernel" for ours, theirs in ATTENTION_PARTS.items()},
        **MLP_PLACES,
        **expert_places("Llama4MoEBlock_0.MoeBlock_0"),
        **shared_expert_places("Llama4MoEBlock_0.shared_experts"),
    },
    {**LLAMA4_LAYERS, **rope_of("default", "llama3")},
    differs=LLAMA31_ROPE,
    note="Maverick: give rope_use_scale=false, as the model llama4-17b-128e does; MaxText lacks Scout's rope scaling",
)

OLMO3 = _periodic(
    4,
    {
        **attention_places("attention", "qkvo"),
        **MLP_PLACES,
        "attn.q_norm.scale": Place("attention.query_norm.scale", "N H -> (N H)"),
        "attn.k_norm.scale": Place("attention.key_norm.scale", "K H -> (K H)"),
        "post_attn_norm.scale": "post_self_attention_layer_norm.scale",
        "post_mlp_norm.scale": "post_mlp_layer_norm.scale",
    },
    {**full_attention_in_each(4), **rope_of("default", "yarn")},
    differs=UNSCALED_ROPE,
)

GEMMA_NORMS = {
    "attn_norm": "pre_self_attention_norm",
    "post_attn_norm": "post_self_attention_norm",
    "mlp_norm": "pre_ffw_norm",
    "post_mlp_norm": "post_ffw_norm",
}


def _gemma(tree: Tree, factor: Times) -> Tree:
    """Returns the tree of a Gemma, whose norms hold 1 + w, and whose embedding is multiplied by sqrt(D)."""
    embedding = Place("token_embedder.embedding", arithmetic=factor)
    norm = Place("decoder.decoder_norm.scale", arithmetic=Plus(1.0))
    return replace(
        tree,
        places={"embed.embedding": embedding, "norm.scale": norm},
        note="give the vocab_size of config.json: MaxText's own is padded or cut; "
        '`dtype="float32"` keeps all digits of its norms, 1 + w',
    )


def _gemma2_layer(kind: str) -> Places:
    """Returns the places of one of the two layers of a period."""
    places = attention_places(f"self_attention_{kind}")
    return {
        **{ours: name for ours, name in places.items() if "norm" not in str(ours)},
        "attn.q.kernel": Place(f"self_attention_{kind}.query.kernel", arithmetic=SCALED_QUERY),
        **{ours: str(name).replace("mlp.", f"mlp_{kind}.") for ours, name in MLP_PLACES.items()},
        **{f"{x}.scale": Place(f"{name}_{kind}.scale", arithmetic=Plus(1.0)) for x, name in GEMMA_NORMS.items()},
    }


GEMMA2 = _gemma(
    Tree(
        {},
        (
            LayerPlaces(_gemma2_layer("local"), "decoder.layers_{#Y}", "decoder.layers", "Y"),
            LayerPlaces(_gemma2_layer("global"), "decoder.layers_{#Y}", "decoder.layers", "Y+1"),
        ),
        period=2,
        needs={**full_attention_in_each(2), **HEAD_SCALE, **ROPE_OF_HALVES},
    ),
    Times("D", 0.5),
)

GEMMA3 = _gemma(
    _periodic(
        6,
        {
            **attention_places(),
            **MLP_PLACES,
            **{f"{x}.scale": Place(f"{name}.scale", arithmetic=Plus(1.0)) for x, name in GEMMA_NORMS.items()},
            "attn.q_norm.scale": Place("self_attention.query_norm.scale", arithmetic=Plus(1.0)),
            "attn.k_norm.scale": Place("self_attention.key_norm.scale", arithmetic=Plus(1.0)),
        },
        {
            **full_attention_in_each(6),
            **QUERY_SCALE,
            **GEMMA3_ATTENTION,
        },
        rest="decoder.layers_remainder.layers_{#L}",
    ),
    Times("D", 0.5, in_their_dtype=True),
)

LOCAL_AND_GLOBAL = (*["decoder.scanned_blocks.local_layers"] * 5, "decoder.scanned_blocks.global_layer")
"""Returns the places of the layers of a period of Gemma 4."""


def _gemma4(mlp: Places, stacked: tuple[str, ...], **changes: Any) -> Tree:
    """Returns the tree of a Gemma 4, whose norms equal the release."""
    places: Places = {
        **attention_places(),
        **mlp,
        **{f"{x}.scale": f"{name}.scale" for x, name in GEMMA_NORMS.items()},
        "layer_scalar": "layer_scalar",
    }
    rest = "decoder.layers_remainder.layers_{#L}"
    model: Places = {
        "embed.embedding": Place("token_embedder.embedding", arithmetic=Times("D", 0.5)),
        "norm.scale": "decoder.decoder_norm.scale",
        "per_layer.embed.embedding": Place(
            "decoder.per_layer_embedder.embed_tokens_per_layer",
            "layer_vocab all_layers layer_dim -> layer_vocab (all_layers layer_dim)",
        ),
        "per_layer.projection.kernel": Place(
            "decoder.per_layer_embedder.per_layer_model_projection.kernel",
            "D all_layers layer_dim -> D (all_layers layer_dim)",
        ),
        "per_layer.norm.scale": "decoder.per_layer_embedder.per_layer_projection_norm.scale",
    }
    layers = LayerPlaces(places, "decoder.layers_{L}", stacked or "", rest=rest if stacked else "")
    return Tree(model, (layers,), len(stacked) or 1, **changes)


GEMMA4_MOE = "mlp.moe_block.MoeBlock_0"
GEMMA4 = (
    _gemma4(
        {
            **{ours: str(name).replace("mlp.", "mlp.moe_block.shared_experts.") for ours, name in MLP_PLACES.items()},
            **expert_places(GEMMA4_MOE),
            "moe.router_scale": "mlp.pre_forward_scale_2",
            "moe.expert_scale": f"{GEMMA4_MOE}.per_expert_scale",
            "moe_norm.scale": "mlp.pre_feedforward_layernorm_2.scale",
            "post_mlp_norm_1.scale": "mlp.post_feedforward_layernorm_1.scale",
            "post_moe_norm.scale": "mlp.post_feedforward_layernorm_2.scale",
        },
        LOCAL_AND_GLOBAL,
        when=lambda config: config.enable_moe_block,
        needs=full_attention_in_each(6),
    ),
    _gemma4(
        MLP_PLACES,
        LOCAL_AND_GLOBAL,
        when=lambda config: not config.has_layer_inputs and not config.num_kv_shared_layers,
        needs=full_attention_in_each(6),
    ),
    _gemma4(
        {
            **MLP_PLACES,
            "per_layer_gate.kernel": "per_layer_input_gate.kernel",
            "per_layer_projection.kernel": "per_layer_projection.kernel",
            "post_per_layer_norm.scale": "post_per_layer_input_norm.scale",
        },
        (),
        needs=full_attention_in_each(5, 6),
        note="models with embeddings of their own in each layer (E2B, E4B) have no scanned layers",
    ),
)


def _delta(stacked: tuple[str, ...]) -> Tree:
    """Returns the tree of a Qwen with linear attention in three of four layers, and experts in all."""
    inputs = ("attn.q.kernel", "attn.k.kernel", "attn.v.kernel", "attn.z.kernel")
    convolutions = ("attn.q_conv.kernel", "attn.k_conv.kernel", "attn.v_conv.kernel")
    both: Places = {
        "attn_norm.scale": "input_layernorm.scale",
        "mlp_norm.scale": "post_attention_layernorm.scale",
        **expert_places("mlp.routed_experts"),
        **shared_expert_places("mlp.shared_expert"),
        "moe.router_shared.kernel": Place("mlp.shared_expert_gate.kernel", "D -> D 1"),
    }
    linear: Places = {
        inputs: Place(
            "attention.in_proj_qkvz.kernel",
            "D groups key_dim, D groups key_dim, D groups per_group value_dim, D groups per_group value_dim "
            "-> D (groups (key_dim + key_dim + (per_group value_dim) + (per_group value_dim)))",
        ),
        ("attn.b.kernel", "attn.a.kernel"): Place(
            "attention.in_proj_ba.kernel",
            "D groups per_group, D groups per_group -> D (groups (per_group + per_group))",
        ),
        convolutions: Place(
            "attention.conv1d.kernel",
            "groups key_dim taps, groups key_dim taps, groups per_group value_dim taps "
            "-> taps 1 ((groups key_dim) + (groups key_dim) + (groups per_group value_dim))",
        ),
        "attn.a_log": Place("attention.A_log", "groups per_group -> (groups per_group)"),
        "attn.dt_bias": Place("attention.dt_bias", "groups per_group -> (groups per_group)"),
        "attn.norm.scale": "attention.norm.rms_norm.scale",
        "attn.o.kernel": Place(
            "attention.out_proj.kernel", "groups per_group value_dim D -> (groups per_group value_dim) D"
        ),
    }
    full: Places = {
        **{ours: name for ours, name in attention_places("attention.attention").items() if ours != "attn.q.kernel"},
        ("attn.q.kernel", "attn.gate.kernel"): Place("attention.attention.query.kernel", "D N H, D N H -> D N (H + H)"),
        "attn.o.kernel": Place("attention.attention.out.kernel", "N H D -> (N H) D"),
    }
    return Tree(
        MODEL_PLACES,
        (
            LayerPlaces({**both, **linear}, "decoder.layers_{state_layers}", stacked, "state_layers"),
            LayerPlaces({**both, **full}, "decoder.layers_{attention_layers}", stacked, "attention_layers"),
        ),
        4,
        needs={**DELTA_LAYERS, **UNSCALED_ROPE, **NORMALIZED},
        stacked_needs=DELTA_PERIOD,
    )


QWEN3_NEXT = _delta((*["decoder.layers.local_layers"] * 3, "decoder.layers.global_layer"))
QWEN3_5 = _delta(tuple(f"decoder.layers.layer_{place}" for place in range(4)))

LATENT_ATTENTION: Places = {
    **NORM_PLACES,
    "attn.q_a.kernel": "self_attention.wq_a.kernel",
    "attn.q_a_norm.scale": "self_attention.q_norm.scale",
    ("attn.kv_a.kernel", "attn.k_rope.kernel"): Place("self_attention.wkv_a.kernel", "D C, D R -> D (C + R)"),
    "attn.kv_a_norm.scale": "self_attention.kv_norm.scale",
    ("attn.k_b.kernel", "attn.v_b.kernel"): Place("self_attention.wkv_b.kernel", "C N P, C N H -> C N (P + H)"),
    "attn.o.kernel": "self_attention.out.kernel",
    "attn.indexer.q.kernel": "self_attention.indexer.wq_b.kernel",
    "attn.indexer.k.kernel": "self_attention.indexer.wk.kernel",
    "attn.indexer.k_norm.scale": "self_attention.indexer.k_norm.scale",
    "attn.indexer.k_norm.bias": "self_attention.indexer.k_norm.bias",
    "attn.indexer.router.kernel": "self_attention.indexer.weights_proj.kernel",
}
QUERY_PARTS = ("attn.q_nope.kernel", "attn.q_rope.kernel")
MOE_BLOCK = "DeepSeekMoeBlock_0"
SHARED_EXPERTS: Places = {
    **expert_places(f"{MOE_BLOCK}.MoeBlock_0"),
    # In MaxText a variable that is not trained (MoEBiasVar). Its loaders find it among the parameters, and its trainer
    # saves it apart.
    "moe.router.correction": Place(f"{MOE_BLOCK}.MoeBlock_0.gate.bias", layer_axis=0),
    **shared_expert_places(f"{MOE_BLOCK}.shared_experts"),
}


def _latent(query: Place, routing: Needs, **changes: Any) -> Tree:
    """Returns the tree of a model with latent attention, of which the first layers are dense."""
    own = {**LATENT_ATTENTION, QUERY_PARTS: query}
    dense = LayerPlaces({**own, **MLP_PLACES}, "decoder.dense_layers_{#I}", "decoder.dense_layers", "I")
    sparse = LayerPlaces({**own, **SHARED_EXPERTS}, "decoder.moe_layers_{#J}", "decoder.moe_layers", "J")
    needs = {**DENSE_FIRST, **HAS_SHARED, **rope_of("default", "yarn"), **yarn_scales(can_be_off=True), **routing}
    return Tree(MODEL_PLACES, (dense, sparse), needs=needs, **changes)


def _deepseek(routing: Needs) -> tuple[Tree, ...]:
    """Returns the trees of a DeepSeek, with a latent of queries and without."""
    latent = Place("self_attention.wq_b.kernel", "Q N P, Q N R -> Q N (P + R)")
    plain = Place("self_attention.query.kernel", "D N P, D N R -> D N (P + R)")
    return _latent(latent, routing, when=lambda config: config.has_query_latent), _latent(plain, routing)


# MaxText takes the groups of V3, by their best two experts; V2 takes groups by the best one.
DEEPSEEK_V2 = _deepseek({"no groups of experts": lambda config: config.groups[0] == config.groups[1]})
DEEPSEEK = _deepseek(NORMALIZED)

MAXTEXT = Target(
    name="maxtext",
    summary="MaxText: pre-training, fine-tuning and RL; scanned layers or not",
    loading="load_parameters_path=OUT/0/items",
    pairs=PairForm(
        *(True, True, lambda rank, alpha: {"lora": {"lora_rank": rank, "lora_alpha": alpha}}),
        loading="lora.lora_restore_path=OUT/0/items",
    ),
    trees={
        "llama": LLAMA_TREE,
        "mistral": _alike(SCALED, ROPE_OF_HALVES, differs=NO_WINDOWS),
        "qwen2": QWEN2,
        "qwen3": QWEN,
        "qwen3_moe": QWEN_MOE,
        "qwen3_vl": replace(QWEN, parts={VISION: qwen3_images("Qwen3VL")}),
        "qwen3_vl_moe": replace(QWEN_MOE, parts={VISION: qwen3_images("Qwen3VL")}),
        "qwen3_omni_moe": replace(QWEN_MOE, parts={VISION: qwen3_images("Qwen3OmniMoe"), AUDIO: OMNI_SOUNDS}),
        "mixtral": _alike({**SCALED, **expert_places("MoeBlock_0")}),
        "gpt_oss": GPT_OSS_TREE,
        "llama4_text": LLAMA4,
        "llama4": replace(LLAMA4, parts={VISION: LLAMA4_IMAGES}),
        "olmo3": OLMO3,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3,
        "gemma3": replace(GEMMA3, parts={VISION: GEMMA3_IMAGES}),
        "gemma4_text": GEMMA4,
        "gemma4": tuple(replace(tree, parts={VISION: GEMMA4_IMAGES}) for tree in GEMMA4),
        "qwen3_next": QWEN3_NEXT,
        "qwen3_5_moe_text": QWEN3_5,
        "qwen3_5_moe": replace(QWEN3_5, parts={VISION: qwen3_images("Qwen3_5Moe")}),
        "deepseek_v2": DEEPSEEK_V2,
        "deepseek_v3": DEEPSEEK,
        "deepseek_v32": DEEPSEEK,
        "deepseek_v4": DEEPSEEK4,
        "kimi_k2": DEEPSEEK,
        "kimi_k25": DEEPSEEK,
    },
    folder="0/items",
    root="params.params.",
    collections=("nnx_aux.model.", "params.MoEBiasVar."),
    layer_axis=1,
    custom_metadata=lambda scanned: {"scan_layers": scanned},
    pathways="checkpoint_storage_use_zarr3=false checkpoint_storage_use_ocdbt=false",
    step_item="items",
    quantized={"array.qvalue": "", "array.scale": "_scale"},
    fp8_block=128,
)
