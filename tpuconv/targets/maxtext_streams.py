"""DeepSeek V4 in MaxText: residual streams, compressed keys, and layers that choose experts by the ids of tokens."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from tpuconv.models.deepseek_v4.family import HASHED, HEAVY, SCORED, SLIDING, SPARSE
from tpuconv.notation.arithmetic import FactorsBeside, Ones, WholeNumbers
from tpuconv.notation.letters import Word, declare
from tpuconv.targets.maxtext_places import MODEL_PLACES, NORM_PLACES, expert_places, shared_expert_places
from tpuconv.targets.needs import Needs
from tpuconv.targets.target import LayerPlaces, Place, Places, Tree

HYPER_STREAMS = 4
"""The residual streams of the releases, and of MaxText's own table."""
KIND_WORDS = {SLIDING: "sliding", SPARSE: "sparse", HEAVY: "heavy"}
ROUTING_WORDS = {HASHED: "hashed", SCORED: "scored"}
LETTER_OF_KIND = {
    each: f"{KIND_WORDS[each[0]]}_{ROUTING_WORDS[each[1]]}" for each in product(KIND_WORDS, ROUTING_WORDS)
}
"""By the `layer_types` and the `mlp_layer_types` of layers, their letter."""
declare(
    read_streams=Word("streams of which the input of attention or experts is made"),
    written_streams=Word("streams that their output is added to"),
    mixed_streams=Word("streams that are mixed"),
    target_streams=Word("streams that come of it"),
    **{letter: Word(f"layers of `{kind}` and `{routing}`") for (kind, routing), letter in LETTER_OF_KIND.items()},
)
STREAM_WEIGHTS = "(read_streams + written_streams + (mixed_streams target_streams))"
STREAM_NORM = "mhc_norm.scale"


def _streams(ours: str, name: str, norm: str) -> Places:
    """Returns the places of the hyper-connections of attention or experts. MaxText's norm of all streams has weights,
    of the shape of `norm` for each stream, which no release has."""
    return {
        f"{ours}.kernel": Place(
            f"{name}.pre_alpha",
            f"streams D {STREAM_WEIGHTS} -> (streams D) read_streams, (streams D) written_streams, "
            "(streams D) (mixed_streams target_streams)",
            FactorsBeside(STREAM_NORM),
            others=(f"{name}.post_alpha", f"{name}.res_alpha"),
        ),
        f"{ours}.base": Place(
            f"{name}.pre_beta",
            f"{STREAM_WEIGHTS} -> read_streams, written_streams, mixed_streams target_streams",
            others=(f"{name}.post_beta", f"{name}.res_beta"),
        ),
        f"{ours}.pre_scale": f"{name}.pre_alpha_scale",
        f"{ours}.post_scale": f"{name}.post_alpha_scale",
        f"{ours}.mix_scale": f"{name}.res_alpha_scale",
        (norm,) * HYPER_STREAMS: Place(
            f"{name}.{STREAM_NORM}", f"{', '.join('D' * HYPER_STREAMS)} -> ({' + '.join('D' * HYPER_STREAMS)})", Ones()
        ),
    }


def _compressor(ours: str, name: str, width: str, tokens: str) -> Places:
    """Returns the places of a compressor of keys of two series of vectors, which MaxText joins."""

    def joined(own: str, theirs: str, axis: str) -> Places:
        one = f"{axis} {width}"
        layout = f"{one}, {one} -> {axis} ({width} + {width})"
        return {(f"{ours}.before.{own}", f"{ours}.current.{own}"): Place(f"{name}.{theirs}", layout)}

    return {
        **joined("kv.kernel", "kv_proj.kernel", "D"),
        **joined("gate.kernel", "gate_proj.kernel", "D"),
        **joined("bias", "position_bias", tokens),
        f"{ours}.norm.scale": f"{name}.kv_norm.scale",
    }


