"""The models of github.com/jax-ml/jax-llm-examples: `Weights` of qwen3, llama3, llama4, gpt_oss, deepseek_r1_jax and
kimi_k2, in our axes, with config.json and the tokenizer in the same folder as the arrays.

Each program quantizes attention, MLPs and experts, each by a switch of its config. Where it multiplies what a product
sums with the scales (in llama3, and in the attention of llama4, deepseek_r1_jax and kimi_k2), Qwix has no such
scales, and the parameters are not quantized.
"""

from typing import Any

from tpuconv.targets.needs import (
    DENSE_FIRST,
    HAS_SHARED,
    LLAMA4_LAYERS,
    NO_WINDOWS,
    NORMALIZED,
    PLAIN_ATTENTION,
    USUAL_EPS,
    Needs,
    rope_of,
    yarn_scales,
)
from tpuconv.targets.target import LayerPlaces, Place, Places, Target, Tree

MODEL_PLACES: Places = {"embed.embedding": "embedding", "norm.scale": "gamma_final", "lm_head.kernel": "lm_head"}
ATTENTION_PLACES: Places = {
    **{f"attn.{x}.kernel": f"attn.{x}" for x in "qkvo"},
    "attn.q_norm.scale": "attn.q_gamma",
    "attn.k_norm.scale": "attn.k_gamma",
}
NORM_PLACES: Places = {
    "attn_norm.scale": "attn_pre_gamma",
    "mlp_norm.scale": "attn_post_gamma",
    "moe_norm.scale": "attn_post_gamma",
}


def _mlp(name: str) -> Places:
    """Returns the places of a dense MLP."""
    return {f"mlp.{x}.kernel": f"{name}w_{x}" for x in ("gate", "up", "down")}


def _experts(name: str) -> Places:
    """Returns the places of experts, their router and the expert that all tokens share."""
    return {
        "moe.router.kernel": f"{name}.w_router",
        "moe.router.correction": f"{name}.b_router",
        **{f"moe.{x}.kernel": f"{name}.we_{x}" for x in ("gate", "up", "down")},
        **{f"moe.shared.{x}.kernel": f"{name}.ws_{x}" for x in ("gate", "up", "down")},
    }


ATTENTION_KERNELS = frozenset(f"attn.{x}.kernel" for x in "qkvo")
MLP_KERNELS = frozenset(f"mlp.{x}.kernel" for x in ("gate", "up", "down"))
EXPERT_KERNELS = frozenset(f"moe.{x}.kernel" for x in ("gate", "up", "down"))
SHARED_KERNELS = frozenset(f"moe.shared.{x}.kernel" for x in ("gate", "up", "down"))
OWN_FORMAT = (
    "the program's load_pytree reads a format of jax: restore by Orbax's PyTreeCheckpointer, as docs/targets.md shows"
)


OWN_HEAD: Needs = {"a head of its own": lambda config: config.has_lm_head}


def _tree(places: Places, *quantized: frozenset[str], needs: Needs, **changes: Any) -> Tree:
    """Returns the tree of a model, with the quantized parameters of its program."""
    return Tree(MODEL_PLACES, (LayerPlaces(places, "layers.{L}"),), needs=needs, quantized=quantized, **changes)


LLAMA_TREE = _tree(
    {
        **{f"attn.{x}.kernel": x for x in "qkvo"},
        **_mlp(""),
        **NORM_PLACES,
    },
    needs={**OWN_HEAD, **rope_of("default", "llama3")},
    differs={**NO_WINDOWS, **USUAL_EPS},
    note=OWN_FORMAT,
)
GPT_OSS_TREE = _tree(
    {
        **ATTENTION_PLACES,
        **{f"attn.{x}.bias": f"attn.{x}_bias" for x in "qkvo"},
        "attn.sinks": "attn.sinks",
        **NORM_PLACES,
        "moe.router.kernel": "ffw.w_router",
        "moe.router.bias": "ffw.w_router_bias",
        ("moe.gate.kernel", "moe.up.kernel"): Place("ffw.we_gate_up", "E D M, E D M -> E D (M (1 + 1))"),
        ("moe.gate.bias", "moe.up.bias"): Place("ffw.we_gate_up_bias", "E M, E M -> E (M (1 + 1))"),
        "moe.down.kernel": "ffw.we_down",
        "moe.down.bias": "ffw.we_down_bias",
    },
    ATTENTION_KERNELS,
    needs={
        **OWN_HEAD,
        "biases of attention": lambda config: config.attention_bias,
        **rope_of("default", "yarn"),
        "truncate=false of YaRN": lambda config: config.rope.type != "yarn" or not config.rope.truncate,
        **yarn_scales(can_be_off=False),
    },
    note=OWN_FORMAT,
)
LATENT = Tree(
    MODEL_PLACES,
    (
        LayerPlaces(
            {
                **_mlp("mlp."),
                **_experts("mlp"),
                **{f"attn.{x}.kernel": f"attn.{x}" for x in ("q_a", "kv_a", "k_b", "v_b", "o")},
                ("attn.q_nope.kernel", "attn.q_rope.kernel"): Place("attn.q_b", "Q N P, Q N R -> Q N (P + R)"),
                "attn.k_rope.kernel": "attn.k_pe",
                "attn.q_a_norm.scale": "attn.q_gamma",
                "attn.kv_a_norm.scale": "attn.kv_gamma",
                "attn_norm.scale": "gamma_pre_attn",
                "mlp_norm.scale": "gamma_post_attn",
            },
            "layers.{L}",
        ),
    ),
    needs={
        **OWN_HEAD,
        "a query latent": lambda config: config.has_query_latent,
        **DENSE_FIRST,
        **HAS_SHARED,
        **NORMALIZED,
        "rope_interleave=true": lambda config: config.rope_interleave,
        **rope_of("default", "yarn"),
    },
    differs=USUAL_EPS,
    quantized=(MLP_KERNELS, EXPERT_KERNELS | SHARED_KERNELS),
)

JAX_LLM_EXAMPLES = Target(
    name="jax-llm-examples",
    summary="jax-llm-examples and engines built on it: load_pytree",
    loading='load_pytree("OUT", Weights.shardings(config))',
    trees={
        "llama": LLAMA_TREE,
        "qwen3": _tree(
            {**ATTENTION_PLACES, **NORM_PLACES, **_mlp("ffw.")}, ATTENTION_KERNELS, MLP_KERNELS, needs=PLAIN_ATTENTION
        ),
        "qwen3_moe": _tree(
            {**ATTENTION_PLACES, **NORM_PLACES, **_experts("ffw")},
            ATTENTION_KERNELS,
            EXPERT_KERNELS,
            needs={**PLAIN_ATTENTION, **NORMALIZED},
        ),
        "gpt_oss": GPT_OSS_TREE,
        "llama4": _tree(
            {**ATTENTION_PLACES, **NORM_PLACES, **_mlp("mlp."), **_experts("mlp")},
            MLP_KERNELS,
            EXPERT_KERNELS | SHARED_KERNELS,
            needs={**OWN_HEAD, **LLAMA4_LAYERS, **rope_of("default", "llama3")},
        ),
        "deepseek_v3": LATENT,
        "kimi_k2": LATENT,
    },
    folder=".",
    quantized={"array.qvalue": ".quant", "array.scale": ".scale"},
    squeezes_scales=True,
    has_lists=True,
    empty={"lm_head": lambda config: not config.has_lm_head},
)
