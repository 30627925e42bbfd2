"""MPT: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.clipped import ClippedConfig
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV, UnrotatedConfig
from tpuconv.models.registry import family


@family_config
class Config(ClippedConfig, UnrotatedConfig):
    """The keys of config.json, and of `attn_config` in it."""

    model_type: ClassVar[str] = "mpt"
    only: ClassVar = {
        "alibi": (True,),
        "alibi_bias_max": (8,),  # transformers 5.23 computes with 8 whatever it is
        "attn_type": ("multihead_attention",),
        "attn_uses_sequence_id": (False,),
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "prefix_lm": (False,),
        "qk_ln": (False,),
    }
    hf_names: ClassVar = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    synonyms: ClassVar[Mapping[str, str]] = {"max_position_embeddings": "max_seq_len"}
    left_out: ClassVar = frozenset(
        {
            *("attn_impl", "emb_pdrop", "embedding_fraction", "init_config", "init_device"),
            *("tokenizer_name", "verbose"),
            "learned_pos_emb",  # which models with ALiBi do not have, whatever it says
        }
    )
    derived: ClassVar = UnrotatedConfig.derived | {"intermediate_size"}

    clip_qkv: float | None = None
    softmax_scale: float | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(unnested(raw, "attn_config"))


TABLE = MappingTable(
    (
        Map("transformer.wte.weight", "embed.embedding", "V D"),
        *under(
            "transformer.blocks.{L}",
            "layers.{L}",
            Map("norm_1.weight", "attn_norm.scale", "D"),
            Map("attn.Wqkv.weight", GPT_QKV, "((N + K + K) H) D -> D N H, D K H, D K H"),
            Map("attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("norm_2.weight", "mlp_norm.scale", "D"),
            Map("ffn.up_proj.weight", "mlp.up.kernel", "F D -> D F"),
            Map("ffn.down_proj.weight", "mlp.down.kernel", "D F -> F D"),
        ),
        Map("transformer.norm_f.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    copies={"lm_head.weight": "transformer.wte.weight"},
)

FAMILY = family(Config, TABLE, "MPT 7B, 30B", "MptForCausalLM", "MPTForCausalLM")