EXPERT_BLOCK = "mlp.MoeBlock_0"
DEEPSEEK4_PLACES: Places = {
    **NORM_PLACES,
    **_streams("attn_streams", "mhc_attention", "attn_norm.scale"),
    **_streams("moe_streams", "mhc_mlp", "moe_norm.scale"),
    "attn.q_a.kernel": "self_attention.wq_a.kernel",
    "attn.q_a_norm.scale": "self_attention.q_norm.scale",
    "attn.q.kernel": "self_attention.wq_b.kernel",
    "attn.kv.kernel": Place("self_attention.wkv.kernel", "D H -> D 1 H"),
    "attn.kv_norm.scale": "self_attention.kv_norm.scale",
    "attn.sinks": "self_attention.sinks",
    "attn.o_a.kernel": Place(
        "self_attention.o_a_proj.kernel",
        "output_groups group_heads H group_dim -> output_groups (group_heads H) group_dim",
    ),
    "attn.o_b.kernel": Place(
        "self_attention.o_b_proj.kernel", "output_groups group_dim D -> (output_groups group_dim) D"
    ),
    **expert_places(EXPERT_BLOCK),
    **shared_expert_places("mlp.shared_experts"),
    "moe.correction": Place(f"{EXPERT_BLOCK}.gate.bias", layer_axis=0),
    "moe.experts_of_token": Place(f"{EXPERT_BLOCK}.tid2eid", arithmetic=WholeNumbers()),
}
CSA_INDEXER = "self_attention.csa_compressor.indexer"
COMPRESSOR_PLACES: Mapping[str, Places] = {
    SLIDING: {},
    HEAVY: {
        "attn.compressor.current.kv.kernel": "self_attention.hca_compressor.kv_proj.kernel",
        "attn.compressor.current.gate.kernel": "self_attention.hca_compressor.gate_proj.kernel",
        "attn.compressor.current.bias": "self_attention.hca_compressor.position_bias",
        "attn.compressor.norm.scale": "self_attention.hca_compressor.kv_norm.scale",
    },
    SPARSE: {
        **_compressor("attn.compressor", "self_attention.csa_compressor", "H", "sparse_tokens"),
        **_compressor("attn.indexer.compressor", CSA_INDEXER, "index_dim", "sparse_tokens"),
        "attn.indexer.q.kernel": Place(
            f"{CSA_INDEXER}.q_proj.kernel", "Q index_heads index_dim -> Q (index_heads index_dim)"
        ),
        "attn.indexer.router.kernel": f"{CSA_INDEXER}.weights_proj.kernel",
    },
}
STACK_OF_KIND = {
    (HEAVY, SCORED): "decoder.scanned_blocks.layers_0",
    (SPARSE, SCORED): "decoder.scanned_blocks.layers_1",
}


def _of_kind(config: Any, kind: str, routing: str) -> tuple[int, ...]:
    """Returns the layers of a kind of attention and of a choice of experts."""
    kinds = enumerate(zip(config.kinds, config.mlp_kinds, strict=True))
    return tuple(layer for layer, found in kinds if found == (kind, routing))


def _hashed_first(config: Any) -> bool:
    return sorted(config.mlp_kinds) == list(config.mlp_kinds)  # `hash_moe` is before `moe`


def _in_turn(config: Any) -> bool:
    kinds = config.kinds[config.mlp_kinds.count(HASHED) :]
    return config.compress_rate_hca == 128 and list(kinds) == [HEAVY, SPARSE] * (len(kinds) // 2)


DEEPSEEK4_NEEDS: Needs = {
    f"hc_mult={HYPER_STREAMS} and hc_eps=1e-06": lambda config: (
        config.hc_mult == HYPER_STREAMS and config.hc_eps == 1e-6
    ),
    "compress_ratios of 0, 4 and more": lambda config: config.compress_rate_csa == 4 < config.compress_rate_hca,
    "layers that choose experts by ids before all others": _hashed_first,
}
DEEPSEEK4 = Tree(
    {
        **MODEL_PLACES,
        "norm.kernel": Place("decoder.hc_head.hc_fn", "streams D streams_out -> (streams D) streams_out"),
        "norm.base": "decoder.hc_head.hc_base",
        "norm.pre_scale": "decoder.hc_head.hc_scale",
    },
    tuple(
        LayerPlaces(
            {**DEEPSEEK4_PLACES, **COMPRESSOR_PLACES[each[0]]},
            f"decoder.layers_{{{letter}}}",
            STACK_OF_KIND.get(each),
            letter,
        )
        for each, letter in LETTER_OF_KIND.items()
    ),
    needs=DEEPSEEK4_NEEDS,
    stacked_needs={
        "layers that compress 128 and 4 tokens in turn, after those that choose experts by ids": _in_turn,
    },
    differs={
        "rotary positions without scaling where keys are compressed": lambda config: (
            config.compress_rope.type == "default"
        )
    },
    note="MaxText trains weights of norms that no release has: `export` multiplies them into the matrices behind them",
    layer_sets=lambda config: {letter: _of_kind(config, *each) for each, letter in LETTER_OF_KIND.items()},
    sizes=lambda config: dict.fromkeys(
        ("read_streams", "written_streams", "mixed_streams", "target_streams"), config.hc_mult
    ),
)
