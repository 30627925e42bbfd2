"""Helium: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, PRE_NORMS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json. The output of attention is as wide as the model."""

    model_type: ClassVar[str] = "helium"

    attention_bias: bool
    mlp_bias: bool

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if (width := self.axes["H"] * self.num_attention_heads) != self.hidden_size:
            yield f"the heads are {width} wide together, which is not hidden_size={self.hidden_size}"


TABLE = decoder_table(
    *PRE_NORMS,
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS),
    *under("mlp", "mlp", *MLP),
    *under("mlp", "mlp", *when("mlp_bias", *MLP_BIAS)),
)

FAMILY = family(Config, TABLE, "Helium 1 2B", "HeliumForCausalLM")
