"""VaultGemma: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import ATTN_NORM, MLP, decoder_table
from tpuconv.models.gemma.family import BIASED_ATTENTION
from tpuconv.models.gemma2 import family as gemma2
from tpuconv.models.registry import family


@family_config
class Config(gemma2.Config):
    """The keys of config.json."""

    model_type: ClassVar[str] = "vaultgemma"


TABLE = decoder_table(
    ATTN_NORM,
    Map("pre_feedforward_layernorm.weight", "mlp_norm.scale", "D"),
    *BIASED_ATTENTION,
    *under("mlp", "mlp", *MLP),
)

FAMILY = family(Config, TABLE, "VaultGemma 1B", "VaultGemmaForCausalLM")
