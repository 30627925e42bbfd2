"""Phi-3.5-MoE: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rope import check_rope_keys
from tpuconv.models.common.rows import (
    ATTENTION,
    NORM_BIAS,
    NUMBERED_EXPERT_MLPS,
    O_BIAS,
    PRE_NORM_BIASES,
    PRE_NORMS,
    QKV_BIAS,
    decoder_table,
    when,
)
from tpuconv.models.common.windows import OneWindow
from tpuconv.models.registry import family

FACTORS = ("short_mscale", "long_mscale")


@family_config
class Config(OneWindow, DecoderConfig):
    """The keys of config.json. `intermediate_size` is the width of one expert. `router_jitter_noise` limits which other
    experts count in the probability of a chosen one."""

    model_type: ClassVar[str] = "phimoe"
    only: ClassVar = {"num_experts_per_tok": (2,)}

    head_dim: int | None = None
    sliding_window: int | None
    num_local_experts: int
    router_jitter_noise: float = 0.01
    attention_bias: bool
    lm_head_bias: bool

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """As `DecoderConfig.read_ropes`. Cosine and sine have the factor `short_mscale`, equal to `long_mscale`."""
        check_rope_keys(raw)
        raw = dict(raw)
        for key in ("rope_scaling", "rope_parameters"):
            given = raw.get(key) or {}
            if FACTORS[0] not in given and FACTORS[1] not in given:
                continue
            small, large = (given.get(name) for name in FACTORS)
            if small != large:
                raise UnsupportedConfig(
                    f"{key} with short_mscale={short(small)} and long_mscale={short(large)} is not implemented for "
                    f"{cls.model_type}: they must be equal"
                )
            raw[key] = {k: v for k, v in given.items() if k not in FACTORS} | {"attention_factor": small}
        return super().read_ropes(raw, context)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_local_experts < 2:
            yield f"num_local_experts={self.num_local_experts} is less than 2"

    @property
    def axes(self) -> dict[str, Any]:
        return {**super().axes, "E": self.num_local_experts, "M": self.intermediate_size}

    @property
    def has_head_bias(self) -> bool:
        return self.lm_head_bias and self.has_lm_head


TABLE = decoder_table(
    *PRE_NORMS,
    *PRE_NORM_BIASES,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    Map("block_sparse_moe.gate.weight", "moe.router.kernel", "E D -> D E"),
    *under("block_sparse_moe", "moe", *NUMBERED_EXPERT_MLPS),
    others=(NORM_BIAS, Map("lm_head.bias", "lm_head.bias", "V", when="has_head_bias")),
)

FAMILY = family(Config, TABLE, "Phi-3.5-MoE, Phi-mini-MoE", "PhimoeForCausalLM", "PhiMoEForCausalLM")
