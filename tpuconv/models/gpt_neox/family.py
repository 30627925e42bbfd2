"""GPT-NeoX: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import PRE_NORM_BIASES, PRE_NORMS, when
from tpuconv.models.registry import family

NEOX_NAMES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
"""Keys of config.json, and the keys that they stand for."""


@family_config
class Config(PartialRopeConfig):
    """The keys of config.json. Every head has keys and values of its own."""

    model_type: ClassVar[str] = "gpt_neox"
    only: ClassVar = {"hidden_act": ("gelu",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}
    left_out: ClassVar[frozenset[str]] = frozenset({*NEOX_NAMES, "num_key_value_heads"})

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    partial_rotary_factor: float = 0.25
    use_parallel_residual: bool
    attention_bias: bool

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `PartialRopeConfig.in_our_keys`. `NEOX_NAMES` are read where the keys that they stand for are absent."""
        given = {key: raw[old] for old, key in NEOX_NAMES.items() if raw.get(old) is not None}
        return super().in_our_keys({**given, **raw})


NEOX_ATTENTION = (
    Map("query_key_value.weight", ("q.kernel", "k.kernel", "v.kernel"), "(N (H + H + H)) D -> D N H, D N H, D N H"),
    Map("dense.weight", "o.kernel", "D (N H) -> N H D"),
)
NEOX_ATTENTION_BIAS = (
    Map("query_key_value.bias", ("q.bias", "k.bias", "v.bias"), "(N (H + H + H)) -> N H, N H, N H"),
    Map("dense.bias", "o.bias", "D"),
)
NEOX_MLP = (
    Map("dense_h_to_4h.weight", "up.kernel", "F D -> D F"),
    Map("dense_h_to_4h.bias", "up.bias", "F"),
    Map("dense_4h_to_h.weight", "down.kernel", "D F -> F D"),
    Map("dense_4h_to_h.bias", "down.bias", "D"),
)

TABLE = MappingTable(
    (
        Map("gpt_neox.embed_in.weight", "embed.embedding", "V D"),
        *under(
            "gpt_neox.layers.{L}",
            "layers.{L}",
            *PRE_NORMS,
            *PRE_NORM_BIASES,
            *under("attention", "attn", *NEOX_ATTENTION, *when("attention_bias", *NEOX_ATTENTION_BIAS)),
            *under("mlp", "mlp", *NEOX_MLP),
        ),
        Map("gpt_neox.final_layer_norm.weight", "norm.scale", "D"),
        Map("gpt_neox.final_layer_norm.bias", "norm.bias", "D"),
        Map("embed_out.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={
        "gpt_neox.layers.{L}.attention.rotary_emb.inv_freq": "computed from config.json",
        "gpt_neox.layers.{L}.attention.bias": "the causal mask",
        "gpt_neox.layers.{L}.attention.masked_bias": "the score of a masked key",
    },
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
)

FAMILY = family(Config, TABLE, "GPT-NeoX-20B, Pythia", "GPTNeoXForCausalLM")
