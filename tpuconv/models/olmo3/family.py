"""OLMo 3: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope, rope_of_layers
from tpuconv.models.common.windows import ROPES_BY_KIND, PatternConfig
from tpuconv.models.olmo2 import family as olmo2
from tpuconv.models.registry import family

OLMO3_ROPE = Rope(theta=500_000.0)
"""The rotary positions of a config.json without any."""


@family_config
class Config(PatternConfig):
    """The keys of config.json. Layers with a sliding window have rotary positions of their own, `local_rope`, without
    the scaling of the others."""

    model_type: ClassVar[str] = "olmo3"
    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}
    full_every: ClassVar[int] = 4
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND

    head_dim: int | None = None
    local_rope: Rope = OLMO3_ROPE
    attention_bias: bool

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. `rope_scaling` and `rope_theta` of older files apply to the layers that see
        all tokens. transformers has the default theta for the others, so that another one is refused."""
        theta = raw.get("rope_theta")
        full = rope_of_layers(
            raw, "full_attention", OLMO3_ROPE.theta if theta is None else theta, raw.get("rope_scaling")
        )
        sliding = rope_of_layers(raw, "sliding_attention", OLMO3_ROPE.theta)
        nested = raw.get("rope_parameters") or {}
        if nested and raw.get("rope_scaling"):
            raise ConfigError("config.json has both rope_scaling and rope_parameters")
        if theta not in (None, OLMO3_ROPE.theta) and not (nested.get("sliding_attention") or {}).get("rope_theta"):
            raise UnsupportedConfig(f"rope_theta={short(theta)} is not implemented for olmo3, only {OLMO3_ROPE.theta}")
        return {
            "rope": Rope.from_hf(full, cls.model_type, context),
            "local_rope": Rope.from_hf(sliding, cls.model_type, context),
        }


TABLE = olmo2.TABLE

FAMILY = family(Config, TABLE, "OLMo 3", "Olmo3ForCausalLM", model="olmo2")
