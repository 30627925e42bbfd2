"""MiMo-V2-Flash: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.kinds import numbered_kinds
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import (
    CORRECTED_ROUTER,
    EXPERT_MLPS,
    FURTHER_TOKENS,
    MLP,
    MTP_FINAL,
    PRE_NORMS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import ROPES_BY_KIND, TwoPartialRopesConfig
from tpuconv.models.registry import family
from tpuconv.notation.forms import Forms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    value_head_dim=Word("dimension of a value head"),
    full_group=Word("query heads of a key-value head in layers that see all tokens"),
    window_group=Word("key-value heads of layers with the window, for each of those that see all tokens"),
)

ROTARY_PART = 0.334
MIMO_ROPE, MIMO_LOCAL_ROPE = Rope(theta=5_000_000.0), Rope(theta=10_000.0)
RELEASED_KEYS = {
    *("sliding_window_size", "hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "partial_rotary_factor"),
    *("rope_theta", "swa_rope_theta", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"),
    *("swa_v_head_dim", "attention_chunk_size"),
}
"""Keys that transformers replaces by others. No layer attends in chunks."""
NUMBERED_KINDS = (
    ("hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention")),
    ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
)
"""Lists with 0 or 1 for each layer, the keys that replace them, and what 0 and 1 stand for."""


def _says_numbers_alone(rope: Any) -> bool:
    """Returns whether an object of rotary positions is one for all layers, without a kind of its own."""
    if not isinstance(rope, Mapping) or rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
        return False
    return bool(rope.get("rope_type", rope.get("type", "default")) == "default")


@family_config
class Config(SparseConfig, TwoPartialRopesConfig):
    """The keys of config.json. Layers with the window have twice as many key-value heads, sinks and rotary positions of
    their own, `local_rope`. Keys of the release that transformers replaces by others are read as these, or must agree
    with them."""

    model_type: ClassVar[str] = "mimo_v2_flash"
    only: ClassVar = {
        "n_shared_experts": (None, 0),
        "add_swa_attention_sink_bias": (True,),
        "add_full_attention_sink_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    least: ClassVar = {"n_shared_experts": 0}
    derived: ClassVar[frozenset[str]] = TwoPartialRopesConfig.derived | {"first_k_dense_replace"}
    left_out: ClassVar[frozenset[str]] = frozenset(RELEASED_KEYS)
    nullable: ClassVar[frozenset[str]] = frozenset({"routed_scaling_factor", "n_shared_experts"})
    rotary_part: ClassVar[float] = ROTARY_PART

    v_head_dim: int
    attention_value_scale: float | None
    n_shared_experts: int = 0
    first_k_dense_replace: int = 1
    attention_bias: bool
    rope: Rope = MIMO_ROPE
    local_rope: Rope = MIMO_LOCAL_ROPE
    full_rotary: float = ROTARY_PART
    local_rotary: float = ROTARY_PART

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        if raw.get("sliding_window_size") is not None:  # tokens before the token itself
            out["sliding_window"] = raw["sliding_window_size"] + 1
        for key, newer, names in NUMBERED_KINDS:
            if raw.get(key) is not None and raw.get(newer) is None:
                out[newer] = numbered_kinds(key, raw[key], names)
        if raw.get("layernorm_epsilon") is not None:
            out.setdefault("rms_norm_eps", raw["layernorm_epsilon"])
        given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if _says_numbers_alone(given):
            out.pop("rope_scaling", None)
            theta, part = (
                given.get(key) if raw.get(key) is None else raw[key] for key in ("rope_theta", "partial_rotary_factor")
            )
            thetas = {"full_attention": theta, "sliding_attention": raw.get("swa_rope_theta")}
            out["rope_parameters"] = {
                kind: {"rope_theta": getattr(cls, ROPES_BY_KIND[kind]).theta if own is None else own}
                | ({} if part is None else {"partial_rotary_factor": part})
                for kind, own in thetas.items()
            }
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_attention_heads % self.window_kv_heads:
            yield (
                f"num_attention_heads={self.num_attention_heads} is not a multiple of the {self.window_kv_heads} "
                "key-value heads of layers with the window, twice num_key_value_heads"
            )

    @property
    def window_kv_heads(self) -> int:
        """The number of key-value heads in layers with the window."""
        return 2 * (self.num_key_value_heads or self.num_attention_heads)

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        """As `DecoderConfig.disagreements`: the sizes of layers with the window."""
        expected = {
            "swa_num_attention_heads": self.num_attention_heads,
            "swa_num_key_value_heads": self.sizes["K"],
            "swa_head_dim": self.sizes["H"],
            "swa_v_head_dim": self.v_head_dim,
            "sliding_window_size": (self.sliding_window or 0) - 1,
            "layernorm_epsilon": self.rms_norm_eps,
        }
        for key, value in expected.items():
            if raw.get(key) not in (None, value):
                yield f"{key}={short(raw[key])} is not {value}, which follows from other keys"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        layers = range(self.num_hidden_layers)
        return tuple("full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in layers)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "K": self.window_kv_heads,
            "G": sizes["N"] // self.window_kv_heads,
            "full_kv_heads": sizes["K"],
            "value_head_dim": self.v_head_dim,
            "A": self.hidden_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "U": range(MTP_LAYERS),
            "window_layers": tuple(i for i, kind in enumerate(self.kinds) if kind == "sliding_attention"),
            "full_layers": tuple(i for i, kind in enumerate(self.kinds) if kind == "full_attention"),
        }


MTP_LAYERS = 3
"""The layers for multi-token prediction of the release, whose number config.json does not say."""

QUERY_OUTPUT_ROWS = (
    Map("self_attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
    Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N value_head_dim) -> N value_head_dim D"),
    *when("attention_bias", Map("self_attn.q_proj.bias", "attn.q.bias", "(N H) -> N H")),
)

LOCAL_ROWS = (
    Map("k_proj.weight", "k.kernel", "(K H) D -> D K H"),
    Map("v_proj.weight", "v.kernel", "(K value_head_dim) D -> D K value_head_dim"),
    *when("attention_bias", Map("k_proj.bias", "k.bias", "(K H) -> K H")),
    *when("attention_bias", Map("v_proj.bias", "v.bias", "(K value_head_dim) -> K value_head_dim")),
    Map("attention_sink_bias", "sinks", "N"),
)
"""Keys, values and sinks of layers with the window."""

FULL_KEYS_VALUES = (
    Map("k_proj.weight", "k.kernel", "(full_kv_heads H) D -> D full_kv_heads H"),
    Map("v_proj.weight", "v.kernel", "(full_kv_heads value_head_dim) D -> D full_kv_heads value_head_dim"),
    *when("attention_bias", Map("k_proj.bias", "k.bias", "(full_kv_heads H) -> full_kv_heads H")),
    *when(
        "attention_bias",
        Map("v_proj.bias", "v.bias", "(full_kv_heads value_head_dim) -> full_kv_heads value_head_dim"),
    ),
)
"""Keys and values of layers that see all tokens."""

KEYS_VALUES_BY_KIND = (
    *under("model.layers.{window_layers}.self_attn", "layers.{window_layers}.attn", *LOCAL_ROWS),
    *under("model.layers.{full_layers}.self_attn", "layers.{full_layers}.attn", *FULL_KEYS_VALUES),
)
"""Keys, values and sinks of all layers."""

TABLE = decoder_table(
    *PRE_NORMS,
    *QUERY_OUTPUT_ROWS,
    others=(
        *KEYS_VALUES_BY_KIND,
        *mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS),
        *under(
            "model.mtp.layers.{U}",
            "mtp.{U}",
            *MTP_FINAL,
            PRE_NORMS[0],
            *QUERY_OUTPUT_ROWS,
            *under("self_attn", "attn", *LOCAL_ROWS),
            Map("pre_mlp_layernorm.weight", "mlp_norm.scale", "D"),
            *under("mlp", "mlp", *MLP),
        ),
    ),
    ignore={"model.mtp.*": FURTHER_TOKENS},
)

FAMILY = family(Config, TABLE, "MiMo-V2-Flash", "MiMoV2FlashForCausalLM")


class AnyHeads:
    """Layers with the window have as many key-value heads as `swa_num_key_value_heads` says. A family's Config derives
    from this class and from `Config`, in this order."""

    num_key_value_heads: int | None
    num_attention_heads: int
    swa_num_key_value_heads: int | None

    @property
    def window_kv_heads(self) -> int:
        """See `Config.window_kv_heads`."""
        found: int = super().window_kv_heads  # type: ignore[misc]
        return self.swa_num_key_value_heads or found

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        if self.window_kv_heads % (full := self.num_key_value_heads or self.num_attention_heads):
            yield f"swa_num_key_value_heads={self.window_kv_heads} is not a multiple of num_key_value_heads={full}"

    @property
    def sizes(self) -> dict[str, int]:
        """See `DecoderConfig.sizes`."""
        sizes: dict[str, int] = super().sizes  # type: ignore[misc]
        full = sizes["full_kv_heads"]
        return {**sizes, "full_group": sizes["N"] // full, "window_group": sizes["K"] // full}


QKV = ("q.kernel", "k.kernel", "v.kernel")
WINDOW_QKV: Forms = {
    "apart": (Map("q_proj.weight", "q.kernel", "(N H) D -> D N H"), *LOCAL_ROWS[:2]),
    "joined": (
        Map(
            "qkv_proj.weight",
            QKV,
            "(full_kv_heads ((full_group H) + (window_group H) + (window_group value_head_dim))) D "
            "-> D (full_kv_heads full_group) H, D (full_kv_heads window_group) H, "
            "D (full_kv_heads window_group) value_head_dim",
        ),
    ),
}
FULL_QKV: Forms = {
    "apart": (Map("q_proj.weight", "q.kernel", "(N H) D -> D N H"), *FULL_KEYS_VALUES[:2]),
    "joined": (
        Map(
            "qkv_proj.weight",
            QKV,
            "(full_kv_heads ((full_group H) + H + value_head_dim)) D "
            "-> D (full_kv_heads full_group) H, D full_kv_heads H, D full_kv_heads value_head_dim",
        ),
    ),
}
"""Queries, keys and values of MiMo V2.5 and V2.6: three matrices, or one with a part for each of
`num_key_value_heads` devices."""

O_ROW, SINKS_ROW = QUERY_OUTPUT_ROWS[1], LOCAL_ROWS[-1]
WINDOW_ATTENTION = (*under("self_attn", "attn", *WINDOW_QKV["joined"], SINKS_ROW), O_ROW)

V2_TABLE = decoder_table(
    *PRE_NORMS,
    others=(
        *under("model.layers.{window_layers}", "layers.{window_layers}", *WINDOW_ATTENTION),
        *under(
            "model.layers.{full_layers}",
            "layers.{full_layers}",
            *under("self_attn", "attn", *FULL_QKV["joined"]),
            O_ROW,
        ),
        *mlp_rows(*CORRECTED_ROUTER, *EXPERT_MLPS),
        *under(
            "model.mtp.layers.{U}",
            "mtp.{U}",
            *MTP_FINAL,
            PRE_NORMS[0],
            *WINDOW_ATTENTION,
            Map("pre_mlp_layernorm.weight", "mlp_norm.scale", "D"),
            *under("mlp", "mlp", *MLP),
        ),
    ),
    ignore={"model.mtp.*": FURTHER_TOKENS},
)
"""The table of MiMo V2.5 and V2.6, without biases of attention."""
