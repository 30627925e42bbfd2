"""Phi-1, 1.5 and 2: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import ATTENTION, QKV_BIAS, when
from tpuconv.models.registry import family


@family_config
class Config(PartialRopeConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "phi"
    only: ClassVar = {"hidden_act": ("gelu_new",)}
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    qk_layernorm: bool

    @property
    def has_head_bias(self) -> bool:
        return self.has_lm_head


HEAD_LAYER_NORMS = when(
    "qk_layernorm",
    Map("self_attn.q_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("self_attn.q_layernorm.bias", "attn.q_norm.bias", "H"),
    Map("self_attn.k_layernorm.weight", "attn.k_norm.scale", "H"),
    Map("self_attn.k_layernorm.bias", "attn.k_norm.bias", "H"),
)

TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under(
            "model.layers.{L}",
            "layers.{L}",
            Map("input_layernorm.weight", "norm.scale", "D"),
            Map("input_layernorm.bias", "norm.bias", "D"),
            *ATTENTION[:3],
            *QKV_BIAS,
            Map("self_attn.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("self_attn.dense.bias", "attn.o.bias", "D"),
            *HEAD_LAYER_NORMS,
            *under(
                "mlp",
                "mlp",
                Map("fc1.weight", "up.kernel", "F D -> D F"),
                Map("fc1.bias", "up.bias", "F"),
                Map("fc2.weight", "down.kernel", "D F -> F D"),
                Map("fc2.bias", "down.bias", "D"),
            ),
        ),
        Map("model.final_layernorm.weight", "norm.scale", "D"),
        Map("model.final_layernorm.bias", "norm.bias", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        Map("lm_head.bias", "lm_head.bias", "V", when="has_head_bias"),
    ),
    ignore={"model.layers.{L}.self_attn.rotary_emb.inv_freq": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "Phi-1, Phi-1.5, Phi-2", "PhiForCausalLM")
