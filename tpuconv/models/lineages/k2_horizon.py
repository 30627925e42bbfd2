"""K2-Horizon."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    ATTENTION,
    EXPERT_MLPS,
    NORMS_OF_ALL_HEADS,
    O_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SHARED_EXPERT_ROWS,
    decoder_table,
    mlp_rows,
    when,
)
from tpuconv.models.common.sparse import MixedMLPs, stepped_mlp_kinds
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Mlp, Norms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    value_experts=Word("matrices of values, of which tokens choose some", as_="E"),
    value_width=Word("values of all heads (K H), as the matrices of values have them", as_="M"),
    norm_groups=Word("groups of the dimensions of a hidden state that a norm treats each for itself"),
)

GATES = ("silu", "softplus")
"""The activations of the gates of attention."""


@family_config
class K2HorizonConfig(MixedMLPs, DecoderConfig):
    """The keys of config.json. Layers with experts choose among several matrices of values too, if there are any
    (`mova_num_experts`)."""

    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_sliding_window": (False,),
        "attention_gate_func": (None, *GATES),
        "router_score_func": ("softmax", "sigmoid"),
    }
    least: ClassVar[Mapping[str, int]] = {
        **dict.fromkeys(("num_experts", "num_experts_per_tok", "num_shared_experts"), 0),
        **dict.fromkeys(("mova_num_experts", "mova_num_experts_per_tok"), 0),
    }
    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | {"first_k_dense_replace", "mlp_layer_types"}
    left_out: ClassVar[frozenset[str]] = frozenset({"sliding_window", "padding_idx"})

    head_dim: int
    attention_bias: bool = False
    attention_gate_func: str | None = None
    query_key_norm: bool = True
    rope_head_dim: int | None = None
    layernorm_num_groups: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    num_shared_experts: int = 0
    moe_intermediate_size: int = 768
    moe_gate_bias: bool = False
    norm_topk_prob: bool = False
    router_score_func: str = "softmax"
    router_scaling_factor: float | None = 1.0
    mova_num_experts: int = 0
    mova_num_experts_per_tok: int = 0

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.hidden_size % (groups := self.layernorm_num_groups):
            yield f"hidden_size={self.hidden_size} is not a multiple of layernorm_num_groups={groups}"
        if self.rope_head_dim not in (None, self.head_dim):
            yield f"rope_head_dim={self.rope_head_dim} is not head_dim={self.head_dim}, which alone is implemented"
        for experts in ("num_experts", "mova_num_experts"):
            most, chosen = getattr(self, experts), getattr(self, f"{experts}_per_tok")
            if most and not 1 <= chosen <= most:
                yield f"{experts}_per_tok={chosen} is not between 1 and {experts}={most}"
        if self.mova_num_experts and not self.num_experts:
            yield f"mova_num_experts={self.mova_num_experts} needs layers with experts, and num_experts=0"

    @property
    def mlp_kinds(self) -> tuple[str, ...]:
        if not self.num_experts:
            return ("dense",) * self.num_hidden_layers
        return stepped_mlp_kinds(self.mlp_only_layers or (), self.decoder_sparse_step, self.num_hidden_layers)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return {
            **sizes,
            "E": self.num_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_intermediate_size * self.num_shared_experts,
            "value_experts": self.mova_num_experts,
            "value_width": sizes["K"] * sizes["H"],
            "norm_groups": self.layernorm_num_groups,
        }

    @property
    def chooses_values(self) -> bool:
        """True if layers with experts choose among several matrices of values too."""
        return bool(self.mova_num_experts)

    @property
    def has_gate(self) -> bool:
        """True if the output of attention has gates."""
        return self.attention_gate_func is not None

    @property
    def has_shared_experts(self) -> bool:
        """True if there are experts that every token uses."""
        return bool(self.num_shared_experts)


PLAIN_VALUES = (
    ATTENTION[2],
    *when("attention_bias", QKV_BIAS[2]),
)
"""The rows of values that have one matrix."""

CHOSEN_VALUES = under(
    "self_attn",
    "attn",
    Map("v_router.weight", "router.kernel", "value_experts D -> D value_experts"),
    Map("v_router.bias", "router.correction", "value_experts", when="moe_gate_bias"),
    Map("v_experts.{value_experts}.weight", "values_of.kernel", "value_width D -> value_experts D value_width"),
)
"""The rows of values that are sums of the products with chosen matrices."""

TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION[:2],
    ATTENTION[3],
    *when("attention_bias", *QKV_BIAS[:2], O_BIAS),
    Map("self_attn.gate_proj.weight", "attn.gate.kernel", "(N H) D -> D N H", when="has_gate"),
    *when("query_key_norm", *NORMS_OF_ALL_HEADS),
    others=(
        *when("not chooses_values", *under("model.layers.{L}", "layers.{L}", *PLAIN_VALUES)),
        *when("chooses_values and all_experts", *under("model.layers.{L}", "layers.{L}", *CHOSEN_VALUES)),
        *when(
            "chooses_values and some_dense",
            *under("model.layers.{I}", "layers.{I}", *PLAIN_VALUES),
            *under("model.layers.{J}", "layers.{J}", *CHOSEN_VALUES),
        ),
        *mlp_rows(
            Map("gate.weight", "router.kernel", "E D -> D E"),
            Map("gate.bias", "router.correction", "E", when="moe_gate_bias"),
            *EXPERT_MLPS,
            *when("has_shared_experts", *SHARED_EXPERT_ROWS),
        ),
    ),
)

K2_HORIZON = decoder(
    "k2_horizon",
    "K2-Horizon, dense and MoVA",
    "K2HorizonForCausalLM",
    Norms(kind="grouped RMS", module="modules.k2_horizon:Block"),
    Attn("attention_bias", module="modules.k2_horizon:Attention", norms="all heads", normed="query_key_norm"),
    Mlp(),
    Experts("some or all", module="modules.k2_horizon:MoE"),
    config=K2HorizonConfig,
    # As `configuration_k2_horizon.py` of the release has them.
    defaults={
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768},
        **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    },
    table=TABLE,
)
