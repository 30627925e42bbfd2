"""XGLM: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import FAIRSEQ_BIASES, FAIRSEQ_ROWS, UnrotatedConfig, norm_rows
from tpuconv.models.registry import family


@family_config
class Config(UnrotatedConfig):
    """The keys of config.json. What is added to embeddings is computed from positions."""

    model_type: ClassVar[str] = "xglm"
    only: ClassVar = {"activation_function": ("gelu",)}
    least: ClassVar[Mapping[str, int]] = {"pad_token_id": 0}
    most: ClassVar[Mapping[str, int]] = {"pad_token_id": 1}  # transformers has zeros at this position, less 2
    hf_names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "ffn_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    }
    left_out: ClassVar = frozenset({"dropout", "activation_dropout", "init_std", "layerdrop", "decoder_start_token_id"})
    derived: ClassVar[frozenset[str]] = UnrotatedConfig.derived | {"rms_norm_eps"}

    intermediate_size: int
    scale_embedding: bool
    pad_token_id: int | None = 1


TABLE = MappingTable(
    (
        Map("model.embed_tokens.weight", "embed.embedding", "V D"),
        *under("model.layers.{L}", "layers.{L}", *FAIRSEQ_ROWS, *FAIRSEQ_BIASES),
        *norm_rows("model.layer_norm", "norm"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore={"model.embed_positions.weights": "computed from config.json"},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILY = family(Config, TABLE, "XGLM", "XGLMForCausalLM")
