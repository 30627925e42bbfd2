"""LongCat-Flash: config and mapping table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.rows import EXPERT_MLPS, FURTHER_TOKENS, MLP, MTP_INPUTS, decoder_table
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    router_outputs=Word("experts, and those that pass their input on"),
)


@family_config
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
    hf_names: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
    }

    num_nextn_predict_layers: int = 0
    n_shared_experts: int | None = None
    zero_expert_num: int
    q_lora_rank: int
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 0
    head_dim: int | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim not in (None, self.qk_rope_head_dim):  # the reference's rotary positions are of this width
            yield f"head_dim={self.head_dim} is not qk_rope_head_dim={self.qk_rope_head_dim}"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "router_outputs": self.n_routed_experts + self.zero_expert_num}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "U": (0,)}


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
        Map("router.classifier.weight", "router.kernel", "router_outputs D -> D router_outputs"),
        Map("router.e_score_correction_bias", "router.correction", "router_outputs", buffer=True),
        *EXPERT_MLPS,
    ),
    others=(
        *under("model.mtp.layers.{U}", "mtp.{U}", *LONGCAT_MTP_ROWS),
        Map("model.mtp.norm.weight", "mtp.0.norm.scale", "D"),
        Map("model.mtp.embed_tokens.weight", "mtp.embed.embedding", "V D"),
    ),
    ignore={
        "model.mtp.*": FURTHER_TOKENS,
        **{
            f"model.layers.{{L}}.mlp.experts.{{E..router_outputs}}.{name}.weight": NO_WEIGHTS
            for name in ("gate_proj", "up_proj")
        },
    },
)

FAMILY = family(Config, TABLE, "LongCat-Flash", "LongcatFlashForCausalLM")
