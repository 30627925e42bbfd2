"""Rows that the tables of many families have. `models/common/blocks.py` has the modules with these parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpuconv.notation.forms import Forms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    # Layers with a state: linear attention, Mamba-2 (which is a case of it, arXiv:2405.21060), short convolutions
    attention_layers=Word("layers with attention, in a model where others have a state"),
    state_layers=Word("layers with a state: linear attention, Mamba-2 or a short convolution"),
    groups=Word("groups of heads that have keys together: key heads of linear attention, groups of Mamba-2", as_="K"),
    per_group=Word("value heads of a group"),
    key_dim=Word("dimension of a key of linear attention, state size of Mamba-2"),
    value_dim=Word("dimension of a value head of linear attention or Mamba-2"),
    taps=Word("taps of a causal convolution"),
    channels=Word("channels of a short convolution, of Mamba-1 or of an RG-LRU", as_="K"),
    step_rank=Word("rank of the time steps of Mamba-1"),
    # Layers that differ in what their tokens see
    window_layers=Word("layers with a sliding window"),
    full_layers=Word("layers that see all tokens, in a model where others have a sliding window"),
    full_heads=Word("query heads of layers that see all tokens", as_="N"),
    full_kv_heads=Word("key-value heads of layers that see all tokens", as_="K"),
    later_layers=Word("layers after the first, in a model whose first layer lacks something"),
    # Indexers, which select the tokens that attention sees
    indexer_layers=Word("layers with an indexer"),
    index_heads=Word("heads of an indexer", as_="K"),
    index_dim=Word("head dimension of an indexer"),
    # Residual streams
    streams=Word("residual streams"),
    streams_out=Word("residual streams, as an output"),
    stream_weights=Word("weights of residual streams"),
    expert_dim=Word("width of what experts read and write, if it is not the model's"),
    joined_width=Word("width of an embedding and a hidden state together: the input of attention that reads both"),
)
ATTENTION = (
    Map("self_attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
    Map("self_attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
    Map("self_attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
    Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
)

JOINED_ATTENTION = (
    Map("self_attn.q_proj.weight", "attn.q.kernel", "(N H) joined_width -> joined_width N H"),
    Map("self_attn.k_proj.weight", "attn.k.kernel", "(K H) joined_width -> joined_width K H"),
    Map("self_attn.v_proj.weight", "attn.v.kernel", "(K H) joined_width -> joined_width K H"),
    Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
)
"""Attention that reads an embedding and a hidden state."""

QKV_BIAS = (
    Map("self_attn.q_proj.bias", "attn.q.bias", "(N H) -> N H"),
    Map("self_attn.k_proj.bias", "attn.k.bias", "(K H) -> K H"),
    Map("self_attn.v_proj.bias", "attn.v.bias", "(K H) -> K H"),
)

O_BIAS = Map("self_attn.o_proj.bias", "attn.o.bias", "D")

HEAD_NORMS = (
    Map("self_attn.q_norm.weight", "attn.q_norm.scale", "H"),
    Map("self_attn.k_norm.weight", "attn.k_norm.scale", "H"),
)

NORMS_OF_ALL_HEADS = (
    Map("self_attn.q_norm.weight", "attn.q_norm.scale", "(N H) -> N H"),
    Map("self_attn.k_norm.weight", "attn.k_norm.scale", "(K H) -> K H"),
)

ATTN_NORM = Map("input_layernorm.weight", "attn_norm.scale", "D")
MLP_NORM = Map("post_attention_layernorm.weight", "mlp_norm.scale", "D")
PRE_NORMS = (ATTN_NORM, MLP_NORM)

POST_ATTN_NORM = Map("post_attention_layernorm.weight", "post_attn_norm.scale", "D")
POST_MLP_NORM = Map("post_feedforward_layernorm.weight", "post_mlp_norm.scale", "D")
POST_NORMS = (POST_ATTN_NORM, POST_MLP_NORM)

PRE_NORM_BIASES = (
    Map("input_layernorm.bias", "attn_norm.bias", "D"),
    Map("post_attention_layernorm.bias", "mlp_norm.bias", "D"),
)

NORM_BIAS = Map("model.norm.bias", "norm.bias", "D")

MLP = (
    Map("gate_proj.weight", "gate.kernel", "F D -> D F"),
    Map("up_proj.weight", "up.kernel", "F D -> D F"),
    Map("down_proj.weight", "down.kernel", "D F -> F D"),
)

MLP_BIAS = (
    Map("gate_proj.bias", "gate.bias", "F"),
    Map("up_proj.bias", "up.bias", "F"),
    Map("down_proj.bias", "down.bias", "D"),
)

FUSED_MLP = (
    Map("gate_up_proj.weight", ("gate.kernel", "up.kernel"), "(F + F) D -> D F, D F"),
    Map("down_proj.weight", "down.kernel", "D F -> F D"),
)

PLAIN_MLP = (
    Map("up_proj.weight", "up.kernel", "F D -> D F"),
    Map("down_proj.weight", "down.kernel", "D F -> F D"),
)

PLAIN_MLP_BIAS = (
    Map("up_proj.bias", "up.bias", "F"),
    Map("down_proj.bias", "down.bias", "D"),
)

EXPERT_MLPS = (
    Map("experts.{E}.gate_proj.weight", "gate.kernel", "M D -> E D M"),
    Map("experts.{E}.up_proj.weight", "up.kernel", "M D -> E D M"),
    Map("experts.{E}.down_proj.weight", "down.kernel", "D M -> E M D"),
)

NUMBERED_EXPERT_MLPS = (
    Map("experts.{E}.w1.weight", "gate.kernel", "M D -> E D M"),
    Map("experts.{E}.w3.weight", "up.kernel", "M D -> E D M"),
    Map("experts.{E}.w2.weight", "down.kernel", "D M -> E M D"),
)
"""`EXPERT_MLPS` with the names of Mixtral."""

SHARED = (
    Map("gate_proj.weight", "gate.kernel", "W D -> D W"),
    Map("up_proj.weight", "up.kernel", "W D -> D W"),
    Map("down_proj.weight", "down.kernel", "D W -> W D"),
)

PROBABLE_EXPERTS = (Map("gate.weight", "router.kernel", "E D -> D E"), *EXPERT_MLPS)
"""Experts and the matrix that scores them."""

SHARED_BY_GATE = (
    *under("shared_expert", "shared", *SHARED),
    Map("shared_expert_gate.weight", "router_shared.kernel", "1 D -> D"),
)
"""An MLP that all tokens pass, and the vector of its weight."""

SHARED_AND_PROBABLE_EXPERTS = (*PROBABLE_EXPERTS, *SHARED_BY_GATE)

MAMBA_INPUTS = ("z", "x", "b", "c", "dt")

MAMBA = (
    Map(
        "in_proj.weight",
        tuple(f"{x}.kernel" for x in MAMBA_INPUTS),
        "((groups per_group value_dim) + (groups per_group value_dim) + (groups key_dim) + (groups key_dim) "
        "+ (groups per_group)) D "
        "-> D groups per_group value_dim, D groups per_group value_dim, D groups key_dim, D groups key_dim, "
        "D groups per_group",
    ),
    Map(
        "conv1d.weight",
        ("x_conv.kernel", "b_conv.kernel", "c_conv.kernel"),
        "((groups per_group value_dim) + (groups key_dim) + (groups key_dim)) 1 taps "
        "-> groups per_group value_dim taps, groups key_dim taps, groups key_dim taps",
    ),
    Map("A_log", "a_log", "(groups per_group) -> groups per_group"),
    Map("dt_bias", "dt_bias", "(groups per_group) -> groups per_group"),
    Map("D", "skip", "(groups per_group) -> groups per_group"),
    Map("out_proj.weight", "o.kernel", "D (groups per_group value_dim) -> groups per_group value_dim D"),
)
"""Mamba-2, besides its norm and biases."""

MAMBA_NORM = Map("norm.weight", "norm.scale", "(groups per_group value_dim) -> groups per_group value_dim")

MAMBA_CONV_BIAS = Map(
    "conv1d.bias",
    ("x_conv.bias", "b_conv.bias", "c_conv.bias"),
    "((groups per_group value_dim) + (groups key_dim) + (groups key_dim)) "
    "-> groups per_group value_dim, groups key_dim, groups key_dim",
)

MAMBA_IN_BIAS = Map(
    "in_proj.bias",
    tuple(f"{x}.bias" for x in MAMBA_INPUTS),
    "((groups per_group value_dim) + (groups per_group value_dim) + (groups key_dim) + (groups key_dim) "
    "+ (groups per_group)) "
    "-> groups per_group value_dim, groups per_group value_dim, groups key_dim, groups key_dim, groups per_group",
)

MAMBA_OUT_BIAS = Map("out_proj.bias", "o.bias", "D")

SHARED_EXPERT_ROWS = under("shared_experts", "shared", *SHARED)

CORRECTED_ROUTER = (
    Map("gate.weight", "router.kernel", "E D -> D E"),
    Map("gate.e_score_correction_bias", "router.correction", "E", buffer=True),
)

CORRECTION_BESIDE = (
    Map("gate.weight", "router.kernel", "E D -> D E"),
    Map("e_score_correction_bias", "router.correction", "E", buffer=True),
)
"""As `CORRECTED_ROUTER`, with the corrections beside the router."""

STACKED_EXPERTS = (
    Map("experts.gate_up_proj", ("gate.kernel", "up.kernel"), "E (M + M) D -> E D M, E D M"),
    Map("experts.down_proj", "down.kernel", "E D M -> E M D"),
)
"""All experts of a layer in one tensor each, with the axis of the outputs before the axis of the inputs."""

IN_FIRST_EXPERTS = (
    Map("experts.gate_up_proj", ("gate.kernel", "up.kernel"), "E D (M + M) -> E D M, E D M"),
    Map("experts.down_proj", "down.kernel", "E M D"),
)
"""The same with the axis of the inputs before that of the outputs."""

FUSED_EXPERTS = (
    Map("router.layer.weight", "router.kernel", "E D -> D E"),
    Map("input_linear.weight", ("gate.kernel", "up.kernel"), "E (M + M) D -> E D M, E D M"),
    Map("output_linear.weight", "down.kernel", "E D M -> E M D"),
)
FUSED_SHARED = (
    Map("input_linear.weight", ("gate.kernel", "up.kernel"), "(W + W) D -> D W, D W"),
    Map("output_linear.weight", "down.kernel", "D W -> W D"),
)
"""The experts of Granite, and the MLP that all tokens pass."""

MTP_INPUTS = (
    Map("enorm.weight", "embed_norm.scale", "D"),
    Map("hnorm.weight", "hidden_norm.scale", "D"),
    # The kernel of the next token's embedding, then the kernel of the hidden state.
    Map("eh_proj.weight", ("from_embed.kernel", "from_hidden.kernel"), "D (A + A) -> A D, A D"),
)
"""The rows that join the inputs of a layer for multi-token prediction (arXiv:2412.19437, section 2.2)."""
MTP_HEAD = (*MTP_INPUTS, Map("shared_head.norm.weight", "norm.scale", "D"))
"""Such a layer in DeepSeek V3, besides the rows of every layer."""
MTP_FINAL = (*MTP_INPUTS, Map("final_layernorm.weight", "norm.scale", "D"))
"""The same under another name of the last norm."""
MTP_AROUND = (
    Map("fc.weight", ("from_embed.kernel", "from_hidden.kernel"), "D (A + A) -> A D, A D"),
    Map("pre_fc_norm_embedding.weight", "embed_norm.scale", "D"),
    Map("pre_fc_norm_hidden.weight", "hidden_norm.scale", "D"),
    Map("norm.weight", "norm.scale", "D"),
)
"""The same beside the layer, as in Qwen3-Next."""

FURTHER_TOKENS = "predicts further tokens (MTP), which the model's own logits do not need"
MTP_IGNORE = {"model.layers.{U}.*": FURTHER_TOKENS}
MTP_COPIES = {
    "model.layers.{U}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{U}.shared_head.head.weight": "lm_head.weight",
}


def when(condition: str, *rows: Map) -> tuple[Map, ...]:
    """Returns the rows under a condition, as `Map` has it."""
    return tuple(replace(row, when=f"{condition} and {row.when}" if row.when else condition) for row in rows)


BIASED_ATTENTION = (*ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS))

SANDWICH_NORMS = (
    Map("input_layernorm.weight", "attn_norm.scale", "D"),
    Map("post_attention_layernorm.weight", "post_attn_norm.scale", "D"),
    Map("pre_feedforward_layernorm.weight", "mlp_norm.scale", "D"),
    Map("post_feedforward_layernorm.weight", "post_mlp_norm.scale", "D"),
)

MAMBA_ROWS = (
    *MAMBA,
    MAMBA_NORM,
    *when("mamba_conv_bias", MAMBA_CONV_BIAS),
    *when("mamba_proj_bias", MAMBA_IN_BIAS, MAMBA_OUT_BIAS),
)
"""Mamba-2 of a `MambaConfig`."""


MAMBA1_ROWS = (
    Map("in_proj.weight", ("x.kernel", "z.kernel"), "(channels + channels) D -> D channels, D channels"),
    Map("conv1d.weight", "conv.kernel", "channels 1 taps -> channels taps"),
    *when("mamba_conv_bias", Map("conv1d.bias", "conv.bias", "channels")),
    Map(
        "x_proj.weight",
        ("dt_a.kernel", "b.kernel", "c.kernel"),
        "(step_rank + key_dim + key_dim) channels -> channels step_rank, channels key_dim, channels key_dim",
    ),
    Map("dt_proj.weight", "dt.kernel", "channels step_rank -> step_rank channels"),
    Map("dt_proj.bias", "dt.bias", "channels"),
    Map("A_log", "a_log", "channels key_dim -> key_dim channels"),
    Map("D", "skip", "channels"),
    Map("out_proj.weight", "o.kernel", "D channels -> channels D"),
    *when(
        "mamba_proj_bias",
        Map("in_proj.bias", ("x.bias", "z.bias"), "(channels + channels) -> channels, channels"),
        MAMBA_OUT_BIAS,
    ),
)
"""Mamba-1 of a `ChannelConfig`, without norms."""


def mlp_rows(*moe_rows: Map) -> tuple[Map, ...]:
    """Returns the rows of dense layers and of those with experts. With {L} the layers can be stacked; with {J} they
    cannot, since some are dense."""
    return (
        *when("all_experts", *under("model.layers.{L}.mlp", "layers.{L}.moe", *moe_rows)),
        *when("some_dense", *under("model.layers.{J}.mlp", "layers.{J}.moe", *moe_rows)),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
    )


def decoder_table(
    *rows: Map,
    others: tuple[Map, ...] = (),
    ignore: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
    recut: Sequence[tuple[str, ...]] = (),
) -> MappingTable:
    """Returns the table of a decoder: `rows` of each layer, without prefixes, and the rows of the embedding, the last
    norm and the head.

    Args:
        rows: of each layer.
        others: rows with their prefixes.
        ignore, copies: as `MappingTable` has them, besides what all decoders have.
        recut: as `MappingTable` has it.
    """
    return MappingTable(
        (
            Map("model.embed_tokens.weight", "embed.embedding", "V D"),
            *under("model.layers.{L}", "layers.{L}", *rows),
            *others,
            Map("model.norm.weight", "norm.scale", "D"),
            Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore=ignore,
        copies={"lm_head.weight": "model.embed_tokens.weight", **(copies or {})},
        recut=recut,
    )


GATE_AND_UP = ("gate.kernel", "up.kernel")

EXPERT_FORMS: Forms = {
    "one": EXPERT_MLPS,
    "w1, w2, w3": NUMBERED_EXPERT_MLPS,
    "stacked": STACKED_EXPERTS,
    "one, gate and up": (
        Map("experts.{E}.gate_up_proj.weight", GATE_AND_UP, "(M + M) D -> E D M, E D M"),
        Map("experts.{E}.down_proj.weight", "down.kernel", "D M -> E M D"),
    ),
    "stacked, apart": (
        Map("experts.gate_proj", "gate.kernel", "E M D -> E D M"),
        Map("experts.up_proj", "up.kernel", "E M D -> E D M"),
        Map("experts.down_proj", "down.kernel", "E D M -> E M D"),
    ),
    "stacked, of MLX": (
        Map("switch_mlp.gate_proj.weight", "gate.kernel", "E M D -> E D M"),
        Map("switch_mlp.up_proj.weight", "up.kernel", "E M D -> E D M"),
        Map("switch_mlp.down_proj.weight", "down.kernel", "E D M -> E M D"),
    ),
}
"""The experts of a layer, each by itself or all in one tensor."""

IN_FIRST_FORMS: Forms = {"stacked, in first": IN_FIRST_EXPERTS, "one": EXPERT_MLPS}
"""The same of families that stack matrices [in, out]. If the sizes are equal, only the family tells them from
[out, in]: no place has both."""

ALL_FORMS = (EXPERT_FORMS, IN_FIRST_FORMS)
