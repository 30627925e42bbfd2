"""Inkling: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, FURTHER_TOKENS, HEAD_NORMS, MLP, PRE_NORMS, decoder_table
from tpuconv.models.common.sparse import ChosenExperts, MixedMLPs
from tpuconv.models.registry import family
from tpuconv.notation.forms import Forms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    relative_dim=Word("profiles of relative positions that a head mixes"),
    relative_extent=Word("distances of keys that have learned relative positions"),
    scored_experts=Word("experts that a router scores: those that it chooses, then the shared ones"),
    shared_experts=Word("experts that every token uses"),
)

HYBRID_FULL, HYBRID_WINDOW = "hybrid", "hybrid_sliding"
"""The `layer_types` of layers that see all tokens, and of those with a window. Both have convolutions."""
KEYS_OF_MTP = ("rms_norm_eps_moe_gate", "num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first")


@dataclass(frozen=True, kw_only=True)
class RelativeConfig(ChosenExperts, DecoderConfig):
    """A decoder with learned relative positions and short convolutions. Layers with a sliding window have heads of
    their own. Without `layer_types` every sixth layer sees all tokens."""

    experts_key: ClassVar[str] = "n_routed_experts"
    hf_names: ClassVar[Mapping[str, str]] = {"sliding_window": "sliding_window_size"}
    only: ClassVar = {"tie_word_embeddings": (False,), "number_of_conv_states": (4,)}

    tie_word_embeddings: bool = False
    head_dim: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    swa_head_dim: int
    sliding_window: int
    d_rel: int
    rel_extent: int
    log_scaling_n_floor: int | None
    log_scaling_alpha: float
    layer_types: tuple[str, ...] | None
    conv_kernel_size: int
    n_routed_experts: int
    route_scale: float
    unpadded_vocab_size: int | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, (HYBRID_FULL, HYBRID_WINDOW))

    def contradictions_of_heads(self) -> Iterator[str]:
        for prefix, heads, kv_heads in (
            ("", self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads),
            ("swa_", self.swa_num_attention_heads, self.swa_num_key_value_heads),
        ):
            if heads % kv_heads:
                yield f"{prefix}num_attention_heads={heads} is not a multiple of {prefix}num_key_value_heads={kv_heads}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        return self.layer_types or tuple(
            HYBRID_WINDOW if (i + 1) % 6 else HYBRID_FULL for i in range(self.num_hidden_layers)
        )

    @property
    def logit_count(self) -> int:
        """The number of tokens that have logits: the head may have further rows."""
        return min(self.unpadded_vocab_size or self.vocab_size, self.vocab_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind == HYBRID_WINDOW else None for kind in self.kinds)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers

    @property
    def horizons(self) -> frozenset[int]:
        floor = {self.log_scaling_n_floor} if self.log_scaling_n_floor else set()
        return super().horizons | {self.rel_extent} | floor

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "taps": self.conv_kernel_size,
            "relative_dim": self.d_rel,
            "relative_extent": self.rel_extent,
        }

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        heads, kv_heads = self.swa_num_attention_heads, self.swa_num_key_value_heads
        own = {"N": heads, "K": kv_heads, "G": heads // kv_heads, "H": self.swa_head_dim}
        own["relative_extent"] = self.sliding_window
        return {layer: own for layer, kind in enumerate(self.kinds) if kind == HYBRID_WINDOW}

    @property
    def unscannable(self) -> str:
        return "layers with a window have heads and relative positions of their own"


@family_config
class Config(MixedMLPs, RelativeConfig):
    """The keys of config.json. In a file with `dense_intermediate_size`, `intermediate_size` is the width of experts.
    Layers for multi-token prediction are skipped."""

    model_type: ClassVar[str] = "inkling_text"
    hf_names: ClassVar[Mapping[str, str]] = {
        **RelativeConfig.hf_names,
        "first_k_dense_replace": "dense_mlp_idx",
    }
    only: ClassVar = {**RelativeConfig.only, "shared_expert_sink": (True,)}
    least: ClassVar[Mapping[str, int]] = {"first_k_dense_replace": 0}
    left_out: ClassVar[frozenset[str]] = frozenset({*KEYS_OF_MTP, "mtp_local_layer_ids", "dense_intermediate_size"})

    local_layer_ids: tuple[int, ...] | None
    first_k_dense_replace: int = 0
    mlp_layer_types: tuple[str, ...] | None
    moe_intermediate_size: int
    num_experts_per_tok: int
    n_shared_experts: int
    logits_mup_width_multiplier: float

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`, with the widths of experts and of MLPs under their own keys."""
        out = super().in_our_keys(raw)
        if (width := raw.get("dense_intermediate_size")) is None:
            return out
        experts = out.get("intermediate_size", cls.intermediate_size)
        return out | {"moe_intermediate_size": experts, "intermediate_size": width}

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None or self.local_layer_ids is None:
            return super().kinds
        return tuple(HYBRID_WINDOW if i in self.local_layer_ids else HYBRID_FULL for i in range(self.num_hidden_layers))

    @property
    def sizes(self) -> dict[str, int]:
        experts = self.n_routed_experts + self.n_shared_experts
        return {**super().sizes, "scored_experts": experts, "shared_experts": self.n_shared_experts}


