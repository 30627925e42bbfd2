"""Step-3.5: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.key_types import MOST_IN_A_LIST
from tpuconv.models.common.rope import PLAIN_ROPE, ROPE_KEYS, Rope
from tpuconv.models.common.rows import HEAD_NORMS, MLP, MTP_IGNORE, PRE_NORMS, SHARED, decoder_table
from tpuconv.models.common.sparse import SparseConfig
from tpuconv.models.common.windows import TwoPartialRopesConfig
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(SparseConfig, TwoPartialRopesConfig):
    """The keys of config.json. Layers with the window have a number of query heads, and rotary positions, of their own.
    Gates and hidden activations of the layers with a number in `swiglu_limits` (of experts) or in
    `swiglu_limits_shared` (of the MLP that all tokens use) are limited by it; null and 0 mean that they are not. Keys
    of the release that transformers replaces by others are read as these, or must agree with them."""

    model_type: ClassVar[str] = "step3p5"
    only: ClassVar = {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "gating": (True, "per-head"),
        "use_bidirectional_attention": (False, None),
        # Of the release. transformers does not read them, and computes this.
        "att_impl_type": ("GQA",),
        "use_head_wise_attn_gate": (True,),
        "use_qk_norm": (True,),
        "zero_centered": (True,),
        "sink": (False,),
        "use_rope_layers": ([],),
        "yarn_only_types": (["full_attention"],),
        "use_moe": (True,),
        "moe_layer_offset": (0,),
        "moe_every_n_layer": (1,),
        "moe_router_activation": ("sigmoid",),
        "use_moe_router_bias": (True,),
        "norm_expert_weight": (True,),
        "need_fp32_gate": (True,),
    }
    least: ClassVar = {"num_nextn_predict_layers": 0}
    synonyms: ClassVar[Mapping[str, str]] = {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    left_out: ClassVar[frozenset[str]] = frozenset(
        {
            *("moe_layers_enum", "attention_other_setting", "per_layer_config"),
            *("mtp_layer_types", "mtp_mlp_layer_types", "mtp_per_layer_config"),  # of layers for further tokens
            "max_seq_len",  # without effect
        }
    )
    hf_names: ClassVar[Mapping[str, str]] = {"routed_scaling_factor": "moe_router_scaling_factor"}
    derived: ClassVar[frozenset[str]] = TwoPartialRopesConfig.derived | {
        *("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob")
    }
    rotary_part: ClassVar[float] = 1.0

    share_expert_dim: int
    num_nextn_predict_layers: int = 0
    num_sliding_attention_heads: int | None
    query_pre_attn_scalar: float | None
    n_shared_experts: int = 1
    first_k_dense_replace: int = 3
    local_rope: Rope = PLAIN_ROPE
    full_rotary: float = 1.0
    local_rotary: float = 1.0
    swiglu_limits: tuple[float | None, ...] | None
    swiglu_limits_shared: tuple[float | None, ...] | None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        layers, further = out.get("num_hidden_layers", cls.num_hidden_layers), out.get("num_nextn_predict_layers", 0)
        if type(layers) is int and type(further) is int:
            for key in LAYER_LISTS:
                if isinstance(given := out.get(key), list) and len(given) == layers + further:
                    out[key] = given[:layers]
            if raw.get("moe_layers_enum") is not None and out.get("mlp_layer_types") is None:
                sparse = layer_numbers(raw["moe_layers_enum"])
                kinds = ["sparse" if layer in sparse else "dense" for layer in range(min(layers, MOST_IN_A_LIST))]
                out["mlp_layer_types"] = kinds
        other = raw.get("attention_other_setting")
        if isinstance(other, Mapping) and other.get("num_attention_heads") is not None:
            out.setdefault("num_sliding_attention_heads", other["num_attention_heads"])
        return {key: value for key, value in out.items() if key not in (*ROPE_KEYS, PARTS)} | _ropes(out)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        heads, kv_heads = self.window_heads, self.num_key_value_heads or self.num_attention_heads
        if heads % kv_heads:
            yield f"num_sliding_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        if self.query_pre_attn_scalar is not None and self.query_pre_attn_scalar <= 0:
            yield f"query_pre_attn_scalar={self.query_pre_attn_scalar} is not positive"
        for key in ("swiglu_limits", "swiglu_limits_shared"):
            limits = getattr(self, key)
            if limits is not None and len(limits) != self.num_hidden_layers:
                yield f"{key} has {len(limits)} entries for num_hidden_layers={self.num_hidden_layers}"
            if any(limit is not None and limit < 0 for limit in limits or ()):
                yield f"{key} has a negative number"

    def disagreements(self, raw: Mapping[str, Any]) -> Iterator[str]:
        """As `DecoderConfig.disagreements`: the sizes of layers with the window."""
        expected = {
            "attention_type": "sliding_attention",
            "num_attention_heads": self.window_heads,
            "num_attention_groups": self.sizes["K"],
            "head_dim": self.sizes["H"],
            "true_head_dim": self.sizes["H"],
        }
        other = raw.get("attention_other_setting") or {}
        for key, value in other.items() if isinstance(other, Mapping) else [("attention_other_setting", other)]:
            if value != expected.get(key):
                yield f"{key}={short(value)} of layers with the window is not {expected.get(key)}"
        given, heads = raw.get("per_layer_config") or {}, {"num_attention_heads": self.window_heads}
        given = given if isinstance(given, Mapping) else {"": given}
        by_layer = {str(layer).lstrip("0") or "0": value for layer, value in given.items()}  # keys are "01" to "44"
        differ = () if self.window_heads == self.num_attention_heads else self.layer_sets["window_layers"]
        if given and by_layer != {str(layer): heads for layer in differ}:
            yield f"per_layer_config={short(given, 300)} is not {heads} for each layer with the window"

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    @property
    def window_heads(self) -> int:
        """The number of query heads of layers with the window."""
        return self.num_sliding_attention_heads or self.num_attention_heads

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "N": self.window_heads,
            "G": self.window_heads // sizes["K"],
            "full_heads": self.num_attention_heads,
            "W": self.share_expert_dim,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        layers = self.num_hidden_layers
        return {
            **super().layer_sets,
            "window_layers": tuple(i for i, kind in enumerate(self.kinds) if kind == "sliding_attention"),
            "full_layers": tuple(i for i, kind in enumerate(self.kinds) if kind == "full_attention"),
            "U": tuple(range(layers, layers + self.num_nextn_predict_layers)),
        }

    @property
    def limits(self) -> tuple[tuple[float | None, float | None], ...]:
        """For each layer the limits of its experts, and of its MLP or shared expert; None where there is none."""
        none = (None,) * self.num_hidden_layers
        both = (self.swiglu_limits or none, self.swiglu_limits_shared or none)
        return tuple((experts or None, shared or None) for experts, shared in zip(*both, strict=True))

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        return tuple(zip(super().layer_kinds, self.limits, strict=True))


PARTS = "partial_rotary_factors"
LAYER_LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta", PARTS)
"""Lists with an entry for each layer. In the release those of layers for further tokens follow."""


def layer_numbers(given: Any) -> set[int]:
    """Returns the numbers of layers that `moe_layers_enum` lists: in a list, or in a string between commas."""
    parts = [part for part in given.split(",") if part.strip()] if isinstance(given, str) else given
    try:
        return set(map(int, parts))
    except (TypeError, ValueError):
        raise ConfigError(f"config.json: moe_layers_enum={short(given)} does not list layers") from None


def _ropes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `rope_parameters` of each type of layers. In the release each layer has a base and a part of a head
    with rotary positions, and `rope_scaling` is that of layers that see all tokens."""
    kinds = raw.get("layer_types")
    whole, windowed = "full_attention", "sliding_attention"
    found = [kind for kind in (whole, windowed) if kind in kinds] if isinstance(kinds, list) else [whole]
    if nested := raw.get("rope_parameters"):
        if not all(isinstance(nested.get(kind), Mapping) for kind in found):
            raise ConfigError(f"config.json: rope_parameters={short(nested, 300)} has no object for each type of layer")
        return {"rope_parameters": {kind: nested[kind] for kind in found}}
    ropes = {
        kind: {
            name: _of_layers(key, raw.get(key), kinds, kind)
            for key, name in (("rope_theta", "rope_theta"), (PARTS, "partial_rotary_factor"))
        }
        for kind in found
    }
    if whole in ropes:
        ropes[whole] |= raw.get("rope_scaling") or {}
    return {"rope_parameters": ropes}


