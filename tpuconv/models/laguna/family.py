"""Laguna: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, Rope
from tpuconv.models.common.rows import EXPERT_MLPS, HEAD_NORMS, PRE_NORMS, SHARED, decoder_table, mlp_rows, when
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import PART_FIELDS, TwoPartialRopesConfig
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under

LAGUNA_ROPE = Rope(theta=500_000.0)
"""The rotary positions of layers that see all tokens, of a config.json without any."""
FULL_ROTARY = 0.5
"""The part of a head with rotary positions, in these layers, of a config.json without any."""


@family_config
class Config(SparseConfig, TwoPartialRopesConfig):
    """The keys of config.json. Layers with the window may have another number of query heads, N in layers with it and q
    in the others. Experts are chosen among all, and their weights are normalized."""

    model_type: ClassVar[str] = "laguna"
    only: ClassVar = {
        "gating": (True, "per-head", "per-element"),
        "moe_apply_router_weight_on_input": (False,),
    }
    hf_names: ClassVar[Mapping[str, str]] = {
        "n_routed_experts": "num_experts",
        "routed_scaling_factor": "moe_routed_scaling_factor",
    }
    derived: ClassVar[frozenset[str]] = TwoPartialRopesConfig.derived | {
        *("n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "first_k_dense_replace"),
    }
    full_every: ClassVar[int] = 1
    rotary_part: ClassVar[float] = 1.0

    shared_expert_intermediate_size: int
    num_attention_heads_per_layer: tuple[int, ...] | None
    n_shared_experts: int = 1
    moe_router_logit_softcapping: float
    first_k_dense_replace: int = 1
    attention_bias: bool
    gating: bool | str
    rope: Rope = LAGUNA_ROPE
    local_rope: Rope = PLAIN_ROPE
    full_rotary: float = FULL_ROTARY
    local_rotary: float = 1.0

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `TwoPartialRopesConfig.read_ropes`."""
        ropes = super().read_ropes(raw, context)
        return ropes if raw.get("rope_parameters") else ropes | {"full_rotary": FULL_ROTARY}

    def contradictions(self) -> Iterator[str]:
        heads, name = self.num_attention_heads_per_layer or (), "num_attention_heads_per_layer"
        if len(heads) not in (0, self.num_hidden_layers):
            yield f"{name} has {len(heads)} entries for num_hidden_layers={self.num_hidden_layers}"
        if wrong := [count for count in heads if count < 1 or count % (self.num_key_value_heads or 1)]:
            yield f"{name} has {wrong[0]}, which is not a multiple of num_key_value_heads={self.num_key_value_heads}"
        if len(set(zip(self.kinds, heads, strict=False))) > len(set(self.kinds[: len(heads)])):
            yield f"{name} is not the same for all layers of a type"
        if self.moe_router_logit_softcapping < 0:
            yield f"moe_router_logit_softcapping={self.moe_router_logit_softcapping} is negative"
        yield from super().contradictions()

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        heads = dict(zip(self.kinds, self.num_attention_heads_per_layer or (), strict=False))
        full, window = (heads.get(kind, self.num_attention_heads) for kind in PART_FIELDS)
        return {
            **sizes,
            "W": self.shared_expert_intermediate_size,
            "N": window,
            "G": window // sizes["K"],
            "full_heads": full,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "full_layers": tuple(i for i, kind in enumerate(self.kinds) if kind == "full_attention"),
            "window_layers": tuple(i for i, kind in enumerate(self.kinds) if kind == "sliding_attention"),
        }

    @property
    def gates_heads(self) -> bool:
        """True if the output of attention has one gate for each head."""
        return self.gating != "per-element"


def query_rows(layers: str, heads: str) -> tuple[Map, ...]:
    """Returns the rows of these layers that depend on their number of query heads."""
    return under(
        f"model.layers.{{{layers}}}.self_attn",
        f"layers.{{{layers}}}.attn",
        Map("q_proj.weight", "q.kernel", f"({heads} H) D -> D {heads} H"),
        Map("o_proj.weight", "o.kernel", f"D ({heads} H) -> {heads} H D"),
        *when("attention_bias", Map("q_proj.bias", "q.bias", f"({heads} H) -> {heads} H")),
        *when("gates_heads", Map("g_proj.weight", "gate.kernel", f"{heads} D -> D {heads}")),
        *when("not gates_heads", Map("g_proj.weight", "gate.kernel", f"({heads} H) D -> D {heads} H")),
    )


TABLE = decoder_table(
    *PRE_NORMS,
    Map("self_attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
    Map("self_attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
    *when(
        "attention_bias",
        Map("self_attn.k_proj.bias", "attn.k.bias", "(K H) -> K H"),
        Map("self_attn.v_proj.bias", "attn.v.bias", "(K H) -> K H"),
        Map("self_attn.o_proj.bias", "attn.o.bias", "D"),
    ),
    *HEAD_NORMS,
    others=(
        *query_rows("full_layers", "full_heads"),
        *query_rows("window_layers", "N"),
        *mlp_rows(
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("experts.e_score_correction_bias", "router.correction", "E", buffer=True),
            *EXPERT_MLPS,
            *under("shared_expert", "shared", *SHARED),
        ),
    ),
)

FAMILY = family(Config, TABLE, "Laguna", "LagunaForCausalLM")
