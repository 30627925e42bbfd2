"""BioGPT: config and mapping table."""

from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import FAIRSEQ_BIASES, FAIRSEQ_ROWS, PositionedConfig, norm_rows
from tpuconv.models.registry import family


@family_config
class Config(PositionedConfig):
    """The keys of config.json. The vectors of the first two positions are not used, and `layer_norm_eps` has no
    effect."""

    model_type: ClassVar[str] = "biogpt"
    only: ClassVar = {"hidden_act": ("gelu",)}
    left_out: ClassVar = frozenset(
        {
            *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"),
            "layer_norm_eps",
        }
    )
    derived: ClassVar[frozenset[str]] = PositionedConfig.derived | {"rms_norm_eps"}
    first_position: ClassVar[int] = 2

    intermediate_size: int
    scale_embedding: bool


TABLE = MappingTable(
    (
        Map("biogpt.embed_tokens.weight", "embed.embedding", "V D"),
        Map("biogpt.embed_positions.weight", "positions.embedding", "v D"),
        *under("biogpt.layers.{L}", "layers.{L}", *FAIRSEQ_ROWS, *FAIRSEQ_BIASES),
        *norm_rows("biogpt.layer_norm", "norm"),
        Map("output_projection.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"output_projection.weight": "biogpt.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "BioGPT", "BioGptForCausalLM")