RELATIVE = (
    Map("self_attn.r_proj.weight", "relative.mix.kernel", "(N relative_dim) D -> D N relative_dim"),
    Map("self_attn.rel_logits_proj.proj", "relative.profiles.kernel", "relative_dim relative_extent"),
)
CONVOLUTION_ROWS = (
    Map("self_attn.k_sconv.conv1d.weight", "attn.k_conv.kernel", "(K H) 1 taps -> K H taps"),
    Map("self_attn.v_sconv.conv1d.weight", "attn.v_conv.kernel", "(K H) 1 taps -> K H taps"),
    Map("attn_sconv.conv1d.weight", "attn_conv.kernel", "D 1 taps -> D taps"),
    Map("mlp_sconv.conv1d.weight", "mlp_conv.kernel", "D 1 taps -> D taps"),
)

RELEASED_ROWS = (
    Map("attn.wq_du.weight", "attn.q.kernel", "(N H) D -> D N H"),
    Map("attn.wk_dv.weight", "attn.k.kernel", "(K H) D -> D K H"),
    Map("attn.wv_dv.weight", "attn.v.kernel", "(K H) D -> D K H"),
    Map("attn.wo_ud.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("attn.wr_du.weight", "relative.mix.kernel", "(N relative_dim) D -> D N relative_dim"),
    Map("attn.rel_logits_proj.proj", "relative.profiles.kernel", "relative_dim relative_extent"),
    Map("attn_sconv.weight", "attn_conv.kernel", "D 1 taps -> D taps"),
    Map("mlp_sconv.weight", "mlp_conv.kernel", "D 1 taps -> D taps"),
    Map("mlp_norm.weight", "mlp_norm.scale", "D"),
)
RELEASED_NORM_AND_CONVOLUTIONS = (
    Map("attn_norm.weight", "attn_norm.scale", "D"),
    Map("attn.k_sconv.weight", "attn.k_conv.kernel", "(K H) 1 taps -> K H taps"),
    Map("attn.v_sconv.weight", "attn.v_conv.kernel", "(K H) 1 taps -> K H taps"),
)
"""The rows of a layer that releases of Inkling and Inkling 2 have. Layers of Inkling 2 that see all tokens have others
in place of the second ones."""

W13_EXPERTS: Forms = {
    "interleaved": (
        Map("experts.w13_weight", ("gate.kernel", "up.kernel"), "E (M (1 + 1)) D -> E D M, E D M"),
        Map("experts.w2_weight", "down.kernel", "E D M -> E M D"),
    ),
    "stacked": (
        Map("experts.gate_up_proj", ("gate.kernel", "up.kernel"), "E (M + M) D -> E D M, E D M"),
        Map("experts.down_proj", "down.kernel", "E D M -> E M D"),
    ),
}
W13_SHARED: Forms = {
    "interleaved": (
        Map(
            "shared_w13_weight",
            ("gate.kernel", "up.kernel"),
            "shared_experts (M (1 + 1)) D -> D shared_experts M, D shared_experts M",
        ),
        Map("shared_w2_weight", "down.kernel", "shared_experts D M -> shared_experts M D"),
    ),
    "apart": (
        Map("gate_proj", "gate.kernel", "shared_experts M D -> D shared_experts M"),
        Map("up_proj", "up.kernel", "shared_experts M D -> D shared_experts M"),
        Map("down_proj", "down.kernel", "shared_experts D M -> shared_experts M D"),
    ),
}
W13_MLPS: Forms = {
    "interleaved": (
        Map("w13_dn.weight", ("gate.kernel", "up.kernel"), "(F (1 + 1)) D -> D F, D F"),
        Map("w2_md.weight", "down.kernel", "D F -> F D"),
    ),
    "apart": MLP,
}
"""The matrices of experts, shared experts and MLPs: rows of gate and up in turn, as in releases, or apart, as
transformers has them."""

FACTOR = Map("global_scale", "factor", "1")
ROUTER_ROWS = (
    Map("gate.weight", "router.kernel", "scored_experts D -> D scored_experts"),
    Map("gate.global_scale", "router.factor", "1"),
)
IGNORE = {"model.mtp.*": FURTHER_TOKENS}

TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *RELATIVE,
    *CONVOLUTION_ROWS,
    others=(
        Map("model.embed_tokens.embed_norm.weight", "embed_norm.scale", "D"),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP, FACTOR),
        *under(
            "model.layers.{J}.mlp",
            "layers.{J}.moe",
            *ROUTER_ROWS,
            Map("gate.e_score_correction_bias", "router.correction", "E", buffer=True),
            *W13_EXPERTS["stacked"],
            *under("shared_experts", "shared", *W13_SHARED["apart"]),
        ),
    ),
    ignore=IGNORE,
)


