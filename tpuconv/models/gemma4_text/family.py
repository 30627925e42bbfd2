"""Gemma 4, the text model on its own: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, rope_of_layers
from tpuconv.models.common.rows import MLP, SANDWICH_NORMS, STACKED_EXPERTS, decoder_table, when
from tpuconv.models.common.shared_keys import SharedKeysConfig
from tpuconv.models.common.windows import ROPES_BY_KIND, refuse_flat_ropes
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    full_head_dim=Word("head dimension of layers that see all tokens"),
    narrow_layers=Word("layers with an MLP of width F"),
    wide_layers=Word("layers with an MLP of the larger width"),
    wide_mlp=Word("the larger MLP width", as_="F"),
)

GEMMA4_ROPE = Rope("proportional", theta=1e6, partial_rotary_factor=0.25)
"""The rotary positions of layers that see all tokens, of a config.json without any."""


@family_config
class Config(SharedKeysConfig):
    """The keys of config.json. Layers that see all tokens have heads of another size (`global_head_dim`) and, with
    `attention_k_eq_v`, another number of key-value heads. `per_layer_config` of newer files says the same by layer."""

    model_type: ClassVar[str] = "gemma4_text"
    full_every: ClassVar[int] = 6
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND
    left_out: ClassVar[frozenset[str]] = frozenset({"per_layer_config"})
    derived: ClassVar[frozenset[str]] = SharedKeysConfig.derived | {"local_rope"}
    least: ClassVar[Mapping[str, int]] = {**SharedKeysConfig.least, "pad_token_id": 0}
    only: ClassVar = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "hidden_act": ("gelu_pytorch_tanh", None),  # without effect
        "use_bidirectional_attention": (None, "vision"),
        "attention_bias": (False,),
    }

    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    rope: Rope = GEMMA4_ROPE
    local_rope: Rope = PLAIN_ROPE
    attention_k_eq_v: bool
    use_double_wide_mlp: bool
    enable_moe_block: bool
    num_experts: int | None
    top_k_experts: int | None
    moe_intermediate_size: int | None
    use_bidirectional_attention: str | None
    pad_token_id: int | None = 0

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(raw) | _sizes_of_full_attention(raw, cls.head_dim)

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        refuse_flat_ropes(cls, raw)
        proportional = {"rope_type": "proportional", "partial_rotary_factor": cls.rope.partial_rotary_factor}
        full = rope_of_layers(raw, "full_attention", cls.rope.theta, proportional)
        sliding = rope_of_layers(raw, "sliding_attention", cls.local_rope.theta)
        return {
            "rope": Rope.from_hf(full, cls.model_type, context),
            "local_rope": Rope.from_hf(sliding, cls.model_type, context),
        }

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        heads, kv_heads = self.num_attention_heads, self.sizes["full_kv_heads"]
        if heads % kv_heads:
            yield f"num_attention_heads={heads} is not a multiple of num_global_key_value_heads={kv_heads}"
        if self.global_head_dim % 2:
            yield f"global_head_dim={self.global_head_dim} is odd: rotary positions need pairs"
        sizes = (self.num_experts, self.top_k_experts, self.moe_intermediate_size)
        if self.enable_moe_block and None in sizes:
            yield "layers with experts need num_experts, top_k_experts and moe_intermediate_size"
        elif self.enable_moe_block and (self.top_k_experts or 0) > (self.num_experts or 0):
            yield f"top_k_experts={self.top_k_experts} is more than num_experts={self.num_experts}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers. The last one sees all tokens, as in transformers."""
        return (*super().kinds[:-1], "full_attention")

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return {
            **sizes,
            "E": self.num_experts or 0,
            "M": self.moe_intermediate_size or 0,
            "full_head_dim": self.global_head_dim,
            "full_kv_heads": kv_heads or sizes["K"],
            "wide_mlp": 2 * self.intermediate_size,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        sets = super().layer_sets
        wide = sets["shared_kv_layers"] if self.use_double_wide_mlp else ()
        return {
            **sets,
            "narrow_layers": tuple(i for i in range(self.num_hidden_layers) if i not in wide),
            "wide_layers": wide,
        }

    @property
    def num_experts_per_tok(self) -> int:
        """`top_k_experts`, as other families name it; 0 without experts."""
        return self.top_k_experts or 0

    @property
    def sees_images(self) -> str:
        return "sliding" if self.use_bidirectional_attention == "vision" else ""

    @property
    def placeholder_as(self) -> int:
        return self.pad_token_id or 0

    @property
    def rope_dims(self) -> tuple[int, ...]:
        return tuple(self.sizes["H"] if kind == "sliding_attention" else self.global_head_dim for kind in self.kinds)

    @property
    def has_global_values(self) -> bool:
        return not self.attention_k_eq_v

    @property
    def unscannable(self) -> str:
        return "its layers differ in the size of heads, and some in having keys and values"


def _sizes_of_full_attention(raw: Mapping[str, Any], head_dim: int | None) -> dict[str, Any]:
    """Returns the `global_head_dim` and the `num_global_key_value_heads` that `per_layer_config` has. A size that it
    leaves out is that of all layers, as transformers writes it: of equal sizes nothing is left.

    Raises:
        ConfigError: it does not say the same for all layers that it names.
    """
    if (given := raw.get("per_layer_config")) is None:
        return {}
    parts = list(given.values()) if isinstance(given, Mapping) else [None]
    first = parts[0] if parts else {}
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(first, Mapping) or set(first) - known or any(part != first for part in parts):
        raise ConfigError(f"config.json: per_layer_config={short(given, 300)} is not the same for all its layers")
    return {
        "global_head_dim": first.get("head_dim", raw.get("head_dim", head_dim)),
        "num_global_key_value_heads": first.get("num_key_value_heads"),
    }


def _attention(H: str, K: str) -> tuple[Map, ...]:
    return (
        Map("k_proj.weight", "k.kernel", f"({K} {H}) D -> D {K} {H}"),
        Map("k_norm.weight", "k_norm.scale", H),
        Map("v_proj.weight", "v.kernel", f"({K} {H}) D -> D {K} {H}"),
    )


def _queries(H: str) -> tuple[Map, ...]:
    return (
        Map("q_proj.weight", "q.kernel", f"(N {H}) D -> D N {H}"),
        Map("q_norm.weight", "q_norm.scale", H),
        Map("o_proj.weight", "o.kernel", f"D (N {H}) -> N {H} D"),
    )


def _in(index: str, *rows: Map, part: str = "self_attn", to: str = "attn") -> tuple[Map, ...]:
    return under(f"model.layers.{{{index}}}.{part}", f"layers.{{{index}}}.{to}", *rows)


def _unused(kind: str, *rows: Map) -> tuple[Map, ...]:
    """Returns rows of the keys and values that no layer reads. transformers writes no tensors for them; those that the
    layer reads instead stand for them."""
    return tuple(replace(row, otherwise=f"last_{kind}_layer") for row in _in(f"unused_{kind}_layers", *rows))


FULL_KV = _attention("full_head_dim", "full_kv_heads")
QUERIES_OF_LAYERS = (
    *_in("window_layers", *_queries("H")),
    *_in("full_layers", *_queries("full_head_dim")),
)
ATTENTION_OF_LAYERS = (
    *QUERIES_OF_LAYERS,
    *_in("window_kv_layers", *_attention("H", "K")),
    *_in("full_kv_layers", *FULL_KV[:2]),
    *when("has_global_values", *_in("full_kv_layers", *FULL_KV[2:])),
    *_unused("window", *_attention("H", "K")),
    *_unused("full", *FULL_KV[:2]),
    *when("has_global_values", *_unused("full", *FULL_KV[2:])),
)
MLP_OF_LAYERS = (
    *under("model.layers.{narrow_layers}.mlp", "layers.{narrow_layers}.mlp", *MLP),
    *under(
        "model.layers.{wide_layers}.mlp",
        "layers.{wide_layers}.mlp",
        Map("gate_proj.weight", "gate.kernel", "wide_mlp D -> D wide_mlp"),
        Map("up_proj.weight", "up.kernel", "wide_mlp D -> D wide_mlp"),
        Map("down_proj.weight", "down.kernel", "D wide_mlp -> wide_mlp D"),
    ),
)
LAYER_INPUTS = (
    Map("per_layer_input_gate.weight", "per_layer_gate.kernel", "layer_dim D -> D layer_dim"),
    Map("per_layer_projection.weight", "per_layer_projection.kernel", "D layer_dim -> layer_dim D"),
    Map("post_per_layer_input_norm.weight", "post_per_layer_norm.scale", "D"),
)
INPUTS_OF_LAYERS = (
    Map(
        "model.embed_tokens_per_layer.weight",
        "per_layer.embed.embedding",
        "layer_vocab (all_layers layer_dim) -> layer_vocab all_layers layer_dim",
    ),
    Map(
        "model.per_layer_model_projection.weight",
        "per_layer.projection.kernel",
        "(all_layers layer_dim) D -> D all_layers layer_dim",
    ),
    Map("model.per_layer_projection_norm.weight", "per_layer.norm.scale", "layer_dim"),
)
EXPERT_PARTS = (
    Map("post_feedforward_layernorm_1.weight", "post_mlp_norm_1.scale", "D"),
    Map("post_feedforward_layernorm_2.weight", "post_moe_norm.scale", "D"),
    Map("pre_feedforward_layernorm_2.weight", "moe_norm.scale", "D"),
    Map("router.proj.weight", "moe.router.kernel", "E D -> D E"),
    Map("router.scale", "moe.router_scale", "D"),
    Map("router.per_expert_scale", "moe.expert_scale", "E"),
)
USES_EARLIER = "of a layer that uses the keys and values of an earlier one"
SHARED_ALREADY = {
    f"model.layers.{{shared_kv_layers}}.self_attn.{name}.weight": USES_EARLIER
    for name in ("k_proj", "v_proj", "k_norm", "v_norm")
}
"""Tensors that releases have, and that no model uses. Programs with arrays for them have rows, in `unused_*_layers`."""


TABLE = decoder_table(
    *SANDWICH_NORMS,
    *when("enable_moe_block", *EXPERT_PARTS),
    *when("has_layer_inputs", *LAYER_INPUTS),
    Map("layer_scalar", "layer_scalar", "1", buffer=True),
    others=(
        *when("enable_moe_block", *under("model.layers.{L}", "layers.{L}.moe", *STACKED_EXPERTS)),
        *ATTENTION_OF_LAYERS,
        *MLP_OF_LAYERS,
        *when("has_layer_inputs", *INPUTS_OF_LAYERS),
    ),
    ignore=SHARED_ALREADY,
)

FAMILY = family(Config, TABLE, "Gemma 4, the text model on its own", "Gemma4ForCausalLM")