def _of_layers(key: str, given: Any, kinds: Any, kind: str) -> Any:
    """Returns the value that a key has for all layers of a type: itself, or its entries for these layers."""
    if not isinstance(given, list):
        return given
    kinds = kinds if isinstance(kinds, list) else [kind] * len(given)
    if len(given) != len(kinds):
        raise ConfigError(f"config.json: {key} has {len(given)} entries for {len(kinds)} layers")
    values = [value for value, other in zip(given, kinds, strict=True) if other == kind]
    if any(value != values[0] for value in values):
        raise ConfigError(f"config.json: {key}={short(given, 300)} is not the same for all layers with {kind!r}")
    return values[0] if values else None


def _queries(N: str) -> tuple[Map, ...]:
    return (
        Map("q_proj.weight", "q.kernel", f"({N} H) D -> D {N} H"),
        Map("o_proj.weight", "o.kernel", f"D ({N} H) -> {N} H D"),
        Map("g_proj.weight", "gate.kernel", f"{N} D -> D {N}"),
    )


ROUTER_ROW = Map("moe.gate.weight", "moe.router.kernel", "E D -> D E")

STACKED_MLPS = (
    Map("moe.gate_proj.weight", "moe.gate.kernel", "E M D -> E D M"),
    Map("moe.up_proj.weight", "moe.up.kernel", "E M D -> E D M"),
    Map("moe.down_proj.weight", "moe.down.kernel", "E D M -> E M D"),
    *under("share_expert", "moe.shared", *SHARED),
)

STACKED_EXPERT_ROWS = (
    ROUTER_ROW,
    Map("moe.router_bias", "moe.router.correction", "E", buffer=True),
    *STACKED_MLPS,
)

TABLE = decoder_table(
    *PRE_NORMS,
    Map("self_attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
    Map("self_attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
    *HEAD_NORMS,
    others=(
        *under("model.layers.{window_layers}.self_attn", "layers.{window_layers}.attn", *_queries("N")),
        *under("model.layers.{full_layers}.self_attn", "layers.{full_layers}.attn", *_queries("full_heads")),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}", "layers.{J}", *STACKED_EXPERT_ROWS),
    ),
    ignore=MTP_IGNORE,
)

FAMILY = family(Config, TABLE, "Step-3.5-Flash", "Step3p5ForCausalLM")
