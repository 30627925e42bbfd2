"""LongCat-Flash: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tpuconv.mapping.table import Map, under
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import EXPERT_MLPS, FURTHER_TOKENS, MLP, MTP_INPUTS, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family

LONGCAT_ROPE = Rope(theta=1e7)
"""The rotary positions of a config.json without any."""


@dataclass(frozen=True)
class Config(deepseek_v3.Config):
    """The keys of config.json. A layer has two attentions and two MLPs, and experts beside the second ones.
    `zero_expert_num` experts return their input."""

    model_type: ClassVar[str] = "longcat_flash"
    only: ClassVar = {
        "rope_interleave": (True,),
        "attention_bias": (False,),
        "router_bias": (False,),
        "zero_expert_type": ("identity",),
        "mla_scale_q_lora": (True,),
        "mla_scale_kv_lora": (True,),
        "norm_topk_prob": (False,),
        "first_k_dense_replace": (0,),
    }
    least: ClassVar = {"num_nextn_predict_layers": 0, "first_k_dense_replace": 0, "zero_expert_num": 0}
    default_rope: ClassVar[Mapping[str, Any]] = {"rope_theta": LONGCAT_ROPE.theta}
    hf_names: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
    }

    vocab_size: int = 131072
    hidden_size: int = 6144
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 28
    num_nextn_predict_layers: int = 0
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None
    n_routed_experts: int = 512
    n_shared_experts: int | None = None
    zero_expert_num: int = 256
    routed_scaling_factor: float = 6.0
    q_lora_rank: int = 1536
    n_group: int = 1
    topk_group: int = 1
    num_experts_per_tok: int = 12
    first_k_dense_replace: int = 0
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope: Rope = LONGCAT_ROPE

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim not in (None, self.qk_rope_head_dim):  # the reference's rotary positions are of this width
            yield f"head_dim={self.head_dim} is not qk_rope_head_dim={self.qk_rope_head_dim}"

    @property
    def axes(self) -> dict[str, Any]:
        experts = self.n_routed_experts + self.zero_expert_num
        return {**super().axes, "z": experts, "y": tuple(range(self.n_routed_experts, experts)), "U": (0,)}


NO_WEIGHTS = "an expert that passes its input on: transformers saves weights that nothing reads"

HALVES = ("first", "second")
"""The parts of a layer, each of which has attention and an MLP."""


def half_rows(half: int) -> tuple[Map, ...]:
    """Returns the rows of a part of a layer."""
    renamed = {name: f"{name}.{half}" for name in ("self_attn", "input_layernorm", "post_attention_layernorm")}
    rows = []
    for row in deepseek_v3.ATTENTION_ROWS:
        module, _, rest = row.hf_names[0].partition(".")
        jax = tuple(f"{HALVES[half]}.{name}" for name in row.jax_names)
        rows.append(replace(row, hf=f"{renamed[module]}.{rest}", jax=jax))
    return (*rows, *under(f"mlps.{half}", f"{HALVES[half]}.mlp", *MLP))


LONGCAT_MTP_ROWS = (
    *(replace(row, hf=row.hf_names[0].replace("norm.", "norm.m.")) for row in MTP_INPUTS),
    *deepseek_v3.ATTENTION_ROWS,
    *under("transformer_layer.mlp", "mlp", *MLP),
)
"""The layer for multi-token prediction. It has one attention and one MLP."""

TABLE = decoder_table(
    *half_rows(0),
    *half_rows(1),
    *under(
        "mlp",
        "moe",
        Map("router.classifier.weight", "router.kernel", "z D -> D z"),
        Map("router.e_score_correction_bias", "router.correction", "z", buffer=True),
        *EXPERT_MLPS,
    ),
    others=(
        *under("model.mtp.layers.{U}", "mtp.{U}", *LONGCAT_MTP_ROWS),
        Map("model.mtp.norm.weight", "mtp.0.norm.scale", "D"),
        Map("model.mtp.embed_tokens.weight", "mtp.embed.embedding", "V D"),
    ),
    ignore={
        "model.mtp.*": FURTHER_TOKENS,
        **{f"model.layers.{{L}}.mlp.experts.{{y}}.{name}.weight": NO_WEIGHTS for name in ("gate_proj", "up_proj")},
    },
)

FAMILY = family(Config, TABLE, "LongCat-Flash", "LongcatFlashForCausalLM")
