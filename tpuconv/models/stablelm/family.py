"""StableLM: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import ATTENTION, MLP, NORM_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(PartialRopeConfig):
    """The keys of config.json. Every head has a norm of its own for queries or keys, with `qk_layernorm`."""

    model_type: ClassVar[str] = "stablelm"
    hf_names: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    head_dim: int | None = None
    partial_rotary_factor: float = 0.25
    use_qkv_bias: bool
    qk_layernorm: bool
    use_parallel_residual: bool

    @property
    def has_two_norms(self) -> bool:
        """True if the MLP of a layer has a norm of its own."""
        return not self.use_parallel_residual


TABLE = decoder_table(
    Map("input_layernorm.weight", "attn_norm.scale", "D"),
    Map("input_layernorm.bias", "attn_norm.bias", "D"),
    *when(
        "has_two_norms",
        Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
        Map("post_attention_layernorm.bias", "mlp_norm.bias", "D"),
    ),
    *ATTENTION,
    *when("use_qkv_bias", *QKV_BIAS),
    *when(
        "qk_layernorm",
        Map("self_attn.q_layernorm.norms.{N}.weight", "attn.q_norm.scale", "H -> N H"),
        Map("self_attn.k_layernorm.norms.{K}.weight", "attn.k_norm.scale", "H -> K H"),
    ),
    *under("mlp", "mlp", *MLP),
    others=(NORM_BIAS,),
)

FAMILY = family(Config, TABLE, "StableLM 2, StableLM 3B, StableCode", "StableLmForCausalLM")
