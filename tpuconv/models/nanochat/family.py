"""nanochat: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTENTION, O_BIAS, QKV_BIAS, decoder_table, when
from tpuconv.models.registry import family


@family_config
class Config(DecoderConfig):
    """The keys of config.json. Norms have no parameters."""

    model_type: ClassVar[str] = "nanochat"
    only: ClassVar = {"hidden_act": ("relu2",)}

    head_dim: int | None = None
    attention_bias: bool
    final_logit_softcapping: float | None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping={self.final_logit_softcapping} is not positive"


NORMED_TABLE = decoder_table(
    *ATTENTION,
    *when("attention_bias", *QKV_BIAS, O_BIAS),
    *under("mlp", "mlp", Map("fc1.weight", "up.kernel", "F D -> D F"), Map("fc2.weight", "down.kernel", "D F -> F D")),
)
TABLE = NORMED_TABLE.with_rows([row for row in NORMED_TABLE.rows if row.jax_names != ("norm.scale",)])

FAMILY = family(Config, TABLE, "nanochat", "NanoChatForCausalLM")
