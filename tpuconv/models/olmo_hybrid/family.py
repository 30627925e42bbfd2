"""OLMo Hybrid: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rope import PLAIN_ROPE, Rope, check_rope_keys
from tpuconv.models.common.rows import (
    ATTENTION,
    MLP,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    POST_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under


@family_config
class Config(StateConfig):
    """The keys of config.json. With a `rope_theta` of null there are no rotary positions, as in the releases."""

    model_type: ClassVar[str] = "olmo_hybrid"

    has_rope: bool = True
    attention_bias: bool
    linear_num_key_heads: int | None
    linear_num_value_heads: int | None
    linear_key_head_dim: int | None
    linear_value_head_dim: int | None
    linear_conv_kernel_dim: int
    linear_allow_neg_eigval: bool

    derived: ClassVar = StateConfig.derived | {"has_rope"}

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        check_rope_keys(raw)
        given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        name = "rope_theta"
        is_null = (given if name in given else {name: raw.get(name, PLAIN_ROPE.theta)})[name] is None
        return {"has_rope": not is_null, **({} if is_null else super().read_ropes(raw, context))}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        keys, values = self.key_heads, self.linear_num_value_heads or self.num_attention_heads
        if values % keys:
            yield f"linear_num_value_heads={values} is not a multiple of linear_num_key_heads={keys}"

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        last = self.num_hidden_layers - 1
        layers = range(self.num_hidden_layers)
        return tuple("full_attention" if i % 4 == 3 or i == last < 3 else "linear_attention" for i in layers)

    @property
    def key_heads(self) -> int:
        """The number of key heads of linear attention."""
        return self.linear_num_key_heads or self.num_attention_heads

    @property
    def sizes(self) -> dict[str, int]:
        keys = self.linear_key_head_dim or int(0.75 * self.hidden_size / self.key_heads)
        return {
            **super().sizes,
            "groups": self.key_heads,
            "per_group": (self.linear_num_value_heads or self.num_attention_heads) // self.key_heads,
            "key_dim": keys,
            "value_dim": self.linear_value_head_dim or 2 * keys,
            "taps": self.linear_conv_kernel_dim,
        }

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (self.rope if self.has_rope else None,) * self.num_hidden_layers


DELTA_ROWS = (
    Map("q_proj.weight", "q.kernel", "(groups key_dim) D -> D groups key_dim"),
    Map("k_proj.weight", "k.kernel", "(groups key_dim) D -> D groups key_dim"),
    Map("v_proj.weight", "v.kernel", "(groups per_group value_dim) D -> D groups per_group value_dim"),
    Map("g_proj.weight", "z.kernel", "(groups per_group value_dim) D -> D groups per_group value_dim"),
    Map("a_proj.weight", "a.kernel", "(groups per_group) D -> D groups per_group"),
    Map("b_proj.weight", "b.kernel", "(groups per_group) D -> D groups per_group"),
    Map("q_conv1d.weight", "q_conv.kernel", "(groups key_dim) 1 taps -> groups key_dim taps"),
    Map("k_conv1d.weight", "k_conv.kernel", "(groups key_dim) 1 taps -> groups key_dim taps"),
    Map("v_conv1d.weight", "v_conv.kernel", "(groups per_group value_dim) 1 taps -> groups per_group value_dim taps"),
    Map("A_log", "a_log", "(groups per_group) -> groups per_group"),
    Map("dt_bias", "dt_bias", "(groups per_group) -> groups per_group"),
    Map("o_norm.weight", "norm.scale", "value_dim"),
    Map("o_proj.weight", "o.kernel", "D (groups per_group value_dim) -> groups per_group value_dim D"),
)

TABLE: MappingTable = decoder_table(
    *under("mlp", "mlp", *MLP),
    others=(
        *under(
            "model.layers.{attention_layers}",
            "layers.{attention_layers}",
            *ATTENTION,
            *when("attention_bias", *QKV_BIAS, O_BIAS),
            *NORMS_OF_ALL_HEADS,
            *POST_NORMS,
        ),
        *under(
            "model.layers.{state_layers}",
            "layers.{state_layers}",
            Map("attention_layer_norm.weight", "attn_norm.scale", "D"),
            Map("feedforward_layer_norm.weight", "mlp_norm.scale", "D"),
            *under("linear_attn", "attn", *DELTA_ROWS),
        ),
    ),
    recut=[tuple(f"model.layers.{{state_layers}}.linear_attn.{x}_conv1d.weight" for x in "qkv")],
)

FAMILY = family(Config, TABLE, "OLMo Hybrid", "OlmoHybridForCausalLM")
