"""OLMo and its mixtures of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.clipped import ClippedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import Rope, rope_of_layers
from tpuconv.models.common.rows import PROBABLE_EXPERTS
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.common.windows import ROPES_BY_KIND, PatternConfig
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Experts, Mlp, Norms

CLIPPED_ATTENTION = "common.blocks:ClippedAttention"

OLMO = decoder(
    "olmo",
    "OLMo 1B and 7B",
    "OlmoForCausalLM",
    Norms(kind="plain layer"),
    Attn("attention_bias", rope="halves in float32", module=CLIPPED_ATTENTION, keys=("clip_qkv",)),
    Mlp(),
    config=(ClippedConfig, DecoderConfig),
    only={"rms_norm_eps": (1e-5,)},
    defaults={"rms_norm_eps": 1e-5},
)

OLMO2 = decoder(
    "olmo2",
    "OLMo 2",
    "Olmo2ForCausalLM",
    Norms("post", "scaled RMS", between=True),
    Attn("attention_bias", norms="all heads", rope="halves in float32"),
    Mlp(),
)

OLMO3_ROPE = Rope(theta=500_000.0)
"""The rotary positions of a config.json without any."""


@family_config
class Olmo3Config(PatternConfig):
    """Layers with a sliding window have rotary positions of their own, `local_rope`, without the scaling of the
    others."""

    derived: ClassVar[frozenset[str]] = PatternConfig.derived | {"local_rope"}
    full_every: ClassVar[int] = 4
    rope_fields: ClassVar[Mapping[str, str]] = ROPES_BY_KIND

    local_rope: Rope = OLMO3_ROPE

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


OLMO3 = OLMO2.but("olmo3", "OLMo 3", "Olmo3ForCausalLM", config=Olmo3Config, defaults={"head_dim": None})

OLMO_EXPERTS = Experts(
    module="modules.experts:ProbableExperts",
    rows=PROBABLE_EXPERTS,
    keys=("num_experts", "num_experts_per_tok", "norm_topk_prob"),
)
"""`intermediate_size` is the width of one of them."""

OLMOE = decoder(
    "olmoe",
    "OLMoE-1B-7B",
    "OlmoeForCausalLM",
    Norms(),
    Attn("attention_bias", norms="all heads", module=CLIPPED_ATTENTION, keys=("clip_qkv",)),
    OLMO_EXPERTS,
    config=(ClippedConfig, ChosenExperts, DecoderConfig),
)

FLEX_OLMO = decoder(
    "flex_olmo",
    "FlexOlmo 7x7B",
    "FlexOlmoForCausalLM",
    Attn("attention_bias", norms="all heads", rope="halves in float32"),
    Norms("post", "scaled RMS"),
    OLMO_EXPERTS,
    config=(ChosenExperts, DecoderConfig),
)
