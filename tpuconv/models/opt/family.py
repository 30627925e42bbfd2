"""OPT: config and mapping table."""

from collections.abc import Iterator
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import FAIRSEQ_BIASES, FAIRSEQ_ROWS, PositionedConfig, norm_rows
from tpuconv.models.common.rows import when
from tpuconv.models.registry import family


@family_config
class Config(PositionedConfig):
    """The keys of config.json. The vectors of the first two positions are not used."""

    model_type: ClassVar[str] = "opt"
    only: ClassVar = {
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
        "activation_function": ("relu", "gelu"),
    }
    hf_names: ClassVar = {"intermediate_size": "ffn_dim"}
    left_out: ClassVar = frozenset({"dropout", "init_std", "layerdrop"})
    derived: ClassVar = PositionedConfig.derived | {"rms_norm_eps"}
    first_position: ClassVar[int] = 2

    intermediate_size: int
    word_embed_proj_dim: int | None
    activation_function: str
    enable_bias: bool

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            yield (
                f"word_embed_proj_dim={self.word_embed_proj_dim} is not hidden_size={self.hidden_size}: projected "
                "embeddings are not implemented"
            )


TABLE = MappingTable(
    (
        Map("model.decoder.embed_tokens.weight", "embed.embedding", "V D"),
        Map("model.decoder.embed_positions.weight", "positions.embedding", "v D"),
        *under("model.decoder.layers.{L}", "layers.{L}", *FAIRSEQ_ROWS, *when("enable_bias", *FAIRSEQ_BIASES)),
        *norm_rows("model.decoder.final_layer_norm", "norm"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)


FAMILY = family(Config, TABLE, "OPT", "OPTForCausalLM")
