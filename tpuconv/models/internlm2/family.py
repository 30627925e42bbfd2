"""InternLM 2 and 2.5: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV
from tpuconv.models.llama import family as llama
from tpuconv.models.registry import family


@family_config
class Config(llama.Config):
    """The keys of config.json."""

    model_type: ClassVar[str] = "internlm2"
    only: ClassVar = {"bias": (False,), "attention_bias": (False,), "mlp_bias": (False,)}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 1000000.0}

    vocab_size: int = 103168


INTERNLM2_ROWS = (
    Map("attention_norm.weight", "attn_norm.scale", "D"),
    Map("attention.wqkv.weight", GPT_QKV, "(K (G + 1 + 1) H) D -> D (K G) H, D K H, D K H"),
    Map("attention.wo.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("ffn_norm.weight", "mlp_norm.scale", "D"),
    Map("feed_forward.w1.weight", "mlp.gate.kernel", "F D -> D F"),
    Map("feed_forward.w3.weight", "mlp.up.kernel", "F D -> D F"),
    Map("feed_forward.w2.weight", "mlp.down.kernel", "D F -> F D"),
)

TABLE = MappingTable(
    (
        Map("model.tok_embeddings.weight", "embed.embedding", "V D"),
        *under("model.layers.{L}", "layers.{L}", *INTERNLM2_ROWS),
        Map("model.norm.weight", "norm.scale", "D"),
        Map("output.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"output.weight": "model.tok_embeddings.weight"},
)

FAMILY = family(Config, TABLE, "InternLM 2, 2.5", "InternLM2ForCausalLM", model="llama")
