"""Falcon-H1: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.hybrid import NO_LIMIT, MambaConfig
from tpuconv.models.common.rows import (
    ATTENTION,
    MAMBA,
    MAMBA_CONV_BIAS,
    MAMBA_IN_BIAS,
    MAMBA_NORM,
    MAMBA_OUT_BIAS,
    MLP,
    MLP_BIAS,
    O_BIAS,
    QKV_BIAS,
    when,
)
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, MappingTable, under


@family_config
class Config(MambaConfig):
    """The keys of config.json. Each layer has both attention and Mamba-2. `mamba_d_ssm` is the width of Mamba-2, if it
    is not `mamba_expand` times that of the model; `ssm_multipliers` are the factors of z, x, B, C and dt."""

    model_type: ClassVar[str] = "falcon_h1"
    other_kinds: ClassVar[tuple[str, ...]] = ("hybrid",)

    attention_bias: bool
    mlp_bias: bool
    layer_types: tuple[str, ...] | None = None
    mamba_d_ssm: int | None
    mamba_d_head: int | None = None
    mamba_norm_before_gate: bool
    mamba_rms_norm: bool
    projectors_bias: bool
    time_step_limit: tuple[float, ...] = (0.0, NO_LIMIT)
    lm_head_multiplier: float
    embedding_multiplier: float
    mlp_multipliers: tuple[float, ...] | None
    key_multiplier: float
    attention_out_multiplier: float
    attention_in_multiplier: float
    ssm_multipliers: tuple[float, ...] | None
    ssm_in_multiplier: float
    ssm_out_multiplier: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.mamba_width != self.mamba_n_heads * self.mamba_head:
            yield f"{self.mamba_n_heads} heads of {self.mamba_head} are not the width {self.mamba_width} of Mamba-2"
        if len(self.mlp_factors) != 2:
            yield f"mlp_multipliers has {len(self.mlp_factors)} numbers, not 2"
        if len(self.ssm_factors) != 5:
            yield f"ssm_multipliers has {len(self.ssm_factors)} numbers, not 5"

    @property
    def mamba_width(self) -> int:
        return super().mamba_width if self.mamba_d_ssm is None else self.mamba_d_ssm

    @property
    def mlp_factors(self) -> tuple[float, ...]:
        """The factors of the gate and of the output of an MLP."""
        return self.mlp_multipliers or (1.0, 1.0)

    @property
    def ssm_factors(self) -> tuple[float, ...]:
        """The factors of z, x, B, C and dt."""
        return self.ssm_multipliers or (1.0,) * 5


TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under(
            "model.layers.{L}",
            "layers.{L}",
            Map("input_layernorm.weight", "attn_norm.scale", "D"),
            Map("pre_ff_layernorm.weight", "mlp_norm.scale", "D"),
            *ATTENTION,
            *when("attention_bias", *QKV_BIAS, O_BIAS),
            *under(
                "mamba",
                "mamba",
                *MAMBA,
                *when("mamba_rms_norm", MAMBA_NORM),
                *when("mamba_conv_bias", MAMBA_CONV_BIAS),
                *when("mamba_proj_bias", MAMBA_IN_BIAS),
                *when("projectors_bias", MAMBA_OUT_BIAS),
            ),
            *under("feed_forward", "mlp", *MLP, *when("mlp_bias", *MLP_BIAS)),
        ),
        Map("model.final_layernorm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "Falcon-H1", "FalconH1ForCausalLM")
