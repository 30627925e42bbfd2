"""Hunyuan, dense: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import LARGEST_ROPE_VALUE, Rope, check_rope_keys
from tpuconv.models.common.rows import ATTENTION, MLP, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "hunyuan_v1_dense"

    attention_bias: bool

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. The type `dynamic` with `alpha` means plain rotary positions with theta times
        alpha^(H / (H - 2)); other parameters have no effect then."""
        check_rope_keys(raw)
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        alpha = given.get("alpha")
        if not alpha or given.get("rope_type", given.get("type")) != "dynamic":
            return super().read_ropes(raw, context)
        if type(alpha) not in (int, float) or not 0 < alpha <= LARGEST_ROPE_VALUE:
            raise ConfigError(f"config.json: alpha={short(alpha)} of the rotary positions is not a positive number")
        thetas = {key: value for key, value in [("rope_theta", given.get("rope_theta"))] if value is not None}
        plain = super().read_ropes({"rope_theta": raw.get("rope_theta"), "rope_parameters": thetas}, context)["rope"]
        width, heads = raw.get("hidden_size", cls.hidden_size), raw.get("num_attention_heads", cls.num_attention_heads)
        head = raw.get("head_dim") or width // heads
        if head <= 2:
            raise ConfigError(f"config.json: alpha of the rotary positions needs a head_dim of more than {head}")
        return {"rope": Rope(theta=plain.theta * alpha ** (head / (head - 2)))}


LAYER_ROWS = (
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    Map("self_attn.query_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("self_attn.key_layernorm.weight", "attn.k_norm.scale", "H"),
)

TABLE = decoder_table(*LAYER_ROWS, *under("mlp", "mlp", *MLP))

FAMILY = family(Config, TABLE, "Hunyuan 0.5B to 7B", "HunYuanDenseV1ForCausalLM")
