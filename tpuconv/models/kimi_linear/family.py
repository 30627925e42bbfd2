"""Kimi Linear: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import MLP, NUMBERED_EXPERT_MLPS, SHARED_EXPERT_ROWS, decoder_table, when
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under

LINEAR_KEYS = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
LINEAR_KEYS |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
"""The keys of `linear_attn_config`, which counts layers from 1, and their newer names."""


@family_config
class Config(deepseek_v3.Config, StateConfig):
    """The keys of config.json. There are no rotary positions, and `head_dim` has no effect."""

    model_type: ClassVar[str] = "kimi_linear"
    only: ClassVar = {
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "tie_word_embeddings": (False,),
        "use_grouped_topk": (True,),
    }
    aliases: ClassVar = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    left_out: ClassVar[frozenset[str]] = frozenset({"head_dim", "linear_attn_config"})

    num_nextn_predict_layers: int = 0
    first_k_dense_replace: int = 1
    rope_interleave: bool = False
    mlp_layer_types: tuple[str, ...] | None
    linear_head_dim: int
    linear_num_heads: int
    linear_conv_kernel_dim: int

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `StateConfig.in_our_keys`. Also reads `linear_attn_config`."""
        out, inside = super().in_our_keys(raw), raw.get("linear_attn_config")
        if isinstance(inside, Mapping):
            out |= {name: inside[key] for key, name in LINEAR_KEYS.items() if key in inside}
            full, linear = inside.get("full_attn_layers"), inside.get("kda_layers")
            if out.get("layer_types") is None and _is_numbers(full) and _is_numbers(linear):
                kinds = dict.fromkeys(full, "full_attention") | dict.fromkeys(linear, "linear_attention")
                out["layer_types"] = [kinds[number] for number in sorted(kinds)]
        return out

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        layers = range(self.num_hidden_layers)
        return tuple("full_attention" if i and i % 4 == 0 else "linear_attention" for i in layers)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return (None,) * self.num_hidden_layers

    @property
    def score_scale(self) -> float:
        """The factor of attention scores."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "groups": self.linear_num_heads,
            "key_dim": self.linear_head_dim,
            "value_dim": self.linear_head_dim,
            "taps": self.linear_conv_kernel_dim,
        }


def _is_numbers(value: Any) -> TypeGuard[list[int]]:
    """Returns True if the value is a list of the numbers of layers."""
    return isinstance(value, list) and all(type(number) is int for number in value)


KDA_INPUTS = (
    Map("q_proj.weight", "q.kernel", "(groups key_dim) D -> D groups key_dim"),
    Map("k_proj.weight", "k.kernel", "(groups key_dim) D -> D groups key_dim"),
    Map("v_proj.weight", "v.kernel", "(groups value_dim) D -> D groups value_dim"),
    Map("b_proj.weight", "b.kernel", "groups D -> D groups"),
)

KDA_CONVOLUTIONS = (
    Map("q_conv1d.weight", "q_conv.kernel", "(groups key_dim) 1 taps -> groups key_dim taps"),
    Map("k_conv1d.weight", "k_conv.kernel", "(groups key_dim) 1 taps -> groups key_dim taps"),
    Map("v_conv1d.weight", "v_conv.kernel", "(groups value_dim) 1 taps -> groups value_dim taps"),
)

KDA_BESIDE_RATES = (
    *KDA_INPUTS,
    Map("f_a_proj.weight", "f_a.kernel", "value_dim D -> D value_dim"),
    Map("f_b_proj.weight", "f_b.kernel", "(groups key_dim) value_dim -> value_dim groups key_dim"),
    Map("g_a_proj.weight", "g_a.kernel", "key_dim D -> D key_dim"),
    Map("g_b_proj.weight", "g_b.kernel", "(groups value_dim) key_dim -> key_dim groups value_dim"),
    *KDA_CONVOLUTIONS,
    Map("dt_bias", "dt_bias", "(groups key_dim) -> groups key_dim"),
    Map("o_norm.weight", "norm.scale", "value_dim"),
    Map("o_proj.weight", "o.kernel", "D (groups value_dim) -> groups value_dim D"),
)
"""The rows of Kimi delta attention, besides `A_log`, whose layout differs."""

KDA_ROWS = (*KDA_BESIDE_RATES, Map("A_log", "a_log", "1 1 groups 1 -> groups"))

KIMI_NORMS = (deepseek_v3.ATTENTION_ROWS[0], deepseek_v3.ATTENTION_ROWS[-1])

TABLE = decoder_table(
    *KIMI_NORMS,
    others=(
        *under("model.layers.{attention_layers}", "layers.{attention_layers}", *deepseek_v3.ATTENTION_ROWS[1:-1]),
        *under("model.layers.{state_layers}.self_attn", "layers.{state_layers}.attn", *KDA_ROWS),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under(
            "model.layers.{J}.block_sparse_moe",
            "layers.{J}.moe",
            *deepseek_v3.EXPERT_ROWS[:2],
            *NUMBERED_EXPERT_MLPS,
            *when("has_shared_experts", *SHARED_EXPERT_ROWS),
        ),
    ),
)

FAMILY = family(Config, TABLE, "Kimi Linear", "KimiLinearForCausalLM")