def llm_table(*rows: Map, ignore: Mapping[str, str] = {}) -> MappingTable:
    """Returns the table of a release that has these rows of layers, and skips tensors with the reasons `ignore`."""
    return MappingTable(
        (
            Map("model.llm.embed.weight", "embed.embedding", "V D"),
            Map("model.llm.embed_norm.weight", "embed_norm.scale", "D"),
            *rows,
            Map("model.llm.norm.weight", "norm.scale", "D"),
            Map("model.llm.unembed.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore=ignore,
    )


CORRECTION = Map("gate.bias", "router.correction", "E", buffer=True)
RELEASED_TABLE = llm_table(
    *under(
        "model.llm.layers.{L}",
        "layers.{L}",
        *RELEASED_ROWS,
        *RELEASED_NORM_AND_CONVOLUTIONS,
        *under("attn", "attn", Map("q_norm.weight", "q_norm.scale", "H"), Map("k_norm.weight", "k_norm.scale", "H")),
    ),
    *under("model.llm.layers.{I}.mlp", "layers.{I}.mlp", *W13_MLPS["interleaved"], FACTOR),
    *under(
        "model.llm.layers.{J}.mlp",
        "layers.{J}.moe",
        *ROUTER_ROWS,
        CORRECTION,
        *W13_EXPERTS["interleaved"],
        *under("shared_experts", "shared", *W13_SHARED["interleaved"]),
    ),
    ignore=IGNORE,
)
"""The names of the text model in multimodal releases."""

FAMILY = family(Config, TABLE, "Inkling, the text model saved on its own", "InklingForCausalLM")
