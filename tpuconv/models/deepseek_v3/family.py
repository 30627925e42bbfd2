"""DeepSeek V3, R1 and V3.1: config and mapping table."""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import (
    EXPERT_MLPS,
    MLP,
    MTP_COPIES,
    MTP_HEAD,
    MTP_IGNORE,
    SHARED_EXPERT_ROWS,
    decoder_table,
    when,
)
from tpuconv.models.common.sparse import GroupedExperts, MixedMLPs, layers_by_mlp
from tpuconv.models.registry import family
from tpuconv.notation.table import Map, under


@family_config
class Config(GroupedExperts, MixedMLPs, DecoderConfig):
    """The keys of config.json. `qk_head_dim`, which transformers writes, follows from other keys. So does `head_dim`,
    which it computes anew: GLM-5.2 has that of other programs there."""

    model_type: ClassVar[str] = "deepseek_v3"
    only: ClassVar = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }
    least: ClassVar = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "n_shared_experts": 0}

    moe_intermediate_size: int
    num_nextn_predict_layers: int = 1
    n_routed_experts: int
    n_shared_experts: int | None
    routed_scaling_factor: float
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    qk_head_dim: int | None = None
    v_head_dim: int
    n_group: int
    topk_group: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    rope_interleave: bool
    attention_bias: bool

    def contradictions_of_heads(self) -> Iterator[str]:
        heads = self.num_attention_heads
        if self.num_key_value_heads not in (None, heads):
            yield f"num_key_value_heads={self.num_key_value_heads} is not num_attention_heads={heads}"
        if self.qk_head_dim not in (None, self.qk_nope_head_dim + self.qk_rope_head_dim):
            yield f"qk_head_dim={self.qk_head_dim} is not the sum of qk_nope_head_dim and qk_rope_head_dim"
        if self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim={self.qk_rope_head_dim} is odd: rotary positions need pairs"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "D": self.hidden_size,
            "A": self.hidden_size,
            "N": self.num_attention_heads,
            "K": self.num_attention_heads,
            "G": 1,
            "H": self.v_head_dim,
            "P": self.qk_nope_head_dim,
            "R": self.qk_rope_head_dim,
            "C": self.kv_lora_rank,
            "Q": self.q_lora_rank or self.hidden_size,
            "F": self.intermediate_size,
            "E": self.n_routed_experts,
            "M": self.moe_intermediate_size,
            "W": self.moe_intermediate_size * (self.n_shared_experts or 0),
            "V": self.vocab_size,
            **self.head.sizes,
        }

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            **layers_by_mlp(self.mlp_kinds),
            "U": tuple(range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)),
        }

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def has_shared_experts(self) -> bool:
        """True if there are shared experts, which are stored as one MLP."""
        return bool(self.n_shared_experts)

    @property
    def has_query_latent(self) -> bool:
        """True if queries are computed from a latent vector, as keys and values are."""
        return self.q_lora_rank is not None

    @property
    def score_scale(self) -> float:
        """The factor of attention scores. YaRN's factor (arXiv:2309.00071) is `mscale_all_dim` here, and is applied to
        the scores, since only a part of each head has rotary positions."""
        scale = float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        if self.rope.mscale_all_dim and self.rope.factor > 1:
            scale *= (0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1) ** 2
        return scale


QUERIES = ("attn.q_nope.kernel", "attn.q_rope.kernel")
KEYS_VALUES = ("attn.kv_a.kernel", "attn.k_rope.kernel")

ATTENTION_ROWS = (
    Map("input_layernorm.weight", "attn_norm.scale", "D"),
    Map("self_attn.q_proj.weight", QUERIES, "(N (P + R)) D -> D N P, D N R", when="not has_query_latent"),
    Map("self_attn.q_a_proj.weight", "attn.q_a.kernel", "Q D -> D Q", when="has_query_latent"),
    Map("self_attn.q_a_proj.bias", "attn.q_a.bias", "Q", when="has_query_latent and attention_bias"),
    Map("self_attn.q_a_layernorm.weight", "attn.q_a_norm.scale", "Q", when="has_query_latent"),
    Map("self_attn.q_b_proj.weight", QUERIES, "(N (P + R)) Q -> Q N P, Q N R", when="has_query_latent"),
    Map("self_attn.kv_a_proj_with_mqa.weight", KEYS_VALUES, "(C + R) D -> D C, D R"),
    Map(
        "self_attn.kv_a_proj_with_mqa.bias",
        ("attn.kv_a.bias", "attn.k_rope.bias"),
        "(C + R) -> C, R",
        when="attention_bias",
    ),
    Map("self_attn.kv_a_layernorm.weight", "attn.kv_a_norm.scale", "C"),
    Map("self_attn.kv_b_proj.weight", ("attn.k_b.kernel", "attn.v_b.kernel"), "(N (P + H)) C -> C N P, C N H"),
    Map("self_attn.o_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("self_attn.o_proj.bias", "attn.o.bias", "D", when="attention_bias"),
    Map("post_attention_layernorm.weight", "mlp_norm.scale", "D"),
)

EXPERT_ROWS = (
    Map("gate.weight", "router.kernel", "E D -> D E"),
    Map("gate.e_score_correction_bias", "router.correction", "E", buffer=True),
    *EXPERT_MLPS,
    *when("has_shared_experts", *SHARED_EXPERT_ROWS),
)

TABLE = decoder_table(
    *ATTENTION_ROWS,
    others=(
        *under("model.layers.{I}.mlp", "layers.{I}.mlp", *MLP),
        *under("model.layers.{J}.mlp", "layers.{J}.moe", *EXPERT_ROWS),
        *under("model.layers.{U}", "mtp.{U}", *ATTENTION_ROWS, *under("mlp", "moe", *EXPERT_ROWS), *MTP_HEAD),
    ),
    ignore=MTP_IGNORE,
    copies=MTP_COPIES,
)

FAMILY = family(Config, TABLE, "DeepSeek V3, R1, V3.1", "DeepseekV3ForCausalLM")
