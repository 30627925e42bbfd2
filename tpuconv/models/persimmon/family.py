"""Persimmon: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import norm_rows
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import PRE_NORM_BIASES, PRE_NORMS
from tpuconv.models.gpt_neox.family import NEOX_ATTENTION, NEOX_ATTENTION_BIAS, NEOX_MLP
from tpuconv.models.phi.family import HEAD_LAYER_NORMS
from tpuconv.models.registry import family


@family_config
class Config(PartialRopeConfig):
    """The keys of config.json. Every head has keys and values of its own, whatever `num_key_value_heads` is."""

    model_type: ClassVar[str] = "persimmon"
    only: ClassVar = {"hidden_act": ("relu2",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    left_out: ClassVar[frozenset[str]] = frozenset({"num_key_value_heads"})
    derived: ClassVar[frozenset[str]] = PartialRopeConfig.derived | {"num_key_value_heads"}

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    qk_layernorm: bool


TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under(
            "model.layers.{L}",
            "layers.{L}",
            *PRE_NORMS,
            *PRE_NORM_BIASES,
            *under("self_attn", "attn", *NEOX_ATTENTION, *NEOX_ATTENTION_BIAS),
            *HEAD_LAYER_NORMS,
            *under("mlp", "mlp", *NEOX_MLP),
        ),
        *norm_rows("model.final_layernorm", "norm"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "Persimmon 8B", "PersimmonForCausalLM")
