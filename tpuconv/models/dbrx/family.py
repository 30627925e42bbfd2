"""DBRX: config and mapping table."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.common.clipped import ClippedConfig
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV
from tpuconv.models.common.sparse import ChosenExperts
from tpuconv.models.registry import family


@family_config
class Config(ClippedConfig, ChosenExperts, DecoderConfig):
    """The keys of config.json, and of `attn_config` and `ffn_config` in it. `intermediate_size` is the width of one
    expert."""

    model_type: ClassVar[str] = "dbrx"
    only: ClassVar = {
        "ffn_act_fn": ({"name": "silu"}, None),
        "moe_normalize_expert_weights": (1.0,),
        "tie_word_embeddings": (False,),
    }
    hf_names: ClassVar = {
        "hidden_size": "d_model",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "kv_n_heads",
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "max_position_embeddings": "max_seq_len",
    }
    # transformers writes these copies.
    synonyms: ClassVar[Mapping[str, str]] = {"hidden_size": "d_model", "num_key_value_heads": "kv_n_heads"}
    left_out: ClassVar = frozenset({"emb_pdrop", "moe_jitter_eps", "moe_loss_weight"})
    derived: ClassVar = DecoderConfig.derived | {"head_dim", "rms_norm_eps"}

    intermediate_size: int = 3584
    num_key_value_heads: int | None = 1
    head_dim: int | None = None
    num_experts: int = 4
    num_experts_per_tok: int = 1
    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(unnested(raw, "attn_config", "ffn_config"))


TABLE = MappingTable(
    (
        Map("transformer.wte.weight", "embed.embedding", "V D"),
        *under(
            "transformer.blocks.{L}",
            "layers.{L}",
            Map("norm_attn_norm.norm_1.weight", "attn_norm.scale", "D"),
            Map("norm_attn_norm.attn.Wqkv.weight", GPT_QKV, "((N + K + K) H) D -> D N H, D K H, D K H"),
            Map("norm_attn_norm.attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("norm_attn_norm.norm_2.weight", "mlp_norm.scale", "D"),
            Map("ffn.router.layer.weight", "moe.router.kernel", "E D -> D E"),
            Map("ffn.experts.mlp.w1", "moe.gate.kernel", "(E M) D -> E D M"),
            Map("ffn.experts.mlp.v1", "moe.up.kernel", "(E M) D -> E D M"),
            Map("ffn.experts.mlp.w2", "moe.down.kernel", "(E M) D -> E M D"),
        ),
        Map("transformer.norm_f.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
)

FAMILY = family(Config, TABLE, "DBRX", "DbrxForCausalLM")
