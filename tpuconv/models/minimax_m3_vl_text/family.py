"""MiniMax-M3, the text model saved on its own: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import faults_of_kinds, numbered_kinds
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import (
    ATTENTION,
    CORRECTED_ROUTER,
    FURTHER_TOKENS,
    FUSED_MLP,
    HEAD_NORMS,
    PRE_NORMS,
    STACKED_EXPERTS,
    decoder_table,
)
from tpuconv.models.common.sparse import MLP_KINDS, ChosenExperts, MixedMLPs
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under

M3_FULL, M3_SPARSE = "full_attention", "minimax_m3_sparse"
"""The `layer_types` of layers that attend to all tokens, and to selected blocks of them."""

INDEX_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Keys, and the keys of `sparse_attention_config` that releases have for them."""

SPARSE_ONLY = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
"""Keys of `sparse_attention_config` that have one value."""


@family_config
class Config(MixedMLPs, ChosenExperts, PartialRopeConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert. Keys of the release that transformers
    replaces by others are read as these, or must agree with them: `sparse_attention_config`, `moe_layer_freq` and
    `rotary_dim`."""

    model_type: ClassVar[str] = "minimax_m3_vl_text"
    experts_key: ClassVar[str] = "num_local_experts"
    only: ClassVar = {
        "hidden_act": ("silu", "swigluoai"),  # transformers computes the second in either case
        "scoring_func": ("sigmoid",),
        # Of the release. transformers does not read them, and computes this.
        "use_gemma_norm": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_head",),
        "attention_output_gate": (False,),
        "use_routing_bias": (True,),
        "n_shared_experts": (1,),
    }
    least: ClassVar[Mapping[str, int]] = {"index_local_blocks": 0}
    left_out: ClassVar[frozenset[str]] = frozenset({"sparse_attention_config", "moe_layer_freq", "rotary_dim"})

    dense_intermediate_size: int
    shared_intermediate_size: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    mlp_layer_types: tuple[str, ...] | None
    swiglu_alpha: float
    swiglu_limit: float
    partial_rotary_factor: float = 1.0
    layer_types: tuple[str, ...] | None
    index_n_heads: int
    index_head_dim: int
    index_block_size: int
    index_topk_blocks: int
    index_local_blocks: int

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, sparse = super().in_our_keys(raw), _sparse_config(raw)
        out |= {key: sparse[other] for key, other in INDEX_KEYS.items() if other in sparse}
        for key, given, newer, names in (
            ("sparse_attention_freq", sparse.get("sparse_attention_freq"), "layer_types", (M3_FULL, M3_SPARSE)),
            ("moe_layer_freq", raw.get("moe_layer_freq"), "mlp_layer_types", tuple(MLP_KINDS.values())),
        ):
            if given is not None and out.get(newer) is None:
                out[newer] = numbered_kinds(key, given, names)
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, (M3_FULL, M3_SPARSE))
        if self.swiglu_limit <= 0:
            yield f"swiglu_limit={self.swiglu_limit} is not positive"
        if M3_SPARSE not in self.kinds:
            return
        heads, local, chosen = self.index_n_heads, self.index_local_blocks, self.index_topk_blocks
        if self.num_attention_heads % heads:
            yield f"num_attention_heads={self.num_attention_heads} is not a multiple of index_n_heads={heads}"
        if self.index_head_dim < self.rope_dim:
            yield f"index_head_dim={self.index_head_dim} is less than the {self.rope_dim} with rotary positions"
        if local > chosen:
            yield f"index_local_blocks={local} is more than index_topk_blocks={chosen}"

    @property
    def horizons(self) -> frozenset[int]:
        selected = {self.index_block_size * self.index_topk_blocks} if M3_SPARSE in self.kinds else set()
        return super().horizons | selected

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        """As `DecoderConfig.disagreements`: what the release says of indexers, which have no values of their own here,
        and of rotary positions."""
        is_sparse = [int(kind == M3_SPARSE) for kind in self.kinds]
        expected = {
            **SPARSE_ONLY,
            **dict.fromkeys(("sparse_attention_freq", "sparse_disable_index_value"), is_sparse),
            **{other: getattr(self, key) for key, other in INDEX_KEYS.items()},
        }
        for key, value in _sparse_config(raw).items():
            if key not in expected:
                yield f"sparse_attention_config has the unknown {short(key)}"
            elif value != expected[key]:
                yield f"{key}={short(value, 300)} is not {short(expected[key], 300)}"
        if raw.get("rotary_dim") not in (None, self.rope_dim):
            yield f"rotary_dim={short(raw['rotary_dim'])} is not {self.rope_dim}, which follows from other keys"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers."""
        return self.layer_types or (M3_FULL,) * self.num_hidden_layers

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "F": self.dense_intermediate_size,
            "W": self.shared_intermediate_size,
            "index_heads": self.index_n_heads,
            "index_dim": self.index_head_dim,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "indexer_layers": tuple(layer for layer, kind in enumerate(self.kinds) if kind == M3_SPARSE),
        }


def _sparse_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the `sparse_attention_config`, empty without."""
    given = raw.get("sparse_attention_config") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json: sparse_attention_config={short(given)} is not an object")
    return given


def m3_table(indexer: str, mlp: tuple[Map, ...], experts: str, moe: tuple[Map, ...]) -> MappingTable:
    """Returns the table of the text model.

    Args:
        indexer: how the names of an indexer's tensors begin.
        mlp: the rows of an MLP.
        experts: the name of what a layer has instead of an MLP.
        moe: its rows.
    """
    return decoder_table(
        *PRE_NORMS,
        *ATTENTION,
        *HEAD_NORMS,
        others=(
            *(
                Map(
                    f"model.layers.{{indexer_layers}}.self_attn.{indexer}{hf}",
                    f"layers.{{indexer_layers}}.attn.indexer.{jax}",
                    layout,
                )
                for hf, jax, layout in (
                    ("q_proj.weight", "q.kernel", "(index_heads index_dim) D -> D index_heads index_dim"),
                    ("k_proj.weight", "k.kernel", "index_dim D -> D index_dim"),
                    ("q_norm.weight", "q_norm.scale", "index_dim"),
                    ("k_norm.weight", "k_norm.scale", "index_dim"),
                )
            ),
            *under("model.layers.{I}.mlp", "layers.{I}.mlp", *mlp),
            *under(f"model.layers.{{J}}.{experts}", "layers.{J}.moe", *moe),
        ),
        ignore={f"model.{name}.*": FURTHER_TOKENS for name in ("mtp", "dspark")},
    )


TABLE = m3_table(
    "indexer.",
    FUSED_MLP,
    "mlp",
    (
        *CORRECTED_ROUTER,
        *STACKED_EXPERTS,
        Map("shared_experts.gate_up_proj.weight", ("shared.gate.kernel", "shared.up.kernel"), "(W + W) D -> D W, D W"),
        Map("shared_experts.down_proj.weight", "shared.down.kernel", "D W -> W D"),
    ),
)

FAMILY = family(Config, TABLE, "MiniMax-M3, the text model saved on its own", "MiniMaxM3VLForCausalLM")
