"""BLOOM: config and mapping table."""

from collections.abc import Mapping
from typing import ClassVar

from tpuconv.mapping.table import Map
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV, GPT_QKV_BIAS, UnrotatedConfig, gpt_table, norm_rows
from tpuconv.models.registry import family


@family_config
class Config(UnrotatedConfig):
    """The keys of config.json."""

    model_type: ClassVar[str] = "bloom"
    only: ClassVar = {"apply_residual_connection_post_layernorm": (False,)}
    hf_names: ClassVar = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    aliases: ClassVar[Mapping[str, str]] = {"n_embed": "hidden_size", "seq_length": "max_position_embeddings"}
    left_out: ClassVar = frozenset(
        {
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi"),
            *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id"),
        }
    )
    derived: ClassVar = UnrotatedConfig.derived | {"intermediate_size"}

    max_position_embeddings: int = 2048


TABLE = gpt_table(
    (
        *norm_rows("input_layernorm", "attn_norm"),
        Map("self_attention.query_key_value.weight", GPT_QKV, "(N (H + H + H)) D -> D N H, D N H, D N H"),
        Map("self_attention.query_key_value.bias", GPT_QKV_BIAS, "(N (H + H + H)) -> N H, N H, N H"),
        Map("self_attention.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
        Map("self_attention.dense.bias", "attn.o.bias", "D"),
        *norm_rows("post_attention_layernorm", "mlp_norm"),
        Map("mlp.dense_h_to_4h.weight", "mlp.up.kernel", "F D -> D F"),
        Map("mlp.dense_h_to_4h.bias", "mlp.up.bias", "F"),
        Map("mlp.dense_4h_to_h.weight", "mlp.down.kernel", "D F -> F D"),
        Map("mlp.dense_4h_to_h.bias", "mlp.down.bias", "D"),
    ),
    others=norm_rows("word_embeddings_layernorm", "embed_norm"),
    masks="self_attention.",
    embed="word_embeddings.weight",
)

FAMILY = family(Config, TABLE, "BLOOM, BLOOMZ", "BloomForCausalLM")
