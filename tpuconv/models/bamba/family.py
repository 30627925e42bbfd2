"""Bamba: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, MambaConfig
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import ATTENTION, MAMBA_ROWS, MLP, MLP_BIAS, O_BIAS, QKV_BIAS, when
from tpuconv.models.registry import family


@family_config
class Config(MambaConfig, PartialRopeConfig):
    """The keys of config.json. The layers `attn_layer_indices` have attention; half of each head has rotary positions
    unless `rope_parameters` says otherwise. `partial_rotary_factor` has no effect outside of them."""

    model_type: ClassVar[str] = "bamba"
    left_out: ClassVar[frozenset[str]] = frozenset({"partial_rotary_factor"})

    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    attention_bias: bool
    mlp_bias: bool
    attn_layer_indices: tuple[int, ...] | None
    layer_types: tuple[str, ...] | None = None
    mamba_d_head: int | None = None
    time_step_limit: tuple[float, ...] = (0.0, NO_LIMIT)

    @property
    def kinds(self) -> tuple[str, ...]:
        chosen = self.attn_layer_indices or ()
        return tuple("full_attention" if i in chosen else self.state_kind for i in range(self.num_hidden_layers))


TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under(
            "model.layers.{L}",
            "layers.{L}",
            Map("input_layernorm.weight", "attn_norm.scale", "D"),
            Map("pre_ff_layernorm.weight", "mlp_norm.scale", "D"),
            *under("feed_forward", "mlp", *MLP, *when("mlp_bias", *MLP_BIAS)),
        ),
        *under("model.layers.{f}", "layers.{f}", *ATTENTION, *when("attention_bias", *QKV_BIAS, O_BIAS)),
        *under("model.layers.{l}.mamba", "layers.{l}.attn", *MAMBA_ROWS),
        Map("model.final_layernorm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "Bamba", "BambaForCausalLM")
