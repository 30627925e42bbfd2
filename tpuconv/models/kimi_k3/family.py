"""Kimi K3: config and mapping table of the text model."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import MLP, SHARED_EXPERT_ROWS, decoder_table, when
from tpuconv.models.common.wrapper import BRINGS, SEES, WrapperConfig, inside
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.kimi_linear import family as kimi_linear
from tpuconv.models.kimi_linear.family import KDA_CONVOLUTIONS, KDA_INPUTS, KIMI_NORMS
from tpuconv.models.registry import family
from tpuconv.models.towers.moonvit.family import KIMI_K3_VISION
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(padded_groups=Word("rates of decay of heads of linear attention, padded to a multiple of 128"))

GATE_KEYS = ("gate_lower_bound", "use_full_rank_gate")
"""Further keys of `linear_attn_config`."""


class ResidualBlocks:
    """A decoder whose layers attend to the hidden states before blocks of `attn_res_block_size` layers. A family's
    Config derives from this class and from another, in this order."""

    num_hidden_layers: int
    attn_res_block_size: int

    @property
    def block_count(self) -> int:
        """The number of blocks of layers."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    @property
    def inseparable(self) -> str:
        """See `DecoderConfig.inseparable`."""
        return "its layers pass on the hidden states before blocks of layers"

    @property
    def unscannable(self) -> str:
        """See `DecoderConfig.unscannable`."""
        return "layers read the hidden states before all blocks of layers until them"


@family_config
class Config(ResidualBlocks, WrapperConfig, kimi_linear.Config):
    """The keys of `text_config`, which may stand at the root. What Kimi Linear does not have defaults to the values
    of the release. Without `gate_lower_bound` decays have no bound."""

    model_type: ClassVar[str] = "kimi_k3"
    flat: ClassVar[bool] = True
    outside_keys: ClassVar[frozenset[str]] = frozenset({"ignore_index"})
    only: ClassVar = {
        **kimi_linear.Config.only,
        "hidden_act": ("situ",),
        "latent_moe_use_norm": (True,),
        "mla_use_output_gate": (True,),
        "num_nextn_predict_layers": (0,),
        "topk_method": ("noaux_tc",),
        "use_full_rank_gate": (True,),
    }

    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    attn_res_block_size: int = 12
    gate_lower_bound: float | None = None
    routed_expert_hidden_size: int = 3584
    routed_scaling_factor: float = 1.0

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As Kimi Linear's. `linear_attn_config` has keys of gates too."""
        out, inner = super().in_our_keys(raw), raw.get("linear_attn_config")
        return out | ({key: inner[key] for key in GATE_KEYS if key in inner} if isinstance(inner, Mapping) else {})

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.activation_situ_beta <= 0 or (self.activation_situ_linear_beta or 1) <= 0:
            yield "activation_situ_beta and activation_situ_linear_beta are not positive"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "expert_dim": self.routed_expert_hidden_size,
            "padded_groups": -(-self.linear_num_heads // 128) * 128,
        }


K3_DELTA_ROWS = (
    *KDA_INPUTS,
    Map("f_a_proj.weight", "f_a.kernel", "value_dim D -> D value_dim"),
    Map("f_b_proj.weight", "f_b.kernel", "(groups key_dim) value_dim -> value_dim groups key_dim"),
    Map("g_proj.weight", "g.kernel", "(groups value_dim) D -> D groups value_dim"),
    *KDA_CONVOLUTIONS,
    Map("A_log", "a_log", "padded_groups"),
    Map("dt_bias", "dt_bias", "(groups key_dim) -> groups key_dim"),
    Map("o_norm.weight", "norm.scale", "value_dim"),
    Map("o_proj.weight", "o.kernel", "D (groups value_dim) -> groups value_dim D"),
)

K3_EXPERT_ROWS = (
    *deepseek_v3.EXPERT_ROWS[:2],
    Map("routed_expert_down_proj.weight", "to_latent.kernel", "expert_dim D -> D expert_dim"),
    Map("experts.{E}.w1.weight", "gate.kernel", "M expert_dim -> E expert_dim M"),
    Map("experts.{E}.w3.weight", "up.kernel", "M expert_dim -> E expert_dim M"),
    Map("experts.{E}.w2.weight", "down.kernel", "expert_dim M -> E M expert_dim"),
    Map("routed_expert_norm.weight", "latent_norm.scale", "expert_dim"),
    Map("routed_expert_up_proj.weight", "from_latent.kernel", "D expert_dim -> expert_dim D"),
    *when("has_shared_experts", *SHARED_EXPERT_ROWS),
)

K3_TEXT_TABLE = decoder_table(
    *KIMI_NORMS,
    Map("self_attention_res_norm.weight", "attn_input.scale", "D"),
    Map("self_attention_res_proj.weight", "attn_input.query", "1 D -> D"),
    Map("mlp_res_norm.weight", "mlp_input.scale", "D"),
    Map("mlp_res_proj.weight", "mlp_input.query", "1 D -> D"),
    others=(
        *under(
            "model.layers.{attention_layers}",
            "layers.{attention_layers}",
            *deepseek_v3.ATTENTION_ROWS[1:-1],
            Map("self_attn.g_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
        ),
        *under("model.layers.{state_layers}.self_attn", "layers.{state_layers}.attn", *K3_DELTA_ROWS),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.block_sparse_moe", "layers.{J}.moe", *K3_EXPERT_ROWS),
        Map("model.output_attn_res_norm.weight", "norm.input.scale", "D"),
        Map("model.output_attn_res_proj.weight", "norm.input.query", "1 D -> D"),
    ),
)
TABLE = inside(K3_TEXT_TABLE, "language_model.model.", {"vision_tower": SEES, "mm_projector": BRINGS})

FAMILY = family(Config, TABLE, "Kimi K3", "KimiK3ForConditionalGeneration", modalities=(KIMI_K3_VISION,))
