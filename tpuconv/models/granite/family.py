"""Granite 3, dense: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json. `attention_multiplier` is the factor of scores, and not beside another one."""

    model_type: ClassVar[str] = "granite"

    head_dim: int | None = None
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    logits_scaling: float
    residual_multiplier: float
    attention_multiplier: float

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.logits_scaling == 0:
            yield "logits_scaling=0 divides the logits"


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("mlp_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "Granite 3, dense", "GraniteForCausalLM")
