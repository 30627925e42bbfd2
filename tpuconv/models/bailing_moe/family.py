"""Ling 2 and Ring 2 (Bailing, version 2): config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, MappingTable, under
from tpuconv.models.bailing_hybrid.family import LING_EXPERT_ROWS
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GPT_QKV, GPT_QKV_BIAS
from tpuconv.models.common.rows import MLP, MTP_FINAL, MTP_IGNORE, PRE_NORMS, when
from tpuconv.models.glm4_moe import family as glm4_moe
from tpuconv.models.registry import family


@family_config
class Config(glm4_moe.Config):
    """The keys of config.json. `moe_shared_expert_intermediate_size` follows from others."""

    model_type: ClassVar[str] = "bailing_moe"
    only: ClassVar = {
        "moe_router_enable_expert_bias": (True,),
        "moe_router_enable_routed_scaling": (True,),
        "moe_router_enable_shared_expert": (True,),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "norm_topk_prob": (True,),
        "rope_interleave": (False,),
        "router_dtype": ("fp32",),
        "score_function": ("sigmoid",),
        "use_bias": (False,),
        "use_qk_norm": (True,),
        "use_rmsnorm": (True,),
        "use_sliding_window": (False,),
    }
    aliases: ClassVar = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": 600000.0}

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    moe_intermediate_size: int = 512
    moe_shared_expert_intermediate_size: int | None = None
    num_hidden_layers: int = 20
    num_nextn_predict_layers: int = 0
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    n_routed_experts: int = 256
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    partial_rotary_factor: float = 1.0
    use_qk_norm: bool = True

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if (width := self.moe_shared_expert_intermediate_size) not in (None, self.moe_intermediate_size):
            yield f"moe_shared_expert_intermediate_size={width} is not moe_intermediate_size"


LING2_ROWS = (
    *PRE_NORMS,
    Map("attention.query_key_value.weight", GPT_QKV, "((N + K + K) H) D -> D N H, D K H, D K H"),
    *when("attention_bias", Map("attention.query_key_value.bias", GPT_QKV_BIAS, "((N + K + K) H) -> N H, K H, K H")),
    Map("attention.query_layernorm.weight", "attn.q_norm.scale", "H"),
    Map("attention.key_layernorm.weight", "attn.k_norm.scale", "H"),
    Map("attention.dense.weight", "attn.o.kernel", "D (N H) -> N H D"),
)

TABLE = MappingTable(
    (
        Map("model.word_embeddings.weight", "embed.embedding", "V D"),
        *under("model.layers.{L}", "layers.{L}", *LING2_ROWS),
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.mlp", "layers.{J}.moe", *LING_EXPERT_ROWS),
        *under("model.layers.{U}", "mtp.{U}", *LING2_ROWS, *under("mlp", "moe", *LING_EXPERT_ROWS), *MTP_FINAL),
        Map("model.norm.weight", "norm.scale", "D"),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
    ),
    ignore=MTP_IGNORE,
    copies={"lm_head.weight": "model.word_embeddings.weight"},
)

FAMILY = family(Config, TABLE, "Ling 2, Ring 2", "BailingMoeV2ForCausalLM", model="glm4_moe")
