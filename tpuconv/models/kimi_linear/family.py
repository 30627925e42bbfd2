"""Kimi Linear: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import StateConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import MLP, NUMBERED_EXPERT_MLPS, SHARED, decoder_table, when
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
    def axes(self) -> dict[str, Any]:
        return {
            **super().axes,
            "f": self.layers_of("full_attention"),
            "l": self.layers_of("linear_attention"),
            "n": self.linear_num_heads,
            "k": self.linear_head_dim,
            "w": self.linear_head_dim,
            "c": self.linear_conv_kernel_dim,
        }


def _is_numbers(value: Any) -> TypeGuard[list[int]]:
    """Returns True if the value is a list of the numbers of layers."""
    return isinstance(value, list) and all(type(number) is int for number in value)


KDA_INPUTS = (
    Map("q_proj.weight", "q.kernel", "(n k) D -> D n k"),
    Map("k_proj.weight", "k.kernel", "(n k) D -> D n k"),
    Map("v_proj.weight", "v.kernel", "(n w) D -> D n w"),
    Map("b_proj.weight", "b.kernel", "n D -> D n"),
)

KDA_CONVOLUTIONS = (
    Map("q_conv1d.weight", "q_conv.kernel", "(n k) 1 c -> n k c"),
    Map("k_conv1d.weight", "k_conv.kernel", "(n k) 1 c -> n k c"),
    Map("v_conv1d.weight", "v_conv.kernel", "(n w) 1 c -> n w c"),
)

KDA_BESIDE_RATES = (
    *KDA_INPUTS,
    Map("f_a_proj.weight", "f_a.kernel", "w D -> D w"),
    Map("f_b_proj.weight", "f_b.kernel", "(n k) w -> w n k"),
    Map("g_a_proj.weight", "g_a.kernel", "k D -> D k"),
    Map("g_b_proj.weight", "g_b.kernel", "(n w) k -> k n w"),
    *KDA_CONVOLUTIONS,
    Map("dt_bias", "dt_bias", "(n k) -> n k"),
    Map("o_norm.weight", "norm.scale", "w"),
    Map("o_proj.weight", "o.kernel", "D (n w) -> n w D"),
)
"""The rows of Kimi delta attention, besides `A_log`, whose layout differs."""

KDA_ROWS = (*KDA_BESIDE_RATES, Map("A_log", "a_log", "1 1 n 1 -> n"))

KIMI_NORMS = (deepseek_v3.ATTENTION_ROWS[0], deepseek_v3.ATTENTION_ROWS[-1])

TABLE = decoder_table(
    *KIMI_NORMS,
    others=(
        *under("model.layers.{f}", "layers.{f}", *deepseek_v3.ATTENTION_ROWS[1:-1]),
        *under("model.layers.{l}.self_attn", "layers.{l}.attn", *KDA_ROWS),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under(
            "model.layers.{J}.block_sparse_moe",
            "layers.{J}.moe",
            *deepseek_v3.EXPERT_ROWS[:2],
            *NUMBERED_EXPERT_MLPS,
            *under("shared_experts", "shared", *when("has_shared_experts", *SHARED)),
        ),
    ),
)

FAMILY = family(Config, TABLE, "Kimi Linear", "KimiLinearForCausalLM")
